// What a group does when a rank is late, different, gone, killed or forked. Usage: test_faults
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include <atomic>

#include "harness.h"

namespace {

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

NdReport report_of(NdGroup* group) {
  NdReport report;
  CHECK_EQ(nd_group_report(group, &report), 0, "report");
  return report;
}

// The last rank comes only when the others gave up, and must not go on alone then.
void late_rank_times_out_everywhere(int world) {
  Settings settings;
  settings.timeout_ns = kSecond / 10;
  std::atomic<int> gave_up{0};
  run_ranks(
      world,
      [&](int rank, NdGroup* group) {
        const bool late = rank == world - 1;
        while (late && gave_up.load() < world - 1) std::this_thread::yield();
        float x = 1;
        CHECK_EQ(nd_all_reduce(group, &x, &x, 1, ND_F32, ND_SUM), -ETIMEDOUT, "rank %d of %d", rank, world);
        const NdReport report = report_of(group);
        CHECK_EQ(report.seq, 1, "rank %d", rank);
        CHECK_EQ(report.mine.coll, ND_ALL_REDUCE, "rank %d", rank);
        CHECK_EQ(report.mine.bytes, 4, "rank %d", rank);
        std::vector<int8_t> state(world);
        CHECK_EQ(nd_group_peers(group, state.data()), 0, "rank %d", rank);
        if (!late && report.reporter == rank)
          CHECK_EQ(state[world - 1], 0, "rank %d sees the late rank", rank);
        CHECK_EQ(nd_barrier(group), -ETIMEDOUT, "the error must stay, rank %d", rank);
        gave_up.fetch_add(1);
      },
      settings);
}

// Ranks whose number is odd make another call than the others.
void different_calls_fail_everywhere(int world, int first, int second) {
  const auto call = [](int kind, NdGroup* group, int world_size) {
    std::vector<char> x(64 * world_size + 256);
    std::vector<const void*> ins(world_size, x.data());
    std::vector<void*> outs(world_size, x.data() + 64 * world_size);
    switch (kind) {
      case 0:
        return nd_barrier(group);
      case 1:
        return nd_all_reduce(group, x.data(), x.data(), 16, ND_F32, ND_SUM);
      case 2:
        return nd_all_reduce(group, x.data(), x.data(), 16, ND_I32, ND_SUM);
      case 3:
        return nd_all_reduce(group, x.data(), x.data(), 16, ND_F32, ND_MAX);
      case 4:
        return nd_all_reduce(group, x.data(), x.data(), 15, ND_F32, ND_SUM);
      case 5:
        return nd_broadcast(group, x.data(), 64, ND_I32, 0);
      case 6:
        return nd_broadcast(group, x.data(), 64, ND_I32, 1);
      case 7:
        return nd_all_gather(group, x.data(), outs.data(), 64, ND_I32);
      case 8:
        return nd_reduce_scatter(group, ins.data(), outs[0], 16, ND_F32, ND_SUM);
      case 9:
        return nd_scatter(group, ins.data(), outs[0], 64, ND_I32, 0);
      case 10:
        return nd_gather(group, x.data(), outs.data(), 64, ND_I32, 0);
      case 11:
        return nd_reduce(group, x.data(), x.data(), 16, ND_F32, ND_SUM, 0);
      default: {
        std::vector<size_t> bytes(world_size, 64);
        return nd_all_to_all(group, ins.data(), bytes.data(), outs.data(), bytes.data(), ND_I32);
      }
    }
  };
  run_ranks(world, [&](int rank, NdGroup* group) {
    CHECK_EQ(nd_barrier(group), 0, "rank %d", rank);
    CHECK_EQ(call(rank % 2 ? second : first, group, world), -EPROTO, "calls %d and %d, rank %d of %d", first,
             second, rank, world);
    const NdReport report = report_of(group);
    CHECK_EQ(report.seq, 2, "rank %d", rank);
    CHECK_EQ(memcmp(&report.mine, &report.theirs, sizeof report.mine) != 0, 1,
             "both sides are named, rank %d", rank);
  });
}

void different_split_sizes_fail_everywhere(int world) {
  run_ranks(world, [&](int rank, NdGroup* group) {
    std::vector<char> x(1024), y(1024);
    std::vector<const void*> ins(world, x.data());
    std::vector<void*> outs(world, y.data());
    std::vector<size_t> in_bytes(world, 8), out_bytes(world, 8);
    if (rank == 0) in_bytes[1] = 12;
    const int code = nd_all_to_all(group, ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), ND_I32);
    CHECK_EQ(code, -EPROTO, "rank %d of %d", rank, world);
  });
}

