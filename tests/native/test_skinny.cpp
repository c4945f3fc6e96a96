// Linear layers on a team of threads: every ISA, panels shared out, against sums in double.
#include <math.h>
#include <string.h>

#include "harness.h"

namespace {

constexpr int kThreads = 3;
thread_local int index_of_thread = 0;

// A team as OpenMP gives one: threads of the caller's, joined at the end.
void parallel(void (*body)(void*), void* data, unsigned, unsigned) {
  std::vector<std::thread> threads;
  for (int i = 1; i < kThreads; ++i)
    threads.emplace_back([=] {
      index_of_thread = i;
      body(data);
    });
  body(data);
  for (auto& thread : threads) thread.join();
}

int thread_index() { return index_of_thread; }
int num_threads() { return kThreads; }

float value_of(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}

// Sizes are exact, so that ASAN sees a read or write beyond an end.
void check(int isa, size_t rows, size_t n, size_t k, std::mt19937& random) {
  const size_t panels = (n + ND_SKINNY_PANEL - 1) / ND_SKINNY_PANEL;
  // Small integers: all sums are exact, whatever their order.
  std::uniform_int_distribution<int> digit(-2, 2);
  const auto draw = [&](size_t count) {
    std::vector<uint16_t> values(count);
    for (auto& v : values) {
      const float f = static_cast<float>(digit(random));
      uint32_t bits;
      memcpy(&bits, &f, 4);
      v = static_cast<uint16_t>(bits >> 16);
    }
    return values;
  };
  const auto x = draw(rows * k), blob = draw(panels * ND_SKINNY_PANEL * k), bias = draw(n);
  std::vector<uint16_t> y(rows * n, 0x7fff);
  CHECK_EQ(nd_skinny_linear(isa, x.data(), blob.data(), bias.data(), y.data(), rows, n, k), 0, "isa %d", isa);
  for (size_t m = 0; m < rows; ++m)
    for (size_t c = 0; c < n; ++c) {
      double sum = value_of(bias[c]);
      const uint16_t* panel = blob.data() + c / ND_SKINNY_PANEL * ND_SKINNY_PANEL * k;
      for (size_t i = 0; i < k; ++i)
        sum += double(value_of(x[m * k + i])) *
               value_of(panel[(i / 2 * ND_SKINNY_PANEL + c % ND_SKINNY_PANEL) * 2 + i % 2]);
      // Sums below 256 are exact in bf16 too.
      if (fabs(sum) < 256)
        CHECK_EQ(value_of(y[m * n + c]), sum, "%s, row %zu of %zu, column %zu of %zu, k %zu",
                 nd_isa_name(isa), m, rows, c, n, k);
    }
}

}  // namespace

int main() {
  const NdTeam nothing = {nullptr, nullptr, nullptr}, team = {parallel, thread_index, num_threads};
  CHECK_EQ(nd_team_use(&nothing), -EINVAL, "a team without entries");
  int threads = 0, fresh = 0;
  CHECK_EQ(nd_team_form(&threads, &fresh), 0, "alone");
  CHECK_EQ(threads, 1, "alone");
  CHECK_EQ(nd_team_use(&team), 0, "a team of %d", kThreads);
  CHECK_EQ(nd_team_form(&threads, &fresh), 0, "a team of %d", kThreads);
  CHECK_EQ(threads, kThreads, "a team of %d", kThreads);
  CHECK_EQ(fresh, kThreads - 1, "the caller was counted before");
  std::mt19937 random(6);
  for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa)
    for (size_t rows = 0; rows <= ND_SKINNY_ROWS; ++rows)
      for (size_t n : {1, 16, 63, 64, 65, 200})
        for (size_t k : {2, 30}) check(isa, rows, n, k, random);
  puts("ok");
}
