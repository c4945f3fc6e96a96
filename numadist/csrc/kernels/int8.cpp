// Linear layers for few rows on int8 weights: half the bytes of bf16, and bytes are what decoding waits for.
#include <errno.h>

#include "bf16.h"
#include "isa.h"
#include "kernels/team.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nd {
namespace {

constexpr size_t kPanel = ND_INT8_PANEL, kGroup = 2 * kPanel;  // a group: two neighbouring inputs of a panel

struct Int8Call {
  const uint16_t* x;     // bf16 [rows][k]
  const uint8_t* blob;   // [ceil(n / kPanel)][k / 2][kGroup]
  const float* scale;    // [n]
  const uint16_t* bias;  // bf16 [n] or nullptr
  uint16_t* y;           // bf16 [rows][n]
  size_t rows, n, k;
};

// Where a group holds input 0 of a column; input 1 follows. 16-byte lanes hold 4 columns of each half of 32,
// so that widening bytes to bf16 within lanes leaves 16 neighbouring columns in a register.
constexpr size_t byte_of(size_t column) {
  const size_t half = column % 32 / 16, lane = column % 16 / 4;
  return column / 32 * 64 + lane * 16 + half * 8 + column % 4 * 2;
}

float value_of(uint8_t weight) {
  const auto magnitude = static_cast<float>(weight & 0x7f);
  return weight & 0x80 ? -magnitude : magnitude;
}

namespace portable {

void panel_rows(const Int8Call& call, size_t panel) {
  const size_t pairs = call.k / 2, first = panel * kPanel;
  for (size_t c = 0; c < kPanel && first + c < call.n; ++c)
    for (size_t m = 0; m < call.rows; ++m) {
      const uint8_t* w = call.blob + panel * pairs * kGroup + byte_of(c);
      const uint16_t* x = call.x + m * call.k;
      float sum = 0;
      for (size_t k = 0; k < pairs; ++k, w += kGroup, x += 2)
        sum += float_of_bf16(x[0]) * value_of(w[0]) + float_of_bf16(x[1]) * value_of(w[1]);
      const float bias = call.bias == nullptr ? 0 : float_of_bf16(call.bias[first + c]);
      call.y[m * call.n + first + c] = bf16_of_float(sum * call.scale[first + c] + bias);
    }
}

}  // namespace portable

#if defined(__x86_64__)
ND_TARGET_AVX512_BF16_VBMI_BEGIN
namespace avx512_vbmi {
#include "kernels/int8-inl.h"
}  // namespace avx512_vbmi
ND_TARGET_END
#endif

using PanelKernel = void (*)(const Int8Call&, size_t panel);

PanelKernel find_kernel(bool fast) {
  if (!fast) return portable::panel_rows;
#if defined(__x86_64__)
  if (nd_int8_linear_runs()) return avx512_vbmi::panel_rows;
#endif
  return nullptr;
}

}  // namespace
}  // namespace nd

int nd_int8_linear_runs(void) {
#if defined(__x86_64__)
  return nd::runs(nd::Isa::kAvx512Bf16) && __builtin_cpu_supports("avx512vbmi");
#else
  return 0;
#endif
}

int nd_int8_linear(int fast, const void* x, const void* blob, const float* scale, const void* bias, void* y,
                   size_t rows, size_t n, size_t k) {
  const nd::PanelKernel kernel = nd::find_kernel(fast != 0);
  if (kernel == nullptr) return -EOPNOTSUPP;
  if (k % 2 != 0) return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  const nd::Int8Call call = {static_cast<const uint16_t*>(x),
                             static_cast<const uint8_t*>(blob),
                             scale,
                             static_cast<const uint16_t*>(bias),
                             static_cast<uint16_t*>(y),
                             rows,
                             n,
                             k};
  nd::for_neighbours((n + nd::kPanel - 1) / nd::kPanel, [&](size_t panel) { kernel(call, panel); });
  return 0;
}
