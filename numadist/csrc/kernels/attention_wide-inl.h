// Attention in f32 of what is f32 or widened to it. Included by attention_wide.cpp once per ISA, which says how many
// registers it has, kRegisters; the kinds of elements are in attention_kind-inl.h.

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

// kLanes of the scores of one query, in base 2, from key `at` of a block on; hidden keys become -inf. mask: of the
// query, from the block's first key on. visible: keys of the block that it may see.
inline Vec masked(Vec scores, const Attention& a, const char* mask, int at, int visible) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  const Vec hidden = Vec{} - INFINITY;
  const int count = visible - at;
  if (count <= 0) return hidden;
  if (a.mask_kind != ND_MASK_NONE) {
    const ptrdiff_t bytes = mask_bytes(a);
    alignas(64) char last[4 * kLanes] = {};
    mask += at * bytes;
    if (count < int(kLanes)) mask = static_cast<const char*>(memcpy(last, mask, count * bytes));
    if (a.mask_kind == ND_MASK_BOOL) {
      Bytes seen;
      memcpy(&seen, mask, sizeof seen);
      scores = __builtin_convertvector(seen, Ints) != 0 ? scores : hidden;
    } else {
      const bool is_f32 = a.mask_kind == ND_MASK_F32;
      scores += (is_f32 ? F32::load((const float*)mask) : Bf16::load((const uint16_t*)mask)) * kLog2E;
    }
  }
  if (count >= int(kLanes)) return scores;
  for (size_t i = count; i < kLanes; ++i) scores[i] = -INFINITY;
  return scores;
}

// Whether a bool mask hides every key of a block from every query of it.
inline bool hides_all(const char* mask, ptrdiff_t row_stride, int rows, int keys) {
  for (int i = 0; i < rows; ++i, mask += row_stride) {
    char any = 0;
    for (int key = 0; key < keys; ++key) any |= mask[key];
    if (any != 0) return false;
  }
  return true;
}

inline float highest_of(Vec v, float highest) {  // as `higher`
  for (size_t i = 0; i < kLanes; ++i) highest = v[i] > highest || v[i] != v[i] ? v[i] : highest;
  return highest;
}

