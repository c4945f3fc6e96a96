// Attention of one query a head, as decoding asks for it: waits for memory, so every key and value is read
// once, where it lies, for all query heads that share it. bf16, in the namespace of AVX512-BF16.

#include "kernels/attention-inl.h"

// Sums of neighbouring lanes, those of a and then those of b.
inline Zmm add_lanes(Zmm a, Zmm b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Lane i becomes the sum over all lanes of v[i].
inline Zmm sum_each(const Zmm v[16]) {
  Zmm u[8], w[4];
  for (int i = 0; i < 8; ++i)
    u[i] =
        _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  // A 128-bit lane of w[i] holds its part of the sums of v[4 i] ... v[4 i + 3].
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)u[2 * i], b = (__m512d)u[2 * i + 1];
    w[i] = _mm512_add_ps((Zmm)_mm512_unpacklo_pd(a, b), (Zmm)_mm512_unpackhi_pd(a, b));
  }
  return add_lanes(add_lanes(w[0], w[1]), add_lanes(w[2], w[3]));
}

// q . k of 16 keys; those past `keys` read the first one again. v: what is read next.
inline Zmm scores_of(const uint16_t* q, const uint16_t* k, ptrdiff_t stride, int keys, int dim,
                     const uint16_t* v, ptrdiff_t v_stride) {
  Zmm sums[16];
  for (int i = 0; i < 16; ++i) {
    const uint16_t* key = k + (i < keys ? i : 0) * stride;
    const uint16_t* value = v + (i < keys ? i : 0) * v_stride;
    sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 32) {
      _mm_prefetch((const char*)(value + d), _MM_HINT_T0);
      sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)load_bits(q + d), (__m512bh)load_bits(key + d));
    }
  }
  return sum_each(sums);
}

// out = out * rescale + weights . v, 64 columns at a time. next: keys that are read next.
template <int Vectors>
inline void add_values(float* out, float rescale, const float* weights, const uint16_t* v, ptrdiff_t stride,
                       int keys, const uint16_t* next, ptrdiff_t next_stride) {
  // A register of 32 bf16 gives f32 of the even columns and of the odd ones.
  Zmm even[Vectors], odd[Vectors];
  const Bits high = _mm512_set1_epi32(int(0xffff0000));
  for (int j = 0; j < Vectors; ++j) even[j] = odd[j] = _mm512_setzero_ps();
  for (int i = 0; i < keys; ++i) {
    const Zmm weight = _mm512_set1_ps(weights[i]);
    for (int j = 0; j < Vectors; ++j) {
      const uint16_t* at = v + i * stride + 32 * j;
      _mm_prefetch((const char*)(next + i * next_stride + 32 * j), _MM_HINT_T0);
      const Bits both = load_bits(at);
      even[j] = _mm512_fmadd_ps((Zmm)_mm512_slli_epi32(both, 16), weight, even[j]);
      odd[j] = _mm512_fmadd_ps((Zmm)_mm512_and_si512(both, high), weight, odd[j]);
    }
  }
  const Bits low_half = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const Bits high_half = _mm512_add_epi32(low_half, _mm512_set1_epi32(8));
  const Zmm factor = _mm512_set1_ps(rescale);
  for (int j = 0; j < Vectors; ++j) {
    float* at = out + 32 * j;
    const Zmm low = _mm512_permutex2var_ps(even[j], low_half, odd[j]);
    const Zmm top = _mm512_permutex2var_ps(even[j], high_half, odd[j]);
    _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(at), factor, low));
    _mm512_storeu_ps(at + 16, _mm512_fmadd_ps(_mm512_loadu_ps(at + 16), factor, top));
  }
}

// One query head over one block of keys, from key `begin` on. next: the keys that are read after it.
inline void add_block(Partial& p, const Attention& a, int batch, int head, int begin, int keys,
                      const uint16_t* next) {
  const int kv_head = head / (a.heads / a.kv_heads);
  const auto* q = static_cast<const uint16_t*>(a.q) + offset(a.q_stride, batch, head, 0);
  const auto* k = static_cast<const uint16_t*>(a.k) + offset(a.k_stride, batch, kv_head, begin);
  const auto* v = static_cast<const uint16_t*>(a.v) + offset(a.v_stride, batch, kv_head, begin);
  const char* mask = mask_at(a, batch, head, 0, begin);
  if (a.mask_kind == ND_MASK_BOOL) keys = seen_keys(mask, keys);
  if (keys == 0) return;
  const Zmm scale = _mm512_set1_ps(a.scale * kLog2E);
  Zmm s[kKeyBlock / 16], top = _mm512_set1_ps(-INFINITY);
  __mmask16 nan = 0;
  for (int j = 0; j < kKeyBlock / 16; ++j) {
    s[j] = _mm512_set1_ps(-INFINITY);
    if (16 * j >= keys) continue;
    s[j] = _mm512_mul_ps(scores_of(q, k + 16 * j * a.k_stride[2], a.k_stride[2], keys - 16 * j, a.head_dim,
                                   v + 16 * j * a.v_stride[2], a.v_stride[2]),
                         scale);
    s[j] = masked(s[j], a, mask, 16 * j, keys);
    top = _mm512_max_ps(top, s[j]);
    nan |= _mm512_cmp_ps_mask(s[j], s[j], _CMP_UNORD_Q);
  }
  const float now = std::max(p.highest, _mm512_reduce_max_ps(top));
  if (now == -INFINITY && nan == 0) return;  // masks of numbers may hide all keys too
  alignas(64) float weights[kKeyBlock];
  Zmm sum = _mm512_setzero_ps();
  for (int j = 0; j < kKeyBlock / 16; ++j) {
    const Zmm w = exp2_of(_mm512_sub_ps(s[j], _mm512_set1_ps(now)));
    sum = _mm512_add_ps(sum, w);
    _mm512_store_ps(weights + 16 * j, w);
  }
  const float rescale = p.highest == -INFINITY ? 0 : exp2f(p.highest - now);
  p.sum = p.sum * rescale + _mm512_reduce_add_ps(sum);
  p.highest = now;
  int d = 0;
  for (; d + 64 <= a.head_dim; d += 64)
    add_values<2>(p.out + d, rescale, weights, v + d, a.v_stride[2], keys, next + d, a.k_stride[2]);
  if (d < a.head_dim)
    add_values<1>(p.out + d, rescale, weights, v + d, a.v_stride[2], keys, next + d, a.k_stride[2]);
}

inline void store_row(uint16_t* out, const float* y, int dim) {
  for (int d = 0; d < dim; d += 16)
    _mm256_storeu_si256((__m256i*)(out + d), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(y + d)));
}

using Element = uint16_t;
#include "kernels/attention_range-inl.h"
