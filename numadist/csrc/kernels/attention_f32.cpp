// Attention of single queries in f32: the choice of ISA.
#include <errno.h>
#include <math.h>
#include <string.h>

#include <utility>

#include "comm/reduce.h"
#include "kernels/attention_call.h"

namespace nd {
namespace {

namespace portable {
constexpr size_t kLanes = 4;
#include "kernels/attention_f32-inl.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr size_t kLanes = 8;
#include "kernels/attention_f32-inl.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
constexpr size_t kLanes = 16;
#include "kernels/attention_f32-inl.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

// Names as nd_isa_name has them.
void attend([[maybe_unused]] const char* isa, const Attention& a) {
#if defined(__x86_64__)
  if (isa_includes(isa, "avx512")) return attend_single(a, avx512::attend_range, avx512::merge_ranges);
  if (isa_includes(isa, "avx2")) return attend_single(a, avx2::attend_range, avx2::merge_ranges);
#endif
  attend_single(a, portable::attend_range, portable::merge_ranges);
}

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
  const char* name = nd_isa_name(isa);
  if (name == nullptr || !is_valid(a) || (a.mask_kind == ND_MASK_NONE) != (mask == nullptr)) return -EINVAL;
  attend(name, a);
  return 0;
}
