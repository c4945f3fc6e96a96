// What attention kernels of all dtypes and ISAs share: a call, and of single queries how threads share them.
#ifndef ND_ATTENTION_CALL_H
#define ND_ATTENTION_CALL_H

#include <algorithm>

#include "bf16.h"
#include "isa.h"
#include "kernels/team.h"

namespace nd {

constexpr int kQueryBlock = 48, kKeyBlock = 64, kMaxHeadDim = 256;
// Keys of a single query that one thread takes at least; of more than kMaxRanges times as many it takes more.
constexpr int kRange = 256, kMaxRanges = 64;
constexpr float kLog2E = 1.44269504f;

struct Attention : NdAttention {
  const void *q, *k, *v, *mask;
  void *out, *scratch;
};

constexpr int blocks_of(int size, int block) { return (size + block - 1) / block; }

ND_INLINE ptrdiff_t offset(const ptrdiff_t stride[3], int batch, int head, int row) {
  return batch * stride[0] + head * stride[1] + row * stride[2];
}

ND_INLINE ptrdiff_t mask_bytes(const NdAttention& a) {  // of an element
  return a.mask_kind == ND_MASK_F32 ? 4 : a.mask_kind == ND_MASK_BF16 ? 2 : 1;
}

// The mask of one query of one head from key `key` on, or nullptr.
ND_INLINE const char* mask_at(const Attention& a, int batch, int head, int query, int key) {
  if (a.mask == nullptr) return nullptr;
  return static_cast<const char*>(a.mask) + (offset(a.mask_stride, batch, head, query) + key) * mask_bytes(a);
}

// How many keys a query sees of the first `keys`, if hidden ones in between count too. mask: of bools.
ND_INLINE int seen_keys(const char* mask, int keys) {
  while (keys > 0 && !mask[keys - 1]) --keys;
  return keys;
}

// Ranges of keys that single queries are cut into.
inline int ranges_of(const NdAttention& a) { return std::min(kMaxRanges, blocks_of(a.keys, kRange)); }

// What one query head has of a range of keys: its highest score in base 2, and sums relative to it.
struct Partial {
  float highest, sum;
  float* out;  // [head_dim]
};

ND_INLINE Partial partial_at(const Attention& a, int head, int range, int ranges) {
  float* at = static_cast<float*>(a.scratch) + (ptrdiff_t(head) * ranges + range) * (2 + a.head_dim);
  return {at[0], at[1], at + 2};
}

ND_INLINE void store_partial(const Partial& p) {
  p.out[-2] = p.highest;
  p.out[-1] = p.sum;
}

// What a dtype has on an ISA.
struct AttentionKernels {
  // Of one query a head: all query heads of a KV head over keys [begin, end), and the ranges of one query head to its
  // result.
  void (*attend_range)(const Attention& a, int batch, int kv_head, int range, int ranges, int begin, int end);
  void (*merge_ranges)(const Attention& a, int batch, int head, int ranges);
  // Of more: a block of keys and values as `attend` wants them, and a block of queries over all keys.
  void (*pack)(const Attention& a, int batch, int kv_head, int key, int keys, void* packed_k, void* packed_v);
  void (*attend)(const Attention& a, int batch, int head, int begin, int rows, const void* packed_k,
                 const void* packed_v);
  size_t packed_bytes;  // of a number
};

// Those that sum in f32, for ND_F32, ND_BF16 and ND_F16; nullptr for other dtypes.
const AttentionKernels* wide_attention(Isa isa, int dtype);

// Of one query a head. Threads share out the KV heads and, of long contexts, ranges of their keys.
inline void attend_single(const Attention& a, const AttentionKernels& kernels) {
  const int end = a.causal ? 1 : a.keys, ranges = ranges_of(a), heads = a.batch * a.kv_heads;
  const int range = blocks_of(blocks_of(a.keys, ranges), kKeyBlock) * kKeyBlock;
  for_each_item(heads * ranges, [&](int item) {
    const int head = item / ranges, r = item % ranges, begin = std::min(end, r * range);
    kernels.attend_range(a, head / a.kv_heads, head % a.kv_heads, r, ranges, begin,
                         std::min(end, begin + range));
  });
  for_each_item(a.batch * a.heads,
                [&](int item) { kernels.merge_ranges(a, item / a.heads, item % a.heads, ranges); });
}

}  // namespace nd

#endif
