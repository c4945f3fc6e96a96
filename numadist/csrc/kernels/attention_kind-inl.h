// Attention of elements of one kind of vec_f32-inl.h, Kind. Included by attention_wide-inl.h in a namespace for each.

using Element = Kind::Stored;

inline void widen_row(const Element* from, float* to, int dim) {
  for (int d = 0; d < dim; d += int(kLanes)) store(to + d, Kind::load(from + d));
}

inline void store_row(Element* out, const float* y, int dim) {
  for (int d = 0; d < dim; d += int(kLanes)) Kind::store(out + d, load(y + d));
}

// ---- single queries; what waits for memory is as in attention_one-inl.h ----

constexpr int kLine = 64 / int(sizeof(Element));  // of a cache

// q . k of kLanes keys; those past `keys` read the first one again. v: what is read next.
inline Vec scores_of(const float* q, const Element* k, ptrdiff_t stride, int keys, int dim, const Element* v,
                     ptrdiff_t v_stride) {
  Vec sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < int(kLanes); ++i) {
    const Element* key = k + (i < keys ? i : 0) * stride;
    for (int d = 0; d < dim; d += kLine) __builtin_prefetch(v + (i < keys ? i : 0) * v_stride + d);
    sums[i] = Vec{};
    for (int d = 0; d < dim; d += int(kLanes)) sums[i] += load(q + d) * Kind::load(key + d);
  }
  return sum_each(sums);
}

// out = out * rescale + weights . v, V vectors of columns. next: keys that are read next.
template <int V>
inline void add_values(float* out, float rescale, const float* weights, const Element* v, ptrdiff_t stride,
                       int keys, const Element* next, ptrdiff_t next_stride) {
  Vec sums[V];
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) sums[j] = load(out + j * kLanes) * rescale;
  for (int i = 0; i < keys; ++i, v += stride, next += next_stride) {
    for (int d = 0; d < V * int(kLanes); d += kLine) __builtin_prefetch(next + d);
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sums[j] += weights[i] * Kind::load(v + j * kLanes);
  }
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) store(out + j * kLanes, sums[j]);
}

// Scores of a block to weights relative to the highest score so far; what the blocks before gave is worth
// `rescale` of it. False: all keys are hidden.
inline bool softmax_block(Partial& p, float* scores, int keys, float* rescale) {
  Vec top = Vec{} - INFINITY, sum = {};
  for (int i = 0; i < keys; i += int(kLanes)) top = higher(top, load(scores + i));
  const float now = highest_of(top, p.highest);
  if (now == -INFINITY) return false;
  for (int i = 0; i < keys; i += int(kLanes)) {
    const Vec weights = exp2_of(load(scores + i) - now);
    store(scores + i, weights);
    sum += weights;
  }
  *rescale = p.highest == -INFINITY ? 0 : exp2f(p.highest - now);
  p.sum = p.sum * *rescale + sum_of(sum);
  p.highest = now;
  return true;
}

// One query head over one block of keys, from key `begin` on. next: the keys that are read after it.
inline void add_block(Partial& p, const Attention& a, int batch, int head, int begin, int keys,
                      const Element* next) {
  const int kv_head = head / (a.heads / a.kv_heads), lanes = int(kLanes);
  const auto* k = static_cast<const Element*>(a.k) + offset(a.k_stride, batch, kv_head, begin);
  const auto* v = static_cast<const Element*>(a.v) + offset(a.v_stride, batch, kv_head, begin);
  const char* mask = mask_at(a, batch, head, 0, begin);
  if (a.mask_kind == ND_MASK_BOOL) keys = seen_keys(mask, keys);
  if (keys == 0) return;
  alignas(64) float scores[kKeyBlock], q[kMaxHeadDim];
  widen_row(static_cast<const Element*>(a.q) + offset(a.q_stride, batch, head, 0), q, a.head_dim);
  for (int i = 0; i < keys; i += lanes) {
    const Vec s = scores_of(q, k + i * a.k_stride[2], a.k_stride[2], keys - i, a.head_dim,
                            v + i * a.v_stride[2], a.v_stride[2]);
    store(scores + i, masked(s * (a.scale * kLog2E), a, mask, i, keys));
  }
  float rescale = 0;
  if (!softmax_block(p, scores, keys, &rescale)) return;
  int d = 0;
  for (; d + 4 * lanes <= a.head_dim; d += 4 * lanes)
    add_values<4>(p.out + d, rescale, scores, v + d, a.v_stride[2], keys, next + d, a.k_stride[2]);
  for (; d < a.head_dim; d += lanes)
    add_values<1>(p.out + d, rescale, scores, v + d, a.v_stride[2], keys, next + d, a.k_stride[2]);
}

