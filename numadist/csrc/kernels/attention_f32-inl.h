// Attention of one query a head in f32. Included by attention_f32.cpp once per ISA, whose registers hold
// kLanes f32; what waits for memory is as in attention_one-inl.h.

#include "kernels/vec_f32-inl.h"

// Sums of neighbouring lanes, those of a and then those of b.
template <size_t... I>
inline Vec add_pairs(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shuffle(a, b, Ints{int32_t(2 * I)...}) +
         __builtin_shuffle(a, b, Ints{int32_t(2 * I + 1)...});
}

// Lane i becomes the sum over all lanes of v[i].
inline Vec sum_each(Vec (&v)[kLanes]) {
#pragma GCC unroll 4
  for (size_t n = kLanes; n > 1; n /= 2)
#pragma GCC unroll 8
    for (size_t i = 0; i < n / 2; ++i)
      v[i] = add_pairs(v[2 * i], v[2 * i + 1], std::make_index_sequence<kLanes>());
  return v[0];
}

inline Vec higher(Vec a, Vec b) { return (b > a) | (b != b) ? b : a; }  // a NaN on either side is carried on

// 2^x for x <= 0, nothing where that is below the normal numbers, NaN of NaN.
inline Vec exp2_of(Vec x) {
  const Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // towards zero, so to the nearest
  const Vec f = x - __builtin_convertvector(whole, Vec);
  Vec y = Vec{} + 1.5252734e-5f;  // Taylor's ln(2)^n / n!: 6e-9 off at most on [-0.5, 0.5]
  y = y * f + 1.5403530e-4f;
  y = y * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  const Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<Ints>(y) + (whole << 23));
  return x < -125.0f ? Vec{} : scaled;
}

// q . k of kLanes keys; those past `keys` read the first one again.
inline Vec scores_of(const float* q, const float* k, ptrdiff_t stride, int keys, int dim) {
  Vec sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < int(kLanes); ++i) {
    const float* key = k + (i < keys ? i : 0) * stride;
    for (int d = 0; d < dim; d += 16) __builtin_prefetch(key + kKeyBlock * stride + d);
    sums[i] = Vec{};
    for (int d = 0; d < dim; d += int(kLanes)) sums[i] += load(q + d) * load(key + d);
  }
  return sum_each(sums);
}

// Hidden keys get -inf, and what follows the last one up to a whole vector.
inline void hide(float* scores, const Attention& a, const char* mask, int keys) {
  for (int i = 0; i < keys && a.mask_kind == ND_MASK_BOOL; ++i)
    if (mask[i] == 0) scores[i] = -INFINITY;
  for (int i = 0; i < keys && a.mask_kind == ND_MASK_F32; ++i)
    scores[i] += reinterpret_cast<const float*>(mask)[i] * kLog2E;
  for (int i = keys; i % int(kLanes) != 0; ++i) scores[i] = -INFINITY;
}

inline bool hides_all(const char* mask, int keys) {
  char any = 0;
  for (int i = 0; i < keys; ++i) any |= mask[i];
  return any == 0;
}

// out = out * rescale + weights . v, V vectors of columns.
template <int V>
inline void add_values(float* out, float rescale, const float* weights, const float* v, ptrdiff_t stride,
                       int keys) {
  Vec sums[V];
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) sums[j] = load(out + j * kLanes) * rescale;
  for (int i = 0; i < keys; ++i, v += stride) {
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      __builtin_prefetch(v + kKeyBlock * stride + j * kLanes);
      sums[j] += weights[i] * load(v + j * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) store(out + j * kLanes, sums[j]);
}

// Scores of a block to weights relative to the highest score so far; what the blocks before gave is worth
// `rescale` of it. False: all keys are hidden.
inline bool softmax_block(Partial& p, float* scores, int keys, float* rescale) {
  Vec top = Vec{} + p.highest, sum = {};
  for (int i = 0; i < keys; i += int(kLanes)) top = higher(top, load(scores + i));
  float now = p.highest, total = 0;
  for (size_t i = 0; i < kLanes; ++i) now = top[i] > now || top[i] != top[i] ? top[i] : now;
  if (now == -INFINITY) return false;
  for (int i = 0; i < keys; i += int(kLanes)) {
    const Vec weights = exp2_of(load(scores + i) - now);
    store(scores + i, weights);
    sum += weights;
  }
  for (size_t i = 0; i < kLanes; ++i) total += sum[i];
  *rescale = p.highest == -INFINITY ? 0 : exp2f(p.highest - now);
  p.sum = p.sum * *rescale + total;
  p.highest = now;
  return true;
}

// One query head over one block of keys, from key `begin` on.
inline void add_block(Partial& p, const Attention& a, int batch, int head, int begin, int keys) {
  const int kv_head = head / (a.heads / a.kv_heads), lanes = int(kLanes);
  const auto* q = static_cast<const float*>(a.q) + offset(a.q_stride, batch, head, 0);
  const auto* k = static_cast<const float*>(a.k) + offset(a.k_stride, batch, kv_head, begin);
  const auto* v = static_cast<const float*>(a.v) + offset(a.v_stride, batch, kv_head, begin);
  const char* mask = mask_at(a, batch, head, 0, begin);
  if (a.mask_kind == ND_MASK_BOOL && hides_all(mask, keys)) return;
  alignas(64) float scores[kKeyBlock];
  for (int i = 0; i < keys; i += lanes)
    store(scores + i,
          scores_of(q, k + i * a.k_stride[2], a.k_stride[2], keys - i, a.head_dim) * (a.scale * kLog2E));
  hide(scores, a, mask, keys);
  float rescale = 0;
  if (!softmax_block(p, scores, keys, &rescale)) return;
  int d = 0;
  for (; d + 4 * lanes <= a.head_dim; d += 4 * lanes)
    add_values<4>(p.out + d, rescale, scores, v + d, a.v_stride[2], keys);
  for (; d < a.head_dim; d += lanes) add_values<1>(p.out + d, rescale, scores, v + d, a.v_stride[2], keys);
}

inline void store_row(float* out, const float* y, int dim) { memcpy(out, y, sizeof(float) * dim); }

using Element = float;
#include "kernels/attention_range-inl.h"
