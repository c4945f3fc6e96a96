// The best of a row of logits.
#include <errno.h>
#include <math.h>

#include <algorithm>

#include "bf16.h"
#include "nd_core.h"

namespace nd {
namespace {

constexpr size_t kBlock = 1024;

// The highest of at most kBlock values, and whether one is not a number; loops the compiler turns into vectors.
float highest(const float* x, size_t n, bool* has_nan) {
  float top = -INFINITY;
  int nans = 0;
  for (size_t i = 0; i < n; ++i) {
    top = x[i] > top ? x[i] : top;
    nans += x[i] != x[i];
  }
  *has_nan = nans != 0;
  return top;
}

struct Best {
  float value;
  size_t at;
};

// The first of the highest; the first NaN if there is one.
template <class Load>
Best best_of(size_t n, const Load& load) {
  Best best = {-INFINITY, 0};
  float block[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    load(begin, count, block);
    bool has_nan = false;
    const float top = highest(block, count, &has_nan);
    if (!has_nan && top <= best.value) continue;
    const float *start = block, *end = block + count;
    const float* found =
        has_nan ? std::find_if(start, end, [](float x) { return x != x; }) : std::find(start, end, top);
    best = {*found, begin + static_cast<size_t>(found - block)};
    if (has_nan) break;
  }
  return best;
}

}  // namespace
}  // namespace nd

int nd_argmax(const void* logits, int dtype, size_t rows, size_t cols, size_t row_stride, int32_t first,
              int32_t* out) {
  using namespace nd;
  if ((dtype != ND_F32 && dtype != ND_BF16) || cols == 0) return -EINVAL;
  for (size_t row = 0; row < rows; ++row) {
    const auto* f32 = static_cast<const float*>(logits) + row * row_stride;
    const auto* bf16 = static_cast<const uint16_t*>(logits) + row * row_stride;
    const Best best = best_of(cols, [&](size_t begin, size_t count, float* block) {
      if (dtype == ND_F32)
        std::copy(f32 + begin, f32 + begin + count, block);
      else
        for (size_t i = 0; i < count; ++i) block[i] = float_of_bf16(bf16[begin + i]);
    });
    out[2 * row] = static_cast<int32_t>(bits_of_float(best.value));
    out[2 * row + 1] = first + static_cast<int32_t>(best.at);
  }
  return 0;
}
