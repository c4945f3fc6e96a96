// Attention of a prefill by AVX512-BF16 products; compiled for that ISA by attention.cpp.
//
// Keys and values are packed once, in the order the dot product instruction reads them: pairs of bf16 along the
// contracted dim, side by side for 16 columns. Then each block of queries walks over the blocks of keys with a
// running maximum and sum (online softmax), and skips the blocks its mask hides: half of them under a causal mask.

using Zmm = __m512;
using Bits = __m512i;

inline Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }

inline Bits pair_at(const uint16_t* p) {  // two neighbouring bf16 for all 16 columns
  int32_t pair;
  memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// c[M][16 NV] = c * scale[row] + a[M][2 pairs] b; without `scale` c is written only.
template <int M, int NV>
inline void multiply_tile(const uint16_t* a, ptrdiff_t a_stride, const uint16_t* b, ptrdiff_t b_stride,
                          int pairs, float* c, ptrdiff_t c_stride, const float* scale) {
  Zmm sum[M][NV];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < NV; ++j)
      sum[i][j] = scale == nullptr
                      ? _mm512_setzero_ps()
                      : _mm512_mul_ps(_mm512_loadu_ps(c + i * c_stride + 16 * j), _mm512_set1_ps(scale[i]));
  for (int p = 0; p < pairs; ++p) {
    Bits columns[NV];
    for (int j = 0; j < NV; ++j) columns[j] = load_bits(b + p * b_stride + 32 * j);
    for (int i = 0; i < M; ++i) {
      const Bits row = pair_at(a + i * a_stride + 2 * p);
      for (int j = 0; j < NV; ++j)
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)row, (__m512bh)columns[j]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < NV; ++j) _mm512_storeu_ps(c + i * c_stride + 16 * j, sum[i][j]);
}

template <int NV>
inline void multiply_rows(int rows, const uint16_t* a, ptrdiff_t a_stride, const uint16_t* b,
                          ptrdiff_t b_stride, int pairs, float* c, ptrdiff_t c_stride, const float* scale) {
  const auto tile = [&](auto m, int at) {
    multiply_tile<decltype(m)::value, NV>(a + at * a_stride, a_stride, b, b_stride, pairs, c + at * c_stride,
                                          c_stride, scale == nullptr ? nullptr : scale + at);
  };
  int at = 0;
  for (; rows - at >= 6; at += 6) tile(std::integral_constant<int, 6>(), at);
  switch (rows - at) {
    case 5:
      return tile(std::integral_constant<int, 5>(), at);
    case 4:
      return tile(std::integral_constant<int, 4>(), at);
    case 3:
      return tile(std::integral_constant<int, 3>(), at);
    case 2:
      return tile(std::integral_constant<int, 2>(), at);
    case 1:
      return tile(std::integral_constant<int, 1>(), at);
    default:
      return;
  }
}

// b is [pairs][columns][2]; columns is a multiple of 32.
inline void multiply(int rows, int columns, const uint16_t* a, ptrdiff_t a_stride, const uint16_t* b,
                     int pairs, float* c, ptrdiff_t c_stride, const float* scale) {
  int at = 0;
  for (; columns - at >= 64; at += 64)
    multiply_rows<4>(rows, a, a_stride, b + 2 * at, 2 * columns, pairs, c + at, c_stride, scale);
  if (at < columns)
    multiply_rows<2>(rows, a, a_stride, b + 2 * at, 2 * columns, pairs, c + at, c_stride, scale);
}

// 16 rows of 16 words become 16 columns.
inline void transpose(Bits r[16]) {
  Bits t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Lane l of r[4 g + j] now holds column 4 l + j of rows 4 g .. 4 g + 3.
  for (int j = 0; j < 4; ++j) {
    const Bits a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88),
               b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const Bits c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd),
               d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// [keys][dim] to [dim / 2][kKeyBlock][2]; keys past the end are zero.
inline void pack_keys(const uint16_t* k, ptrdiff_t stride, int keys, int dim, uint16_t* out) {
  for (int key = 0; key < kKeyBlock; key += 16)
    for (int d = 0; d < dim; d += 32) {
      Bits rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = key + i < keys ? load_bits(k + (key + i) * stride + d) : _mm512_setzero_si512();
      transpose(rows);
      for (int i = 0; i < 16; ++i)
        _mm512_storeu_si512(out + ptrdiff_t(d / 2 + i) * 2 * kKeyBlock + 2 * key, rows[i]);
    }
}