void closed_rank_is_lost(int world) {
  run_ranks(world, [&](int rank, NdGroup* group) {
    CHECK_EQ(nd_barrier(group), 0, "rank %d", rank);
    if (rank == 0) return;
    CHECK_EQ(nd_barrier(group), -EOWNERDEAD, "rank %d", rank);
    CHECK_EQ(report_of(group).peer, 0, "rank %d", rank);
  });
}

void abort_ends_a_running_call() {
  run_ranks(2, [&](int rank, NdGroup* group) {
    if (rank == 0)
      CHECK_EQ(nd_barrier(group), -ECANCELED, "the waiting rank");
    else
      CHECK_EQ(nd_group_abort(group), 0, "the aborting rank");
  });
}

void fork_cannot_use_the_group() {
  run_ranks(1, [&](int, NdGroup* group) {
    const pid_t child = fork();
    if (child == 0) _exit(nd_barrier(group) == -ECHILD && nd_group_close(group) == -ECHILD ? 0 : 1);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child, "child");
    CHECK_EQ(status, 0, "the forked handle must refuse");
    CHECK_EQ(nd_barrier(group), 0, "the parent goes on");
  });
}

void only_a_sealed_segment_of_this_group_is_opened() {
  const NdTuning tuning{0};
  const NdOptions options{kSecond, 0};
  NdGroup* group = nullptr;
  int fd = -1;
  CHECK_EQ(nd_segment_create(2, 7, &tuning, nullptr, &fd), 0, "create");
  CHECK_EQ(ftruncate(fd, 4096), -1, "the segment must not shrink");
  CHECK_EQ(nd_group_open(fd, 0, 2, 8, &options, &group), -EPROTO, "wrong nonce");
  CHECK_EQ(nd_group_open(fd, 0, 3, 7, &options, &group), -EPROTO, "wrong world");
  CHECK_EQ(nd_group_open(fd, 2, 2, 7, &options, &group), -EINVAL, "no such rank");
  CHECK_EQ(nd_group_open(fd, 0, 2, 7, &options, &group), 0, "right");
  NdGroup* twice = nullptr;
  CHECK_EQ(nd_group_open(fd, 0, 2, 7, &options, &twice), -EEXIST, "one handle a rank");
  CHECK_EQ(nd_group_close(group), 0, "close");
  close(fd);
}

// Three processes in an endless row of collectives; one is killed at a random moment.
void killed_process_is_lost(unsigned seed) {
  constexpr int kWorld = 3;
  const NdTuning tuning{16384};
  int fd = -1;
  CHECK_EQ(nd_segment_create(kWorld, 7, &tuning, nullptr, &fd), 0, "create");
  pid_t pids[kWorld];
  for (int rank = 0; rank < kWorld; ++rank) {
    pids[rank] = fork();
    if (pids[rank] != 0) continue;
    const NdOptions options{60 * kSecond, 20000};
    NdGroup* group = nullptr;
    int code = nd_group_open(fd, rank, kWorld, 7, &options, &group);
    if (code == 0) code = nd_group_connect(group);
    std::vector<float> x(200000);
    while (code == 0) code = nd_all_reduce(group, x.data(), x.data(), x.size(), ND_F32, ND_SUM);
    _exit(code == -EOWNERDEAD && report_of(group).peer == kWorld - 1 ? 0 : 1);
  }
  usleep(20000 + seed * 1700 % 30000);  // the kill point, not a wait
  kill(pids[kWorld - 1], SIGKILL);
  const double begin = seconds();
  for (int rank = 0; rank < kWorld; ++rank) {
    int status = 0;
    waitpid(pids[rank], &status, 0);
    if (rank != kWorld - 1) CHECK_EQ(status, 0, "rank %d must see that rank %d died", rank, kWorld - 1);
  }
  CHECK_EQ(seconds() - begin < 2, 1, "took %g s", seconds() - begin);
  close(fd);
}

}  // namespace

int main() {
  for (int world = 2; world <= 3; ++world) {
    for (int a = 0; a <= 12; ++a)
      for (int b = 0; b <= 12; ++b)
        if (a != b) different_calls_fail_everywhere(world, a, b);
    late_rank_times_out_everywhere(world);
    different_split_sizes_fail_everywhere(world);
    closed_rank_is_lost(world);
  }
  abort_ends_a_running_call();
  fork_cannot_use_the_group();
  only_a_sealed_segment_of_this_group_is_opened();
  for (unsigned seed = 0; seed < 10; ++seed) killed_process_is_lost(seed);
  printf("ok\n");
  return 0;
}
