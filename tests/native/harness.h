// Ranks as threads of one process, and checks that say both sides.
#ifndef ND_TESTS_HARNESS_H
#define ND_TESTS_HARNESS_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "nd_core.h"

#define CHECK_EQ(seen, wanted, ...)                                                                   \
  do {                                                                                                \
    const long long seen_ = static_cast<long long>(seen), wanted_ = static_cast<long long>(wanted);   \
    if (seen_ != wanted_) {                                                                           \
      fprintf(stderr, "%s:%d: %s is %lld, wanted %lld; ", __FILE__, __LINE__, #seen, seen_, wanted_); \
      fprintf(stderr, __VA_ARGS__);                                                                   \
      fprintf(stderr, "\n");                                                                          \
      exit(1);                                                                                        \
    }                                                                                                 \
  } while (0)

constexpr uint64_t kSecond = 1000000000;

struct Settings {
  uint64_t timeout_ns = 60 * kSecond;
  uint64_t spin_ns = 20000;
  uint64_t one_shot_bytes = 16384;
};

// Runs body(rank, group) on `world` threads that share one segment, in one mapping: only then does TSAN see
// that what one rank publishes happens before another reads it.
inline void run_ranks(int world, const std::function<void(int, NdGroup*)>& body,
                      const Settings& settings = {}) {
  const NdTuning tuning{settings.one_shot_bytes};
  int fd = -1;
  CHECK_EQ(nd_segment_create(world, 7, &tuning, nullptr, &fd), 0, "world %d", world);
  void* segment = nullptr;
  CHECK_EQ(nd_segment_map(fd, world, 7, &segment), 0, "world %d", world);
  close(fd);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      const NdOptions options{settings.timeout_ns, settings.spin_ns};
      NdGroup* group = nullptr;
      CHECK_EQ(nd_group_open_mapped(segment, rank, world, &options, &group), 0, "rank %d", rank);
      CHECK_EQ(nd_group_connect(group, nullptr), 0, "rank %d", rank);
      body(rank, group);
      CHECK_EQ(nd_group_close(group), 0, "rank %d", rank);
    });
  for (auto& thread : threads) thread.join();
  nd_unmap(segment, nd_segment_bytes(world));
}

// Sizes around the limits of lines, slots and slices, and random ones between.
inline size_t pick_bytes(std::mt19937& rng) {
  static const size_t edges[] = {0,     2,     126,   128,    130,    16384, 16386,
                                 65534, 65536, 65538, 131072, 131074, 400002};
  if (rng() % 3 == 0) return edges[rng() % (sizeof edges / sizeof *edges)];
  return (rng() % (1u << (1 + rng() % 19))) & ~size_t{1};
}

// Now and then a rank is late.
inline void dawdle(std::mt19937& rng) {
  const unsigned kind = rng() % 64;
  if (kind == 0) usleep(rng() % 300);
  if (kind < 8) std::this_thread::yield();
  if (kind < 20)
    for (unsigned volatile i = rng() % 2000; i > 0; i = i - 1) {
    }
}

// A tensor at any element of a larger buffer, with guard bytes that must not change.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : bytes_(bytes), offset_(offset), data_(offset + bytes + 16, kGuard) {}
  char* data() { return data_.data() + offset_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  void check_guards(const char* what) const {
    for (size_t i = 0; i < data_.size(); ++i)
      if (i < offset_ || i >= offset_ + bytes_)
        CHECK_EQ(data_[i], kGuard, "%s wrote outside, at %lld of %zu bytes", what,
                 static_cast<long long>(i) - static_cast<long long>(offset_), bytes_);
  }

 private:
  static constexpr char kGuard = 0x5a;
  size_t bytes_, offset_;
  std::vector<char> data_;
};

#endif