// [keys][dim] to [kKeyBlock / 2][dim][2]; keys past the end are zero.
inline void pack_values(const uint16_t* v, ptrdiff_t stride, int keys, int dim, uint16_t* out) {
  const auto widened = [&](int key, int d) {
    if (key >= keys) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v + key * stride + d)));
  };
  for (int key = 0; key < kKeyBlock; key += 2)
    for (int d = 0; d < dim; d += 16)
      _mm512_storeu_si512(out + ptrdiff_t(key) * dim + 2 * d,
                          _mm512_or_si512(widened(key, d), _mm512_slli_epi32(widened(key + 1, d), 16)));
}

// Keys [key, key + keys) of a head.
inline void pack(const Attention& a, int batch, int kv_head, int key, int keys, void* packed_k,
                 void* packed_v) {
  const auto* k = static_cast<const uint16_t*>(a.k) + offset(a.k_stride, batch, kv_head, key);
  const auto* v = static_cast<const uint16_t*>(a.v) + offset(a.v_stride, batch, kv_head, key);
  pack_keys(k, a.k_stride[2], keys, a.head_dim, static_cast<uint16_t*>(packed_k));
  pack_values(v, a.v_stride[2], keys, a.head_dim, static_cast<uint16_t*>(packed_v));
}

// 2^x for x <= 0; below -127, and for -inf, nothing that a bf16 can hold beside a 1. NaN stays NaN: of a NaN
// and a number the maximum is its second operand.
inline Zmm exp2_of(Zmm x) {
  x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);
  const Zmm whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Zmm f = _mm512_sub_ps(x, whole);
  Zmm y = _mm512_set1_ps(1.3333558e-3f);  // Taylor's ln(2)^n / n!: 2e-6 off at most on [-0.5, 0.5]
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// Columns of `count` that start at `at`, of 16.
inline __mmask16 first(int count, int at) {
  return count - at >= 16 ? 0xffff : count <= at ? 0 : __mmask16((1u << (count - at)) - 1);
}

// One row of scores, in base 2, for 16 keys from `at` on; hidden keys become -inf.
inline Zmm masked(Zmm scores, const Attention& a, const char* mask_row, int at, int visible) {
  const __mmask16 inside = first(visible, at);
  __mmask16 seen = inside;
  if (a.mask_kind == ND_MASK_BOOL) {
    const __m128i bytes = _mm_maskz_loadu_epi8(inside, mask_row + at);
    seen &= _mm_test_epi8_mask(bytes, bytes);
  } else if (a.mask_kind == ND_MASK_BF16) {
    const __m256i half = _mm256_maskz_loadu_epi16(inside, mask_row + 2 * at);
    const Zmm added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    scores = _mm512_fmadd_ps(added, _mm512_set1_ps(kLog2E), scores);
  } else if (a.mask_kind == ND_MASK_F32) {
    const Zmm added = _mm512_maskz_loadu_ps(inside, mask_row + 4 * at);
    scores = _mm512_fmadd_ps(added, _mm512_set1_ps(kLog2E), scores);
  }
  return _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), scores);
}

// Whether a block of a bool mask hides every key of it from every query of it.
inline bool hides_all(const char* mask, ptrdiff_t row_stride, int rows, int keys) {
  for (int i = 0; i < rows; ++i)
    for (int at = 0; at < keys; at += 64) {
      const __mmask64 inside = keys - at >= 64 ? ~0ull : (1ull << (keys - at)) - 1;
      const Bits bytes = _mm512_maskz_loadu_epi8(inside, mask + i * row_stride + at);
      if (_mm512_test_epi8_mask(bytes, bytes)) return false;
    }
  return true;
}

// What a block of queries keeps while it walks over the keys.
struct QueryBlock {
  alignas(64) float scores[kQueryBlock][kKeyBlock];
  alignas(64) uint16_t weights[kQueryBlock][kKeyBlock];
  alignas(64) float out[kQueryBlock][kMaxHeadDim];
  alignas(64) float highest[kQueryBlock], sum[kQueryBlock];          // over the blocks before
  alignas(64) float now_highest[kQueryBlock], now_sum[kQueryBlock];  // with and of this block
  alignas(64) float rescale[kQueryBlock];                            // of what the blocks before gave
};

