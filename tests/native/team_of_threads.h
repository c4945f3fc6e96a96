// A team as OpenMP gives one: threads of the caller's, joined at the end.
#ifndef ND_TESTS_TEAM_OF_THREADS_H
#define ND_TESTS_TEAM_OF_THREADS_H

#include <thread>
#include <vector>

#include "nd_core.h"

constexpr int kThreads = 3;
inline thread_local int index_of_thread = 0;

// For nd_team_use.
inline NdTeam team_of_threads() {
  const auto parallel = [](void (*body)(void*), void* data, unsigned, unsigned) {
    std::vector<std::thread> threads;
    for (int i = 1; i < kThreads; ++i)
      threads.emplace_back([=] {
        index_of_thread = i;
        body(data);
      });
    body(data);
    for (auto& thread : threads) thread.join();
  };
  return {parallel, [] { return index_of_thread; }, [] { return kThreads; }};
}

#endif
