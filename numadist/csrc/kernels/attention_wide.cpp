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

#define ND_SOURCE "kernels/attention_wide-inl.h"
#include "kernels/each_isa-inl.h"

#define ND_KERNELS(isa, kind)                                                                           \
  AttentionKernels {                                                                                    \
    isa::kind::attend_range, isa::kind::merge_ranges, isa::kind::pack, isa::kind::attend, sizeof(float) \
  }

constexpr ByIsa<AttentionKernels> kF32 = ND_BY_ISA(AttentionKernels, f32),
                                  kBf16 = ND_BY_ISA(AttentionKernels, bf16),
                                  kF16 = ND_BY_ISA(AttentionKernels, f16);

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
