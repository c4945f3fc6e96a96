// A few rows times packed bf16 weights with AVX-512 BF16. Included once by skinny.cpp.

constexpr size_t kRowTile = 6;   // 6 rows x 4 vectors of sums, 4 of weights, 1 of x: 29 of 32 registers
constexpr size_t kAhead = 2048;  // bytes prefetched ahead: the next panel follows this one in memory

inline __mmask16 columns(size_t left) {
  return left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

template <size_t R>
inline void tile(const SkinnyCall& call, size_t panel, size_t first_row) {
  const size_t pairs = call.k / 2, first = panel * kPanel;
  const uint32_t* w = call.blob + panel * pairs * kPanel;
  const uint16_t* x = call.x + first_row * call.k;
  __m512 acc[R][4];
#pragma GCC unroll 6
  for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 4
    for (size_t v = 0; v < 4; ++v) acc[m][v] = _mm512_setzero_ps();
  for (size_t k = 0; k < pairs; ++k, w += kPanel) {
    __m512bh b[4];
#pragma GCC unroll 4
    for (size_t v = 0; v < 4; ++v) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * v, _MM_HINT_T0);
      b[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + 16 * v));
    }
#pragma GCC unroll 6
    for (size_t m = 0; m < R; ++m) {
      int pair;
      memcpy(&pair, x + m * call.k + 2 * k, 4);
      const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (size_t v = 0; v < 4; ++v) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], a, b[v]);
    }
  }
  for (size_t v = 0; v < 4 && first + 16 * v < call.n; ++v) {
    const size_t at = first + 16 * v;
    const __mmask16 mask = columns(call.n - at);
    __m512 bias = _mm512_setzero_ps();
    if (call.bias != nullptr)
      bias = _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, call.bias + at)), 16));
    for (size_t m = 0; m < R; ++m)
      _mm256_mask_storeu_epi16(call.y + (first_row + m) * call.n + at, mask,
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(acc[m][v], bias))));
  }
}

// The panel comes from memory for the first tile of rows, from the cache for the others.
inline void panel_rows(const SkinnyCall& call, size_t panel) {
  size_t row = 0;
  for (; row + kRowTile <= call.rows; row += kRowTile) tile<kRowTile>(call, panel, row);
  switch (call.rows - row) {
    case 5:
      return tile<5>(call, panel, row);
    case 4:
      return tile<4>(call, panel, row);
    case 3:
      return tile<3>(call, panel, row);
    case 2:
      return tile<2>(call, panel, row);
    case 1:
      return tile<1>(call, panel, row);
  }
}
