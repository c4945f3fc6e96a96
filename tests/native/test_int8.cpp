// Linear layers on int8 weights: the fast kernel and the plain loops, against sums in double.
#include <math.h>
#include <string.h>

#include "harness.h"

namespace {

uint16_t bf16_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float value_of(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}

size_t byte_of(size_t c) { return c / 32 * 64 + c % 16 / 4 * 16 + c % 32 / 16 * 8 + c % 4 * 2; }

// Sizes are exact, so that ASAN sees a read or write beyond an end.
void check(int fast, size_t rows, size_t n, size_t k, std::mt19937& random) {
  const size_t panels = (n + ND_INT8_PANEL - 1) / ND_INT8_PANEL, group = 2 * ND_INT8_PANEL;
  std::uniform_int_distribution<int> digit(-2, 2), weight(-127, 127);
  std::vector<uint16_t> x(rows * k), bias(n), y(rows * n, 0x7fff);
  for (auto& v : x) v = bf16_of(static_cast<float>(digit(random)));
  for (auto& v : bias) v = bf16_of(static_cast<float>(digit(random)));
  std::vector<float> scale(n);
  for (auto& v : scale) v = ldexpf(1, digit(random));
  std::vector<int> w(panels * ND_INT8_PANEL * k);  // [column][input]
  std::vector<uint8_t> blob(w.size());
  for (size_t c = 0; c < panels * ND_INT8_PANEL; ++c)
    for (size_t i = 0; i < k; ++i) {
      const int q = w[c * k + i] = weight(random);
      blob[(c / ND_INT8_PANEL * (k / 2) + i / 2) * group + byte_of(c % ND_INT8_PANEL) + i % 2] =
          static_cast<uint8_t>(abs(q) | (q < 0 ? 0x80 : 0));
    }
  CHECK_EQ(nd_int8_linear(fast, x.data(), blob.data(), scale.data(), bias.data(), y.data(), rows, n, k), 0,
           "fast %d", fast);
  for (size_t m = 0; m < rows; ++m)
    for (size_t c = 0; c < n; ++c) {
      double sum = 0;
      for (size_t i = 0; i < k; ++i) sum += double(value_of(x[m * k + i])) * w[c * k + i];
      const double want = sum * scale[c] + value_of(bias[c]);
      // Integers below 2^24 are exact in f32; what is left is one rounding to bf16.
      CHECK_EQ(fabs(value_of(y[m * n + c]) - want) <= fabs(want) / 256, true,
               "fast %d, row %zu of %zu, column %zu of %zu, k %zu: %g for %g", fast, m, rows, c, n, k,
               double(value_of(y[m * n + c])), want);
    }
}

}  // namespace

int main() {
  std::mt19937 random(8);
  for (int fast = 0; fast <= nd_int8_linear_runs(); ++fast)
    for (size_t rows : {0, 1, 2, 3, 4, 7, 17})
      for (size_t n : {1, 15, 33, 64, 65, 200})
        for (size_t k : {2, 30}) check(fast, rows, n, k, random);
  CHECK_EQ(nd_int8_linear(0, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 3), -EINVAL, "odd inputs");
  puts("ok");
}
