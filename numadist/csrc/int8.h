// A few rows times int8 weights with AVX-512 VBMI and BF16. Included once by int8.cpp.

constexpr size_t kRowTile = 4;   // 4 rows x 4 vectors of sums, 4 vectors of tables, 5 of weights, 1 of x
constexpr size_t kAhead = 2048;  // bytes prefetched ahead: the next panel follows this one in memory

// bf16 of 0 ... 127, all of them exact: the high and the low bytes.
struct Tables {
  alignas(64) uint8_t high[128], low[128];
};

constexpr Tables tables_of_magnitudes() {
  Tables t = {};
  for (unsigned m = 1; m < 128; ++m) {
    unsigned exponent = 0;
    while (m >> (exponent + 1) != 0) ++exponent;
    const unsigned bits = (127 + exponent) << 7 | ((m << (7 - exponent)) & 0x7f);
    t.high[m] = static_cast<uint8_t>(bits >> 8);
    t.low[m] = static_cast<uint8_t>(bits);
  }
  return t;
}

constexpr Tables kTables = tables_of_magnitudes();

template <size_t R>
inline void tile(const Int8Call& call, size_t panel, size_t first_row) {
  const size_t pairs = call.k / 2, first = panel * kPanel;
  const uint8_t* w = call.blob + panel * pairs * kGroup;
  const uint16_t* x = call.x + first_row * call.k;
  const __m512i high[2] = {_mm512_load_si512(kTables.high), _mm512_load_si512(kTables.high + 64)};
  const __m512i low[2] = {_mm512_load_si512(kTables.low), _mm512_load_si512(kTables.low + 64)};
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512 acc[R][4];
#pragma GCC unroll 4
  for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 4
    for (size_t v = 0; v < 4; ++v) acc[m][v] = _mm512_setzero_ps();
  for (size_t k = 0; k < pairs; ++k, w += kGroup) {
    __m512bh b[4];
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * half, _MM_HINT_T0);
      const __m512i q = _mm512_loadu_si512(w + 64 * half);
      // A table look-up takes the low 7 bits of its index, the magnitude; the sign bit is the result's too.
      const __m512i magnitude = _mm512_permutex2var_epi8(high[0], q, high[1]);
      const __m512i top = _mm512_ternarylogic_epi64(magnitude, q, sign, 0xf8);  // magnitude | (q & sign)
      const __m512i bottom = _mm512_permutex2var_epi8(low[0], q, low[1]);
      b[2 * half] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(bottom, top));
      b[2 * half + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(bottom, top));
    }
#pragma GCC unroll 4
    for (size_t m = 0; m < R; ++m) {
      int pair;
      memcpy(&pair, x + m * call.k + 2 * k, 4);
      const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (size_t v = 0; v < 4; ++v) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], a, b[v]);
    }
  }
  for (size_t v = 0; v < 4 && first + 16 * v < call.n; ++v) {
    const size_t at = first + 16 * v, left = call.n - at;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
    const __m512 scale = _mm512_maskz_loadu_ps(mask, call.scale + at);
    __m512 bias = _mm512_setzero_ps();
    if (call.bias != nullptr)
      bias = _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, call.bias + at)), 16));
    for (size_t m = 0; m < R; ++m)
      _mm256_mask_storeu_epi16(
          call.y + (first_row + m) * call.n + at, mask,
          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_fmadd_ps(acc[m][v], scale, bias))));
  }
}

// The panel comes from memory for the first tile of rows, from the cache for the others.
inline void panel_rows(const Int8Call& call, size_t panel) {
  size_t row = 0;
  for (; row + kRowTile <= call.rows; row += kRowTile) tile<kRowTile>(call, panel, row);
  switch (call.rows - row) {
    case 3:
      return tile<3>(call, panel, row);
    case 2:
      return tile<2>(call, panel, row);
    case 1:
      return tile<1>(call, panel, row);
  }
}
