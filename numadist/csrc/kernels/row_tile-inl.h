// A few rows of bf16 times panels of columns, by AVX-512 BF16, for weights of any kind that become pairs
// of bf16. Included inside a target of isa.h and the namespace of one kind of weights. Weights has
//   static constexpr size_t kVectors;                                vectors of 16 columns, at most 4
//   void load(size_t k, __m512bh b[kVectors]) const;                 inputs 2 k and 2 k + 1 of all columns
//   __m512 scaled(__m512 sums, size_t column, __mmask16 mask) const; 16 finished sums, without the bias

constexpr size_t kAhead = 2048;  // bytes prefetched ahead: the next panel follows this one in memory

// One panel's part of a call.
struct Panel {
  const uint16_t* x;     // [rows][k]
  const uint16_t* bias;  // of the panel's columns, or nullptr
  uint16_t* y;           // the panel's columns; rows are n apart
  size_t rows, k, n;
  size_t columns;  // at most the panel's
};

// Of a call on bf16 rows, from column `first` on.
template <class Call>
inline Panel panel_of(const Call& call, size_t first, size_t width) {
  return {call.x, call.bias == nullptr ? nullptr : call.bias + first, call.y + first, call.rows, call.k,
          call.n, call.n - first < width ? call.n - first : width};
}

inline __mmask16 first_columns(size_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1);
}

template <size_t R, class Weights>
inline void multiply_rows(const Panel& p, const Weights& weights, size_t first_row) {
  constexpr size_t kVectors = Weights::kVectors;
  const uint16_t* x = p.x + first_row * p.k;
  __m512 sums[R][kVectors];
#pragma GCC unroll 12
  for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) sums[m][v] = _mm512_setzero_ps();
  for (size_t k = 0; k < p.k / 2; ++k) {
    __m512bh b[kVectors];
    weights.load(k, b);
#pragma GCC unroll 12
    for (size_t m = 0; m < R; ++m) {
      int pair;
      memcpy(&pair, x + m * p.k + 2 * k, 4);
      const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (size_t v = 0; v < kVectors; ++v) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], a, b[v]);
    }
  }
#pragma GCC unroll 4
  for (size_t v = 0; v < kVectors; ++v) {
    if (16 * v >= p.columns) return;
    const __mmask16 mask = first_columns(p.columns - 16 * v);
    __m512 bias = _mm512_setzero_ps();
    if (p.bias != nullptr)
      bias = _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.bias + 16 * v)), 16));
#pragma GCC unroll 12
    for (size_t m = 0; m < R; ++m) {
      const __m512 y = _mm512_add_ps(weights.scaled(sums[m][v], 16 * v, mask), bias);
      _mm256_mask_storeu_epi16(p.y + (first_row + m) * p.n + 16 * v, mask,
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(y)));
    }
  }
}

// The last rows, R at most.
template <size_t R, class Weights>
inline void multiply_rest(const Panel& p, const Weights& weights, size_t first_row) {
  if (p.rows - first_row == R) return multiply_rows<R>(p, weights, first_row);
  if constexpr (R > 1) multiply_rest<R - 1>(p, weights, first_row);
}

// Tile rows at a time: the panel comes from memory for the first ones, from the cache for the others.
template <size_t Tile, class Weights>
inline void multiply_panel(const Panel& p, const Weights& weights) {
  size_t row = 0;
  for (; row + Tile <= p.rows; row += Tile) multiply_rows<Tile>(p, weights, row);
  if (row < p.rows) multiply_rest<Tile - 1>(p, weights, row);
}
