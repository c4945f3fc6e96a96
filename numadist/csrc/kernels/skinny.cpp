// Linear layers for few rows: the choice of ISA, and the shares of the threads.
#include <errno.h>
#include <string.h>

#include <utility>

#include "bf16.h"
#include "isa.h"
#include "kernels/skinny_call.h"
#include "kernels/team.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nd {
namespace {

namespace portable {
#include "kernels/skinny-inl.h"
}  // namespace portable

#if defined(__x86_64__)
ND_TARGET_AVX2_BEGIN
namespace avx2 {
#include "kernels/skinny-inl.h"
}  // namespace avx2
ND_TARGET_END

ND_TARGET_AVX512_BEGIN
namespace avx512 {
#include "kernels/skinny-inl.h"
}  // namespace avx512
namespace amx_bf16 {
#include "kernels/skinny_amx-inl.h"
}  // namespace amx_bf16
ND_TARGET_END

ND_TARGET_AVX512_BF16_BEGIN
namespace avx512_bf16 {
#include "kernels/skinny_bf16-inl.h"
}  // namespace avx512_bf16
ND_TARGET_END
#endif

// Of the panels from begin to end.
using PanelsKernel = void (*)(const SkinnyCall&, size_t begin, size_t end);

template <size_t Width>
constexpr ByIsa<PanelsKernel> kKernels{
    portable::multiply_panels<Width>,
#if defined(__x86_64__)
    avx2::multiply_panels<Width>,
    avx512::multiply_panels<Width>,
    avx512::multiply_panels<Width>,
    avx512_bf16::multiply_panels<Width>,
    amx_bf16::multiply_panels<amx_bf16::AmxTiles, Width>,
#elif defined(__aarch64__)
    portable::multiply_panels<Width>,
#endif
};

}  // namespace
}  // namespace nd

int nd_skinny_linear(int isa, const void* x, const void* blob, const void* bias, void* y, size_t rows,
                     size_t n, size_t k, size_t width) {
  nd::Isa chosen;
  if (!nd::isa_at(isa, &chosen) || rows > ND_SKINNY_ROWS || k % 2 != 0 || (width != 32 && width != 64))
    return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  const nd::SkinnyCall call = {static_cast<const uint16_t*>(x),
                               static_cast<const uint32_t*>(blob),
                               static_cast<const uint16_t*>(bias),
                               static_cast<uint16_t*>(y),
                               rows,
                               n,
                               k};
  const nd::PanelsKernel kernel = width == 32 ? nd::kKernels<32>[chosen] : nd::kKernels<64>[chosen];
  nd::for_shares((n + width - 1) / width, [&](size_t begin, size_t end) { kernel(call, begin, end); });
  return 0;
}
