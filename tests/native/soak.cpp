// Mixed collectives without end, on ranks that are processes, in overlapping groups. Small calls are most, as
// in decoding. Usage: soak WORLD CALLS SECONDS SEED; ends after so many calls a rank or so many seconds, but not
// before 1024 rounds.
#include <sys/wait.h>
#include <time.h>

#include <array>
#include <numeric>

#include "rounds.h"

namespace {

// The ranks of one group, and its handle on this rank.
struct Members {
  std::vector<int> ranks;
  int fd;
  NdGroup* group;
};

// All ranks, then each rank with its neighbour, then all without each one.
std::vector<Members> make_groups(int world) {
  std::vector<Members> groups(1);
  for (int r = 0; r < world; ++r) groups[0].ranks.push_back(r);
  for (int r = 0; world > 2 && r < world; ++r) {
    Members pair{}, others{};
    pair.ranks = {std::min(r, (r + 1) % world), std::max(r, (r + 1) % world)};
    for (int p = 0; p < world; ++p)
      if (p != r) others.ranks.push_back(p);
    groups.push_back(pair);
    groups.push_back(others);
  }
  const NdTuning tuning{16384};
  for (Members& m : groups)
    CHECK_EQ(nd_segment_create(static_cast<int>(m.ranks.size()), 7, &tuning, nullptr, &m.fd), 0, "create");
  return groups;
}

int place_of(int rank, const Members& m) {
  const auto found = std::find(m.ranks.begin(), m.ranks.end(), rank);
  return found == m.ranks.end() ? -1 : static_cast<int>(found - m.ranks.begin());
}

void open_groups(int rank, std::vector<Members>& groups) {
  const NdOptions options{60 * kSecond, 50000};
  for (Members& m : groups) {
    const int place = place_of(rank, m), world = static_cast<int>(m.ranks.size());
    if (place < 0) continue;
    CHECK_EQ(nd_group_open(m.fd, place, world, 7, &options, &m.group), 0, "rank %d", rank);
  }
  for (Members& m : groups)
    if (m.group != nullptr) CHECK_EQ(nd_group_connect(m.group, nullptr), 0, "rank %d", rank);
}

size_t pick_count(std::mt19937& rng) {
  const unsigned kind = rng() % 1000;
  return rng() % (kind < 950 ? 128 : kind < 998 ? 8192 : 200000);
}

// Rank 0 looks at the clock for all.
bool time_is_up(NdGroup* everybody, int rank, time_t end) {
  int32_t up = rank == 0 && time(nullptr) >= end;
  CHECK_EQ(nd_broadcast(everybody, &up, sizeof up, ND_I32, 0), 0, "rank %d", rank);
  return up != 0;
}

constexpr unsigned kNumKinds = 10;

// The number of calls of this rank, by kind.
std::array<long, kNumKinds> run_rank(int rank, std::vector<Members>& groups, long calls, time_t end,
                                     unsigned seed) {
  open_groups(rank, groups);
  std::mt19937 plan(seed), delays(seed + 1 + static_cast<unsigned>(rank));
  std::array<long, kNumKinds> made{};
  for (int n = 0; n < calls; ++n) {
    if (n > 0 && n % 1024 == 0 && time_is_up(groups[0].group, rank, end)) break;
    const Members& m = groups[plan() % 2 == 0 ? 0 : plan() % groups.size()];
    const unsigned kind = plan() % kNumKinds;
    const size_t count = pick_count(plan), offset = plan() % 16 * 4;
    const int world = static_cast<int>(m.ranks.size()), root = static_cast<int>(plan() % 64) % world;
    if (m.group == nullptr) continue;
    if (delays() % 64 == 0) dawdle(delays);
    run_round(Round{m.group, place_of(rank, m), world, n, count, offset, root}, kind);
    ++made[kind];
  }
  for (Members& m : groups) CHECK_EQ(nd_group_close(m.group), 0, "rank %d", rank);
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int world = atoi(argv[1]);
  const long calls = atol(argv[2]);
  const time_t end = time(nullptr) + atol(argv[3]);
  const unsigned seed = static_cast<unsigned>(atoi(argv[4]));
  std::vector<Members> groups = make_groups(world);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world; ++rank) {
    pids.push_back(fork());
    if (pids.back() != 0) continue;
    const auto made = run_rank(rank, groups, calls, end, seed);
    if (rank == 0)
      printf("%ld calls on %d ranks, at least %ld of a kind\n", std::accumulate(made.begin(), made.end(), 0L),
             world, *std::min_element(made.begin(), made.end()));
    exit(0);
  }
  int failed = 0;
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    failed |= status;
  }
  return failed != 0;
}
