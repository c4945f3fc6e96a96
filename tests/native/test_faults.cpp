// What a group does when a rank is late, different, gone, killed or forked. Usage: test_faults [KILLS]
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include <atomic>

#include "harness.h"

namespace {

constexpr uint64_t kNever = 100000 * kSecond;

NdReport report_of(NdGroup* group) {
  NdReport report;
  CHECK_EQ(nd_group_report(group, &report), 0, "report");
  return report;
}

// The last rank comes only when the others gave up, and must not go on alone then.
void late_rank_times_out_everywhere(int world) {
  Settings settings;
  settings.timeout_ns = kSecond;  // long enough for all to connect
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

// One call of a kind; sizes from a line to several slots.
int some_call(int kind, NdGroup* group, int rank, int world, std::vector<float>& x) {
  const size_t count = kind % 2 ? x.size() / static_cast<size_t>(world) : 16;
  std::vector<const void*> ins(world, x.data());
  std::vector<std::vector<float>> results(world, std::vector<float>(count));
  std::vector<void*> outs;
  for (auto& result : results) outs.push_back(result.data());
  switch (kind / 2) {
    case 0:
      return nd_all_reduce(group, x.data(), x.data(), kind % 2 ? x.size() : 16, ND_F32, ND_SUM);
    case 1:
      return nd_all_gather(group, x.data(), outs.data(), count * 4, ND_F32);
    case 2:
      return nd_reduce_scatter(group, ins.data(), outs[0], count, ND_F32, ND_SUM);
    case 3:
      return nd_broadcast(group, x.data(), count * 4, ND_F32, 0);
    case 4:
      return nd_scatter(group, ins.data(), outs[0], count * 4, ND_F32, 0);
    case 5:
      return nd_gather(group, x.data(), outs.data(), count * 4, ND_F32, world - 1);
    case 6:
      return nd_reduce(group, x.data(), outs[0], count, ND_F32, ND_SUM, 0);
    case 7: {
      const std::vector<size_t> bytes(world, count * 4);
      return nd_all_to_all(group, ins.data(), bytes.data(), outs.data(), bytes.data(), ND_F32);
    }
    case 8:
      return nd_barrier(group);
    default: {  // around a ring
      NdRequest *send = nullptr, *recv = nullptr;
      int code = nd_recv_start(group, outs[0], count * 4, ND_F32, (rank + world - 1) % world, 0, 0, &recv);
      if (code == 0)
        code = nd_send_start(group, x.data(), count * 4, ND_F32, (rank + 1) % world, 0, 0, &send);
      if (code == 0) code = nd_message_wait(group, recv, 0);
      if (code == 0) code = nd_message_wait(group, send, 0);
      if (recv != nullptr) nd_message_free(group, recv);
      if (send != nullptr) nd_message_free(group, send);
      return code;
    }
  }
}
constexpr int kNumCallKinds = 20;

// A rank as a process, in an endless row of calls until one fails; its code.
int run_until_failure(int fd, int ready, int rank, int world, unsigned seed) {
  const NdOptions options{kNever, 20000};
  NdGroup* group = nullptr;
  int code = nd_group_open(fd, rank, world, 7, &options, &group);
  if (code == 0) code = nd_group_connect(group, nullptr);
  if (write(ready, "r", 1) != 1) return 1;
  std::vector<float> x(100000);
  std::mt19937 plan(seed);
  // Either one kind all the time, or a mix.
  const int fixed = static_cast<int>(plan() % (2 * kNumCallKinds));
  while (code == 0) {
    const int mixed = static_cast<int>(plan() % kNumCallKinds);
    code = some_call(fixed < kNumCallKinds ? fixed : mixed, group, rank, world, x);
  }
  const int peer = report_of(group).peer;
  nd_group_close(group);
  return code == -EOWNERDEAD && peer >= 0 ? 0 : 1;
}

// A rank is killed at a random moment; all others must see it, and no deadline of theirs helps.
void killed_process_is_lost(unsigned seed) {
  std::mt19937 rng(seed);
  const int world = 2 + static_cast<int>(rng() % 3),
            victim = static_cast<int>(rng() % static_cast<unsigned>(world));
  const NdTuning tuning{16384};
  int fd = -1;
  CHECK_EQ(nd_segment_create(world, 7, &tuning, nullptr, &fd), 0, "create");
  std::vector<pid_t> pids(world);
  int ready[2];
  CHECK_EQ(pipe(ready), 0, "pipe");
  for (int rank = 0; rank < world; ++rank) {
    pids[rank] = fork();
    if (pids[rank] == 0) _exit(run_until_failure(fd, ready[1], rank, world, seed));
  }
  char byte;
  for (int rank = 0; rank < world; ++rank) CHECK_EQ(read(ready[0], &byte, 1), 1, "ready");
  close(ready[0]);
  close(ready[1]);
  usleep(rng() % 20000);  // the kill point, not a wait
  kill(pids[victim], SIGKILL);
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(pids[rank], &status, 0);
    if (rank != victim)
      CHECK_EQ(status, 0, "seed %u: rank %d of %d must see that %d died", seed, rank, world, victim);
  }
  close(fd);
}

// A stopped rank is late, and when it goes on it is told so.
void stopped_process_is_late() {
  const NdTuning tuning{16384};
  int fd = -1;
  CHECK_EQ(nd_segment_create(2, 7, &tuning, nullptr, &fd), 0, "create");
  const auto run = [&](int rank) {
    const NdOptions options{kSecond, 20000};
    NdGroup* group = nullptr;
    int code = nd_group_open(fd, rank, 2, 7, &options, &group);
    if (code == 0) code = nd_group_connect(group, nullptr);
    float x = 1;
    for (int n = 0; code == 0; ++n) {
      if (rank == 1 && n == 1000) raise(SIGSTOP);
      code = nd_all_reduce(group, &x, &x, 1, ND_F32, ND_SUM);
    }
    return code == -ETIMEDOUT ? 0 : 1;
  };
  pid_t pids[2];
  for (int rank = 0; rank < 2; ++rank) {
    pids[rank] = fork();
    if (pids[rank] == 0) _exit(run(rank));
  }
  int status = 0;
  CHECK_EQ(waitpid(pids[0], &status, 0), pids[0], "rank 0");
  CHECK_EQ(status, 0, "rank 0 must time out");
  kill(pids[1], SIGCONT);
  CHECK_EQ(waitpid(pids[1], &status, 0), pids[1], "rank 1");
  CHECK_EQ(status, 0, "rank 1 must learn that it was too late");
  close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned num_kills = argc > 1 ? static_cast<unsigned>(atoi(argv[1])) : 30;
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
  stopped_process_is_late();
  for (unsigned seed = 0; seed < num_kills; ++seed) killed_process_is_lost(seed);
  printf("ok\n");
  return 0;
}
