// Attention in bf16, of prompts and of single queries: the choice of ISA, and the work of all threads.
#include <errno.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

#include "isa.h"
#include "kernels/attention_call.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nd {
namespace {

#if defined(__x86_64__)
ND_TARGET_AVX512_BF16_BEGIN
namespace avx512_bf16 {
#include "kernels/attention_one-inl.h"
}  // namespace avx512_bf16
ND_TARGET_END
#endif

// Bytes of one head's packed keys; its packed values are as many.
size_t packed_bytes(const NdAttention& a) {
  return size_t(blocks_of(a.keys, kKeyBlock)) * kKeyBlock * a.head_dim * sizeof(uint16_t);
}

bool is_valid(const NdAttention& a) {
  return a.batch > 0 && a.queries > 0 && a.keys > 0 && a.kv_heads > 0 && a.heads % a.kv_heads == 0 &&
         a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 32 == 0 && a.mask_kind >= ND_MASK_NONE &&
         a.mask_kind <= ND_MASK_F32;
}

#if defined(__x86_64__)
void attend_prompt(const Attention& a) {
  const size_t per_head = packed_bytes(a);
  const auto keys_of = [&](int head) { return (uint16_t*)((char*)a.scratch + 2 * head * per_head); };
  const auto values_of = [&](int head) { return (uint16_t*)((char*)keys_of(head) + per_head); };

  const int key_blocks = blocks_of(a.keys, kKeyBlock);
  for_each_item(a.batch * a.kv_heads * key_blocks, [&](int item) {
    const int head = item / key_blocks, key = item % key_blocks * kKeyBlock;
    const int batch = head / a.kv_heads, keys = std::min(kKeyBlock, a.keys - key);
    const auto* k = static_cast<const uint16_t*>(a.k) + offset(a.k_stride, batch, head % a.kv_heads, key);
    const auto* v = static_cast<const uint16_t*>(a.v) + offset(a.v_stride, batch, head % a.kv_heads, key);
    const ptrdiff_t at = ptrdiff_t(key) * a.head_dim;
    avx512_bf16::pack_keys(k, a.k_stride[2], keys, a.head_dim, keys_of(head) + at);
    avx512_bf16::pack_values(v, a.v_stride[2], keys, a.head_dim, values_of(head) + at);
  });

  const int query_blocks = blocks_of(a.queries, kQueryBlock), heads = a.batch * a.heads;
  for_each_item(heads * query_blocks, [&](int item) {
    // Late queries see most keys under a causal mask: they go first, so that no thread ends with a long one.
    const int block = query_blocks - 1 - item / heads, head = item % heads;
    const int batch = head / a.heads, own = head % a.heads, begin = block * kQueryBlock;
    const int kv = batch * a.kv_heads + own / (a.heads / a.kv_heads);
    avx512_bf16::attend(a, batch, own, begin, std::min(kQueryBlock, a.queries - begin), keys_of(kv),
                        values_of(kv));
  });
}
#endif

}  // namespace
}  // namespace nd

int nd_attention_runs(void) { return nd::runs(nd::Isa::kAvx512Bf16); }

size_t nd_attention_scratch(const NdAttention* sizes) {
  const NdAttention& a = *sizes;
  if (a.queries == 1) return size_t(a.batch) * a.heads * nd::ranges_of(a) * (2 + a.head_dim) * sizeof(float);
  return 2 * size_t(a.batch) * a.kv_heads * nd::packed_bytes(a);
}

int nd_attention(const NdAttention* sizes, const void* q, const void* k, const void* v, const void* mask,
                 void* out, void* scratch) {
  using namespace nd;
  const Attention a = {*sizes, q, k, v, mask, out, scratch};
  if (!is_valid(a) || (a.mask_kind == ND_MASK_NONE) != (mask == nullptr)) return -EINVAL;
  if (!nd_attention_runs()) return -EOPNOTSUPP;
#if defined(__x86_64__)
  if (a.queries == 1)
    attend_single(a, avx512_bf16::attend_range, avx512_bf16::merge_ranges);
  else
    attend_prompt(a);
#endif
  return 0;
}