// Scores of one row to weights relative to its maximum so far. visible: keys it may see.
inline void softmax_row(QueryBlock& b, int row, const Attention& a, const char* mask_row, int visible) {
  const Zmm scale = _mm512_set1_ps(a.scale * kLog2E);
  Zmm s[kKeyBlock / 16], top = _mm512_set1_ps(-INFINITY);
  const bool all_seen = a.mask_kind == ND_MASK_NONE && visible >= kKeyBlock;
  for (int j = 0; j < kKeyBlock / 16; ++j) {
    s[j] = _mm512_mul_ps(_mm512_load_ps(b.scores[row] + 16 * j), scale);
    if (!all_seen) s[j] = masked(s[j], a, mask_row, 16 * j, visible);
    top = _mm512_max_ps(top, s[j]);
  }
  const float now = std::max(b.highest[row], _mm512_reduce_max_ps(top));
  // A row that has seen no key yet: nothing may be subtracted from its -inf, and its weights come out as nothing.
  const Zmm base = _mm512_set1_ps(now == -INFINITY ? 0.0f : now);
  Zmm sum = _mm512_setzero_ps();
  for (int j = 0; j < kKeyBlock / 16; j += 2) {
    const Zmm low = exp2_of(_mm512_sub_ps(s[j], base)), high = exp2_of(_mm512_sub_ps(s[j + 1], base));
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    _mm512_store_si512(b.weights[row] + 16 * j, (Bits)_mm512_cvtne2ps_pbh(high, low));
  }
  b.now_highest[row] = now;
  b.now_sum[row] = now == -INFINITY ? 0.0f : _mm512_reduce_add_ps(sum);
}

// The running maximum and sum of all rows move on.
inline void advance(QueryBlock& b) {
  for (int i = 0; i < kQueryBlock; i += 16) {
    const Zmm before = _mm512_load_ps(b.highest + i), now = _mm512_load_ps(b.now_highest + i);
    const __mmask16 had_seen = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
    const Zmm rescale = _mm512_maskz_mov_ps(had_seen, exp2_of(_mm512_sub_ps(before, now)));
    _mm512_store_ps(b.rescale + i, rescale);
    _mm512_store_ps(b.sum + i,
                    _mm512_fmadd_ps(_mm512_load_ps(b.sum + i), rescale, _mm512_load_ps(b.now_sum + i)));
    _mm512_store_ps(b.highest + i, now);
  }
}

inline void write_rows(const QueryBlock& b, const Attention& a, int rows, uint16_t* out) {
  for (int i = 0; i < rows; ++i) {
    const Zmm factor = _mm512_set1_ps(b.sum[i] == 0 ? 0.0f : 1 / b.sum[i]);
    for (int d = 0; d < a.head_dim; d += 16) {
      const Zmm y = _mm512_mul_ps(_mm512_load_ps(b.out[i] + d), factor);
      _mm256_storeu_si256((__m256i*)(out + i * a.out_stride[2] + d), (__m256i)_mm512_cvtneps_pbh(y));
    }
  }
}

// Queries [begin, begin + rows) of one head; k and v packed.
inline void attend(const Attention& a, int batch, int head, int begin, int rows, const void* packed_k,
                   const void* packed_v) {
  static thread_local QueryBlock b;
  const auto* k = static_cast<const uint16_t*>(packed_k);
  const auto* v = static_cast<const uint16_t*>(packed_v);
  const auto* q = static_cast<const uint16_t*>(a.q) + offset(a.q_stride, batch, head, begin);
  for (int i = 0; i < kQueryBlock; ++i) {  // rows past the last are carried along, and never written
    b.highest[i] = b.now_highest[i] = -INFINITY;
    b.sum[i] = b.now_sum[i] = 0;
    memset(b.out[i], 0, sizeof(float) * a.head_dim);
  }
  const int end = a.causal ? std::min(a.keys, begin + rows) : a.keys;
  for (int key = 0; key < end; key += kKeyBlock) {
    const int keys = std::min(kKeyBlock, a.keys - key);
    if (a.mask_kind == ND_MASK_BOOL &&
        hides_all(mask_at(a, batch, head, begin, key), a.mask_stride[2], rows, keys))
      continue;
    multiply(rows, kKeyBlock, q, a.q_stride[2], k + ptrdiff_t(key) * a.head_dim, a.head_dim / 2, b.scores[0],
             kKeyBlock, nullptr);
    for (int i = 0; i < rows; ++i) {
      const int visible = a.causal ? std::min(keys, begin + i + 1 - key) : keys;
      softmax_row(b, i, a, mask_at(a, batch, head, begin + i, key), visible);
    }
    advance(b);
    multiply(rows, a.head_dim, b.weights[0], kKeyBlock, v + ptrdiff_t(key) * a.head_dim, kKeyBlock / 2,
             b.out[0], kMaxHeadDim, b.rescale);
  }
  write_rows(b, a, rows, static_cast<uint16_t*>(a.out) + offset(a.out_stride, batch, head, begin));
}
