// The program's OpenMP runtime, by its entry points.
#include "kernels/team.h"

#include <errno.h>

namespace nd {
namespace {

// Written once, before any call that reads it: see nd_team_use.
NdTeam entries = {nullptr, nullptr, nullptr};

struct Counts {
  std::atomic<int> threads{0}, fresh{0};
};

thread_local bool counted = false;

void count_me(void* data) {
  // relaxed: the end of the region orders them before the caller reads.
  auto* counts = static_cast<Counts*>(data);
  counts->threads.fetch_add(1, std::memory_order_relaxed);
  if (!counted) counts->fresh.fetch_add(1, std::memory_order_relaxed);
  counted = true;
}

}  // namespace

void run_on_team(void (*body)(void*), void* data) {
  if (entries.parallel == nullptr)
    body(data);
  else
    entries.parallel(body, data, 0, 0);
}

int thread_index() { return entries.parallel == nullptr ? 0 : entries.thread_index(); }
int num_threads() { return entries.parallel == nullptr ? 1 : entries.num_threads(); }

}  // namespace nd

int nd_team_use(const NdTeam* team) {
  if (team->parallel == nullptr || team->thread_index == nullptr || team->num_threads == nullptr)
    return -EINVAL;
  nd::entries = *team;
  return 0;
}

int nd_team_form(int* threads, int* fresh) {
  nd::Counts counts;
  nd::run_on_team(nd::count_me, &counts);
  *threads = counts.threads.load(std::memory_order_relaxed);
  *fresh = counts.fresh.load(std::memory_order_relaxed);
  return 0;
}
