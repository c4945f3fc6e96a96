// Mixed collectives of random sizes, places and delays; ranks are threads. Usage: test_collectives WORLD ROUNDS SEED
#include "rounds.h"

namespace {

// Ranks are threads here, so a region is just memory that all can address.
std::vector<char> region;

void all_reduce_shared(const Round& r) {
  const size_t stride = r.count * 4;
  if (r.rank == 0) region.assign(stride * static_cast<size_t>(r.world), 0);
  CHECK_EQ(nd_barrier(r.group), 0, "round %d", r.number);
  std::vector<void*> bufs;
  for (int p = 0; p < r.world; ++p) bufs.push_back(region.data() + stride * static_cast<size_t>(p));
  auto* mine = static_cast<int32_t*>(bufs[r.rank]);
  for (size_t i = 0; i < r.count; ++i) mine[i] = value(r.number, r.rank, i);
  CHECK_EQ(nd_all_reduce_shared(r.group, bufs.data(), r.count, ND_I32, ND_SUM, 5), 0, "round %d", r.number);
  for (size_t i = 0; i < r.count; ++i)
    CHECK_EQ(mine[i], sum_of_values(r.number, r.world, i), "rank %d round %d element %zu", r.rank, r.number,
             i);
  CHECK_EQ(nd_barrier(r.group), 0, "round %d", r.number);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int world = atoi(argv[1]), rounds = atoi(argv[2]);
  const unsigned seed = static_cast<unsigned>(atoi(argv[3]));
  run_ranks(world, [&](int rank, NdGroup* group) {
    std::mt19937 plan(seed), delays(seed + 1 + static_cast<unsigned>(rank));
    for (int n = 0; n < rounds; ++n) {
      const unsigned kind = plan() % 15;
      const size_t count = pick_bytes(plan) / 4, offset = plan() % 16 * 4;
      const int root = static_cast<int>(plan() % static_cast<unsigned>(world));
      dawdle(delays);
      const Round round{group, rank, world, n, count, offset, root};
      kind == 10 ? all_reduce_shared(round) : run_round(round, kind);
    }
  });
  printf("ok: %d rounds on %d ranks\n", rounds, world);
  return 0;
}
