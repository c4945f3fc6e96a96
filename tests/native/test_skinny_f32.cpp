// Linear layers in f32 on a team of threads: every ISA and width of panels, exact.
#include <errno.h>

#include "harness.h"
#include "team_of_threads.h"

namespace {

// Small integers: all sums are exact, whatever their order.
std::vector<float> draw(size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> digit(-9, 9);
  std::vector<float> values(count);
  for (auto& v : values) v = static_cast<float>(digit(random));
  return values;
}

// Sizes are exact, so that ASAN sees a read or write beyond an end.
void check(int isa, size_t width, size_t rows, size_t n, size_t k, bool has_bias, std::mt19937& random) {
  const auto x = draw(rows * k, random), bias = draw(n, random);
  const auto blob = draw((n + width - 1) / width * width * k, random);
  std::vector<float> y(rows * n, 0.5f);
  CHECK_EQ(nd_skinny_linear_f32(isa, x.data(), blob.data(), has_bias ? bias.data() : nullptr, y.data(), rows,
                                n, k, width),
           0, "isa %d, width %zu", isa, width);
  for (size_t m = 0; m < rows; ++m)
    for (size_t c = 0; c < n; ++c) {
      float sum = has_bias ? bias[c] : 0;
      for (size_t i = 0; i < k; ++i) sum += x[m * k + i] * blob[(c / width * k + i) * width + c % width];
      CHECK_EQ(y[m * n + c], sum, "%s, width %zu, row %zu of %zu, column %zu of %zu, k %zu", nd_isa_name(isa),
               width, m, rows, c, n, k);
    }
}

}  // namespace

int main() {
  const NdTeam team = team_of_threads();
  CHECK_EQ(nd_team_use(&team), 0, "a team of %d", kThreads);
  std::mt19937 random(7);
  for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa) {
    for (size_t width : {64, 48, 16})
      for (size_t rows = 0; rows <= ND_SKINNY_ROWS; ++rows)
        for (size_t n : {1, 47, 64, 131}) check(isa, width, rows, n, 1 + rows * 3, rows % 2 == 0, random);
    for (size_t width : {0, 24, 80})
      CHECK_EQ(nd_skinny_linear_f32(isa, nullptr, nullptr, nullptr, nullptr, 1, 1, 1, width), -EINVAL,
               "width %zu", width);
    CHECK_EQ(nd_skinny_linear_f32(isa, nullptr, nullptr, nullptr, nullptr, 17, 1, 1, 64), -EINVAL, "17 rows");
  }
  puts("ok");
}
