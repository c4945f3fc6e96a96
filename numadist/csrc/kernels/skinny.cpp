// Linear layers for few rows: the choice of ISA, and the shares of the threads.
#include <errno.h>
#include <string.h>

#include <utility>

#include "bf16.h"
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
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "kernels/skinny-inl.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#include "kernels/skinny-inl.h"
}  // namespace avx512
namespace amx_bf16 {
#include "kernels/skinny_amx-inl.h"
}  // namespace amx_bf16
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own intrinsics (GCC bug 105593)
namespace avx512_bf16 {
#include "kernels/skinny_bf16-inl.h"
}  // namespace avx512_bf16
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

// Of the panels from begin to end.
using PanelsKernel = void (*)(const SkinnyCall&, size_t begin, size_t end);

// Names as nd_isa_name has them.
template <size_t Width>
PanelsKernel find_kernel([[maybe_unused]] const char* isa) {
#if defined(__x86_64__)
  if (strcmp(isa, "amx_bf16") == 0) return amx_bf16::multiply_panels<amx_bf16::AmxTiles, Width>;
  if (strcmp(isa, "avx512_bf16") == 0) return avx512_bf16::multiply_panels<Width>;
  if (strcmp(isa, "avx512") == 0) return avx512::multiply_panels<Width>;
  if (strcmp(isa, "avx2") == 0) return avx2::multiply_panels<Width>;
#endif
  return portable::multiply_panels<Width>;
}

}  // namespace
}  // namespace nd

int nd_skinny_linear(int isa, const void* x, const void* blob, const void* bias, void* y, size_t rows,
                     size_t n, size_t k, size_t width) {
  const char* name = nd_isa_name(isa);
  if (name == nullptr || rows > ND_SKINNY_ROWS || k % 2 != 0 || (width != 32 && width != 64)) return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  const nd::SkinnyCall call = {static_cast<const uint16_t*>(x),
                               static_cast<const uint32_t*>(blob),
                               static_cast<const uint16_t*>(bias),
                               static_cast<uint16_t*>(y),
                               rows,
                               n,
                               k};
  const nd::PanelsKernel kernel = width == 32 ? nd::find_kernel<32>(name) : nd::find_kernel<64>(name);
  nd::for_shares((n + width - 1) / width, [&](size_t begin, size_t end) { kernel(call, begin, end); });
  return 0;
}
