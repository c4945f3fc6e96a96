// Attention of single queries in f32: the choice of ISA.
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
#include "kernels/attention_f32-inl.h"
#undef ND_LANES
}  // namespace portable

#if defined(__x86_64__)
ND_TARGET_AVX2_BEGIN
namespace avx2 {
#define ND_LANES 8
#include "kernels/attention_f32-inl.h"
#undef ND_LANES
}  // namespace avx2
ND_TARGET_END

ND_TARGET_AVX512_BEGIN
namespace avx512 {
#define ND_LANES 16
#include "kernels/attention_f32-inl.h"
#undef ND_LANES
}  // namespace avx512
ND_TARGET_END
#endif

struct Kernels {
  AttendRange attend_range;
  MergeRanges merge_ranges;
};

constexpr ByIsa<Kernels> kKernels{
    Kernels{portable::attend_range, portable::merge_ranges},
#if defined(__x86_64__)
    Kernels{avx2::attend_range, avx2::merge_ranges},
    Kernels{avx512::attend_range, avx512::merge_ranges},  // f32 has nothing better
    Kernels{avx512::attend_range, avx512::merge_ranges},
    Kernels{avx512::attend_range, avx512::merge_ranges},
#endif
};

bool is_valid(const NdAttention& a) {
  return a.batch > 0 && a.queries == 1 && a.keys > 0 && a.kv_heads > 0 && a.heads % a.kv_heads == 0 &&
         a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 16 == 0 &&
         (a.mask_kind == ND_MASK_NONE || a.mask_kind == ND_MASK_BOOL || a.mask_kind == ND_MASK_F32);
}

}  // namespace
}  // namespace nd

int nd_attention_one_f32(int isa, const NdAttention* sizes, const void* q, const void* k, const void* v,
                         const void* mask, void* out, void* scratch) {
  using namespace nd;
  const Attention a = {*sizes, q, k, v, mask, out, scratch};
  Isa chosen;
  if (!isa_at(isa, &chosen) || !is_valid(a) || (a.mask_kind == ND_MASK_NONE) != (mask == nullptr))
    return -EINVAL;
  attend_single(a, kKernels[chosen].attend_range, kKernels[chosen].merge_ranges);
  return 0;
}