#include "kernels/attention_range-inl.h"

// ---- prompts ----

// Keys [key, key + keys) of a head to [dim][kKeyBlock], past the end zeros, and values to [keys][dim]; in f32.
inline void pack(const Attention& a, int batch, int kv_head, int key, int keys, void* packed_k,
                 void* packed_v) {
  const auto* k = static_cast<const Element*>(a.k) + offset(a.k_stride, batch, kv_head, key);
  const auto* v = static_cast<const Element*>(a.v) + offset(a.v_stride, batch, kv_head, key);
  auto* columns = static_cast<float*>(packed_k);
  auto* rows = static_cast<float*>(packed_v);
  const int lanes = int(kLanes);
  for (int first = 0; first < kKeyBlock; first += lanes)
    for (int d = 0; d < a.head_dim; d += lanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        block[i] = first + i < keys ? Kind::load(k + (first + i) * a.k_stride[2] + d) : Vec{};
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) store(columns + (d + i) * kKeyBlock + first, block[i]);
    }
  for (int i = 0; i < keys; ++i) widen_row(v + i * a.v_stride[2], rows + i * a.head_dim, a.head_dim);
}

inline void write_rows(QueryBlock& b, const Attention& a, int rows, Element* out) {
  for (int i = 0; i < rows; ++i) {
    float* y = b.out + i * a.head_dim;
    const float factor = b.sum[i] == 0 ? 0.0f : 1 / b.sum[i];
    for (int d = 0; d < a.head_dim; d += int(kLanes)) store(y + d, load(y + d) * factor);
    store_row(out + i * a.out_stride[2], y, a.head_dim);
  }
}

// Queries [begin, begin + rows) of one head; k and v packed.
inline void attend(const Attention& a, int batch, int head, int begin, int rows, const void* packed_k,
                   const void* packed_v) {
  static thread_local QueryBlock b;
  const int dim = a.head_dim;
  const auto* q = static_cast<const Element*>(a.q) + offset(a.q_stride, batch, head, begin);
  for (int i = 0; i < kQueryBlock; ++i) {  // rows past the last are carried along, and never written
    b.highest[i] = b.now_highest[i] = -INFINITY;
    b.sum[i] = b.now_sum[i] = 0;
    if (i < rows) widen_row(q + i * a.q_stride[2], b.q + i * dim, dim);
  }
  memset(b.out, 0, sizeof(float) * rows * dim);
  const int end = a.causal ? std::min(a.keys, begin + rows) : a.keys;
  for (int key = 0; key < end; key += kKeyBlock) {
    const int keys = std::min(kKeyBlock, end - key), columns = blocks_of(keys, 16) * 16;
    const ptrdiff_t at = ptrdiff_t(key) * dim;
    if (a.mask_kind == ND_MASK_BOOL &&
        hides_all(mask_at(a, batch, head, begin, key), a.mask_stride[2], rows, keys))
      continue;
    multiply(rows, columns, b.q, dim, static_cast<const float*>(packed_k) + at, kKeyBlock, dim, b.scores[0],
             kKeyBlock, nullptr);
    for (int i = 0; i < rows; ++i) {
      const int visible = a.causal ? std::min(keys, begin + i + 1 - key) : keys;
      softmax_row(b, i, a, mask_at(a, batch, head, begin + i, key), columns, visible);
    }
    advance(b);
    multiply(rows, dim, b.scores[0], kKeyBlock, static_cast<const float*>(packed_v) + at, dim, keys, b.out,
             dim, b.rescale);
  }
  write_rows(b, a, rows, static_cast<Element*>(a.out) + offset(a.out_stride, batch, head, begin));
}
