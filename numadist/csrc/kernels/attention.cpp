// Attention in bf16, of prompts and of single queries: the choice of ISA, and the work of all threads.
#include <errno.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
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

bool is_valid(const NdAttention& a, int multiple) {
  return a.batch > 0 && a.queries > 0 && a.keys > 0 && a.kv_heads > 0 && a.heads % a.kv_heads == 0 &&
         a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % multiple == 0 &&
         a.mask_kind >= ND_MASK_NONE && a.mask_kind <= ND_MASK_F32;
}

// nullptr: no kernel takes it.
const AttentionKernels* kernels_for(int isa, int dtype, const NdAttention& a) {
  Isa chosen;
  if (!isa_at(isa, &chosen)) return nullptr;
#if defined(__x86_64__)
  static constexpr AttentionKernels kBf16 = {avx512_bf16::attend_range, avx512_bf16::merge_ranges,
                                             avx512_bf16::pack, avx512_bf16::attend, sizeof(uint16_t)};
  if (dtype == ND_BF16 && chosen >= Isa::kAvx512Bf16 && is_valid(a, 32)) return &kBf16;
#endif
  return is_valid(a, 16) ? wide_attention(chosen, dtype) : nullptr;
}

// Bytes of one head's packed keys; its packed values are as many.
size_t packed_bytes(const NdAttention& a, const AttentionKernels& kernels) {
  return size_t(blocks_of(a.keys, kKeyBlock)) * kKeyBlock * a.head_dim * kernels.packed_bytes;
}

// Packed keys and values of one head that stay in a second-level cache.
constexpr size_t kCached = 256 << 10;

void attend_prompt(const Attention& a, const AttentionKernels& kernels) {
  const size_t per_head = packed_bytes(a, kernels), per_key = a.head_dim * kernels.packed_bytes;
  const int kv_heads = a.batch * a.kv_heads, shared = a.heads / a.kv_heads;
  const int key_blocks = blocks_of(a.keys, kKeyBlock), query_blocks = blocks_of(a.queries, kQueryBlock);
  // A block of keys of a KV head to its place in memory for `slot` heads; a block of queries over all of them.
  const auto keys_at = [&](int slot) { return static_cast<char*>(a.scratch) + 2 * slot * per_head; };
  const auto pack = [&](int head, int block, int slot) {
    const int key = block * kKeyBlock;
    char* to = keys_at(slot) + key * per_key;
    kernels.pack(a, head / a.kv_heads, head % a.kv_heads, key, std::min(kKeyBlock, a.keys - key), to,
                 to + per_head);
  };
  const auto attend = [&](int batch, int head, int block, int slot) {
    const int begin = block * kQueryBlock;
    kernels.attend(a, batch, head, begin, std::min(kQueryBlock, a.queries - begin), keys_at(slot),
                   keys_at(slot) + per_head);
  };

  // Of many small heads a thread packs one at a time, and reads it from its cache.
  std::atomic<bool> is_done{false};
  for_each_item(kv_heads, [&](int kv) {
    if (2 * per_head > kCached || kv_heads < 4 * num_threads()) return;
    const int slot = thread_index();
    for (int block = 0; block < key_blocks; ++block) pack(kv, block, slot);
    for (int i = 0; i < shared * query_blocks; ++i)
      attend(kv / a.kv_heads, kv % a.kv_heads * shared + i / query_blocks, i % query_blocks, slot);
    is_done.store(true, std::memory_order_relaxed);  // the end of the region orders it
  });
  if (is_done.load(std::memory_order_relaxed)) return;

  for_each_item(kv_heads * key_blocks,
                [&](int item) { pack(item / key_blocks, item % key_blocks, item / key_blocks); });
  const int heads = a.batch * a.heads;
  for_each_item(heads * query_blocks, [&](int item) {
    // Late queries see most keys under a causal mask: they go first, so that no thread ends with a long one.
    const int head = item % heads;
    attend(head / a.heads, head % a.heads, query_blocks - 1 - item / heads, head / shared);
  });
}

}  // namespace
}  // namespace nd

size_t nd_attention_scratch(int isa, int dtype, const NdAttention* sizes) {
  const NdAttention& a = *sizes;
  const nd::AttentionKernels* kernels = nd::kernels_for(isa, dtype, a);
  if (kernels == nullptr) return 0;
  if (a.queries == 1) return size_t(a.batch) * a.heads * nd::ranges_of(a) * (2 + a.head_dim) * sizeof(float);
  return 2 * size_t(a.batch) * a.kv_heads * nd::packed_bytes(a, *kernels);
}

int nd_attention(int isa, int dtype, const NdAttention* sizes, const void* q, const void* k, const void* v,
                 const void* mask, void* out, void* scratch) {
  using namespace nd;
  const Attention a = {*sizes, q, k, v, mask, out, scratch};
  const AttentionKernels* kernels = kernels_for(isa, dtype, a);
  if (kernels == nullptr || (a.mask_kind == ND_MASK_NONE) != (mask == nullptr)) return -EINVAL;
  if (a.queries == 1)
    attend_single(a, *kernels);
  else
    attend_prompt(a, *kernels);
  return 0;
}
