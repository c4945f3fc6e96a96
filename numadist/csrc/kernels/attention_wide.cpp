// Attention summed in f32, of f32 and of 16 bits that are widened to it: the choice of ISA.
#include <errno.h>
#include <math.h>
#include <string.h>

#include <utility>

#include "isa.h"
#include "kernels/attention_call.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nd {
namespace {

namespace portable {
#define ND_LANES 4
#if defined(__aarch64__)
constexpr size_t kRegisters = 32;
#else
constexpr size_t kRegisters = 16;
#endif
#include "kernels/attention_wide-inl.h"
#undef ND_LANES
}  // namespace portable

#if defined(__x86_64__)
ND_TARGET_AVX2_BEGIN
namespace avx2 {
#define ND_LANES 8
constexpr size_t kRegisters = 16;
#include "kernels/attention_wide-inl.h"
#undef ND_LANES
}  // namespace avx2
ND_TARGET_END

ND_TARGET_AVX512_BEGIN
namespace avx512 {
#define ND_LANES 16
constexpr size_t kRegisters = 32;
#include "kernels/attention_wide-inl.h"
#undef ND_LANES
}  // namespace avx512
ND_TARGET_END
#endif

#define ND_KERNELS(isa, kind)                                                                           \
  AttentionKernels {                                                                                    \
    isa::kind::attend_range, isa::kind::merge_ranges, isa::kind::pack, isa::kind::attend, sizeof(float) \
  }
#if defined(__x86_64__)
// These have nothing better from AVX-512 on.
#define ND_BY_ISA(kind)                                                                                 \
  ByIsa<AttentionKernels>(ND_KERNELS(portable, kind), ND_KERNELS(avx2, kind), ND_KERNELS(avx512, kind), \
                          ND_KERNELS(avx512, kind), ND_KERNELS(avx512, kind))
#else
#define ND_BY_ISA(kind) ByIsa<AttentionKernels>(ND_KERNELS(portable, kind))
#endif

constexpr ByIsa<AttentionKernels> kF32 = ND_BY_ISA(f32), kBf16 = ND_BY_ISA(bf16), kF16 = ND_BY_ISA(f16);

}  // namespace

const AttentionKernels* wide_attention(Isa isa, int dtype) {
  switch (dtype) {
    case ND_F32:
      return &kF32[isa];
    case ND_BF16:
      return &kBf16[isa];
    case ND_F16:
      return &kF16[isa];
    default:
      return nullptr;
  }
}

}  // namespace nd