inline float sum_of(Vec v) {
  float sum = 0;
  for (size_t i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// ---- prompts ----

// Blocks of S x S lanes off the diagonal change places, in all pairs of vectors S apart.
template <size_t S, size_t... I>
inline void swap_blocks(Vec (&v)[kLanes], std::index_sequence<I...>) {
#pragma GCC unroll 16
  for (size_t i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Vec a = v[i], b = v[i + S];
    v[i] = __builtin_shuffle(a, b, Ints{int32_t(I & S ? kLanes + I - S : I)...});
    v[i + S] = __builtin_shuffle(a, b, Ints{int32_t(I & S ? kLanes + I : I + S)...});
  }
}

// Lane j of v[i] becomes lane i of v[j].
template <size_t S = 1>
inline void transpose(Vec (&v)[kLanes]) {
  swap_blocks<S>(v, std::make_index_sequence<kLanes>());
  if constexpr (2 * S < kLanes) transpose<2 * S>(v);
}

constexpr int kTileRows = 6, kTileVectors = kRegisters == 32 ? 4 : 2;

// c[M][V vectors] = c * scale[row] + a[M][depth] b; without `scale` c is written only.
template <int M, int V>
inline void multiply_tile(const float* a, ptrdiff_t a_stride, const float* b, ptrdiff_t b_stride, int depth,
                          float* c, ptrdiff_t c_stride, const float* scale) {
  Vec sums[M][V];
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j)
      sums[i][j] = scale == nullptr ? Vec{} : load(c + i * c_stride + j * kLanes) * scale[i];
  for (int k = 0; k < depth; ++k, b += b_stride) {
    Vec columns[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) columns[j] = load(b + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sums[i][j] += a[i * a_stride + k] * columns[j];
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(c + i * c_stride + j * kLanes, sums[i][j]);
}

template <int M, int V>
inline void multiply_rows(int rows, const float* a, ptrdiff_t a_stride, const float* b, ptrdiff_t b_stride,
                          int depth, float* c, ptrdiff_t c_stride, const float* scale) {
  for (; rows >= M; rows -= M, a += M * a_stride, c += M * c_stride, scale += scale == nullptr ? 0 : M)
    multiply_tile<M, V>(a, a_stride, b, b_stride, depth, c, c_stride, scale);
  if constexpr (M > 1)
    if (rows > 0) multiply_rows<M - 1, V>(rows, a, a_stride, b, b_stride, depth, c, c_stride, scale);
}

// columns: a multiple of 16.
template <int V = kTileVectors>
inline void multiply(int rows, int columns, const float* a, ptrdiff_t a_stride, const float* b,
                     ptrdiff_t b_stride, int depth, float* c, ptrdiff_t c_stride, const float* scale) {
  constexpr int kColumns = V * int(kLanes);
  int at = 0;
  for (; columns - at >= kColumns; at += kColumns)
    multiply_rows<kTileRows, V>(rows, a, a_stride, b + at, b_stride, depth, c + at, c_stride, scale);
  if constexpr (V > 1)
    if (at < columns)
      multiply<V / 2>(rows, columns - at, a, a_stride, b + at, b_stride, depth, c + at, c_stride, scale);
}

// What a block of queries keeps while it walks over the keys. Rows of q and out are head_dim long.
struct QueryBlock {
  alignas(64) float scores[kQueryBlock][kKeyBlock];  // and then weights
  alignas(64) float q[kQueryBlock * kMaxHeadDim], out[kQueryBlock * kMaxHeadDim];
  alignas(64) float highest[kQueryBlock], sum[kQueryBlock];          // over the blocks before
  alignas(64) float now_highest[kQueryBlock], now_sum[kQueryBlock];  // with and of this block
  alignas(64) float rescale[kQueryBlock];                            // of what the blocks before gave
};

// Scores of one row, for the first `columns` keys, to weights relative to its maximum so far.
inline void softmax_row(QueryBlock& b, int row, const Attention& a, const char* mask, int columns,
                        int visible) {
  float* scores = b.scores[row];
  const bool sees_all = a.mask_kind == ND_MASK_NONE && visible >= columns;
  Vec top = Vec{} - INFINITY, sum = {};
  for (int at = 0; at < columns; at += int(kLanes)) {
    Vec s = load(scores + at) * (a.scale * kLog2E);
    if (!sees_all) s = masked(s, a, mask, at, visible);
    store(scores + at, s);
    top = higher(top, s);
  }
  const float now = highest_of(top, b.highest[row]);
  // A row that has seen no key yet: nothing may be subtracted from its -inf, and its weights come out as nothing.
  const float base = now == -INFINITY ? 0 : now;
  for (int at = 0; at < columns; at += int(kLanes)) {
    const Vec weights = exp2_of(load(scores + at) - base);
    store(scores + at, weights);
    sum += weights;
  }
  b.now_highest[row] = now;
  b.now_sum[row] = sum_of(sum);
}

// The running maximum and sum of all rows move on.
inline void advance(QueryBlock& b) {
  for (int i = 0; i < kQueryBlock; i += int(kLanes)) {
    const Vec before = load(b.highest + i), now = load(b.now_highest + i);
    const Vec rescale = before > -INFINITY ? exp2_of(before - now) : Vec{};
    store(b.rescale + i, rescale);
    store(b.sum + i, load(b.sum + i) * rescale + load(b.now_sum + i));
    store(b.highest + i, now);
  }
}

namespace f32 {
using Kind = F32;
#include "kernels/attention_kind-inl.h"
}  // namespace f32
namespace bf16 {
using Kind = Bf16;
#include "kernels/attention_kind-inl.h"
}  // namespace bf16
namespace f16 {
using Kind = F16;
#include "kernels/attention_kind-inl.h"
}  // namespace f16
