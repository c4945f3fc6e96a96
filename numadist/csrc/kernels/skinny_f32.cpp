// Linear layers for few rows in f32: the choice of ISA, and the shares of the threads.
#include <errno.h>

#include "isa.h"
#include "kernels/team.h"

namespace nd {
namespace {

constexpr size_t kMaxPanel = 64;
constexpr size_t kBlockInputs = 64;
constexpr size_t kLine = 16;  // f32 in a line of the cache

struct SkinnyF32 {
  const float* x;     // [rows][k]
  const float* blob;  // [ceil(n / width)][k][width]
  const float* bias;  // [n] or nullptr
  float* y;           // [rows][n]
  size_t rows, n, k, width;
};

namespace portable {
#if defined(__aarch64__)
constexpr size_t kLanes = 4, kSums = 24;  // sums in 24 of 32 registers
#else
constexpr size_t kLanes = 4, kSums = 12;  // in 12 of 16
#endif
#include "kernels/skinny_f32-inl.h"
}  // namespace portable

#if defined(__x86_64__)
ND_TARGET_AVX2_BEGIN
namespace avx2 {
constexpr size_t kLanes = 8, kSums = 12;  // sums in 12 of 16 registers
#include "kernels/skinny_f32-inl.h"
}  // namespace avx2
ND_TARGET_END

ND_TARGET_AVX512_BEGIN
namespace avx512 {
constexpr size_t kLanes = 16, kSums = 24;  // sums in 24 of 32 registers
#include "kernels/skinny_f32-inl.h"
}  // namespace avx512
ND_TARGET_END
#endif

using PanelKernel = void (*)(const SkinnyF32&, size_t panel);

constexpr ByIsa<PanelKernel> kKernels{
    portable::panel_rows,
#if defined(__x86_64__)
    avx2::panel_rows,
    avx512::panel_rows,  // f32 has nothing better
    avx512::panel_rows,   avx512::panel_rows,
#endif
};

}  // namespace
}  // namespace nd

int nd_skinny_linear_f32(int isa, const float* x, const float* blob, const float* bias, float* y, size_t rows,
                         size_t n, size_t k, size_t width) {
  using namespace nd;
  Isa chosen;
  if (!isa_at(isa, &chosen) || rows > ND_SKINNY_ROWS || width == 0 || width > kMaxPanel || width % 16 != 0)
    return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  const SkinnyF32 call = {x, blob, bias, y, rows, n, k, width};
  const PanelKernel kernel = kKernels[chosen];
  for_neighbours((n + width - 1) / width, [&](size_t panel) { kernel(call, panel); });
  return 0;
}
