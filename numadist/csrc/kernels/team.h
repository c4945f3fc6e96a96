// The OpenMP team that kernels work on: the program's own, so that no second one waits on the same CPUs.
#ifndef ND_TEAM_H
#define ND_TEAM_H

#include <atomic>

#include "nd_core.h"

namespace nd {

// body(data) on every thread of the calling thread's team, on the caller alone without nd_team_use.
void run_on_team(void (*body)(void*), void* data);
// Inside a body.
int thread_index();
int num_threads();

// body(begin, end) on every thread, for its share of 0 ... count - 1, which may be empty: neighbours, whose
// memory is neighbouring too.
template <class Body>
void for_shares(size_t count, const Body& body) {
  struct Work {
    const Body& body;
    size_t count;
  } work{body, count};
  const auto run = [](void* arg) {
    const Work& w = *static_cast<Work*>(arg);
    const size_t parts = static_cast<size_t>(num_threads()), part = static_cast<size_t>(thread_index());
    w.body(w.count * part / parts, w.count * (part + 1) / parts);
  };
  run_on_team(run, &work);
}

// body(0) ... body(count - 1), each once, in such shares.
template <class Body>
void for_neighbours(size_t count, const Body& body) {
  for_shares(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) body(i);
  });
}

// body(0) ... body(count - 1), each once, on whichever thread is free; returns when all are done.
template <class Body>
void for_each_item(int count, const Body& body) {
  struct Work {
    const Body& body;
    const int count;
    std::atomic<int> next{0};
  } work{body, count};
  const auto run = [](void* arg) {
    Work& w = *static_cast<Work*>(arg);
    // relaxed: items are independent, and the end of the region orders what they wrote.
    for (int i; (i = w.next.fetch_add(1, std::memory_order_relaxed)) < w.count;) w.body(i);
  };
  if (count == 1)
    body(0);
  else
    run_on_team(run, &work);
}

}  // namespace nd

#endif
