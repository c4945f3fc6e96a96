// Linear layers on weights of 16 bits on a team of threads: every ISA and width of panels, exact.
#include <errno.h>

#include "bf16.h"
#include "harness.h"
#include "team_of_threads.h"

namespace {

// Small integers: all sums are exact, whatever their order, and so small that both formats hold them.
std::vector<float> draw(size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> digit(-1, 1);
  std::vector<float> values(count);
  for (auto& v : values) v = static_cast<float>(digit(random));
  return values;
}

std::vector<uint16_t> narrow(const std::vector<float>& values, int dtype) {
  std::vector<uint16_t> halves;
  for (float v : values) halves.push_back(dtype == ND_BF16 ? nd::bf16_of_float(v) : nd::f16_of_float(v));
  return halves;
}

// Sizes are exact, so that ASAN sees a read or write beyond an end.
void check(int isa, int dtype, size_t width, size_t rows, size_t n, size_t k, bool has_bias,
           std::mt19937& random) {
  const auto x = draw(rows * k, random), bias = draw(n, random);
  const auto w = draw((n + width - 1) / width * width * k, random);
  const auto x16 = narrow(x, dtype), bias16 = narrow(bias, dtype), w16 = narrow(w, dtype);
  std::vector<uint16_t> y(rows * n, 0xffff);
  std::vector<char> scratch(nd_half_linear_scratch(rows, k));
  CHECK_EQ(nd_half_linear(isa, dtype, x16.data(), w16.data(), has_bias ? bias16.data() : nullptr, y.data(),
                          scratch.data(), rows, n, k, width),
           0, "isa %d, width %zu", isa, width);
  for (size_t m = 0; m < rows; ++m)
    for (size_t c = 0; c < n; ++c) {
      float sum = has_bias ? bias[c] : 0;
      for (size_t i = 0; i < k; ++i) sum += x[m * k + i] * w[(c / width * k + i) * width + c % width];
      const uint16_t wanted = dtype == ND_BF16 ? nd::bf16_of_float(sum) : nd::f16_of_float(sum);
      CHECK_EQ(y[m * n + c], wanted, "%s, dtype %d, width %zu, row %zu of %zu, column %zu of %zu, k %zu",
               nd_isa_name(isa), dtype, width, m, rows, c, n, k);
    }
}

}  // namespace

int main() {
  const NdTeam team = team_of_threads();
  CHECK_EQ(nd_team_use(&team), 0, "a team of %d", kThreads);
  std::mt19937 random(7);
  for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa)
    for (int dtype : {ND_BF16, ND_F16}) {
      for (size_t width : {64, 32, 16})
        for (size_t rows : {0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 17, 25, 200})
          for (size_t n : {1, 47, 64, 131})
            check(isa, dtype, width, rows, n, 1 + rows % 20 * 9, rows % 2 == 0, random);
      for (size_t width : {0, 24, 80})
        CHECK_EQ(nd_half_linear(isa, dtype, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 1, width),
                 -EINVAL, "width %zu", width);
      CHECK_EQ(nd_half_linear(isa, ND_F32, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 1, 64), -EINVAL,
               "f32");
    }
  puts("ok");
}
