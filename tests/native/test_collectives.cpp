// Mixed collectives of random sizes, places and delays; ranks are threads. Usage: test_collectives WORLD ROUNDS SEED
#include "rounds.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int world = atoi(argv[1]), rounds = atoi(argv[2]);
  const unsigned seed = static_cast<unsigned>(atoi(argv[3]));
  run_ranks(world, [&](int rank, NdGroup* group) {
    std::mt19937 plan(seed), delays(seed + 1 + static_cast<unsigned>(rank));
    for (int n = 0; n < rounds; ++n) {
      const unsigned kind = plan() % 14;
      const size_t count = pick_bytes(plan) / 4, offset = plan() % 16 * 4;
      const int root = static_cast<int>(plan() % static_cast<unsigned>(world));
      dawdle(delays);
      run_round(Round{group, rank, world, n, count, offset, root}, kind);
    }
  });
  printf("ok: %d rounds on %d ranks\n", rounds, world);
  return 0;
}
