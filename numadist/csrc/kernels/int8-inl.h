// A few rows times int8 weights with AVX-512 VBMI and BF16. Included once by int8.cpp.

#include "kernels/row_tile-inl.h"

constexpr size_t kRowTile = 4;  // 4 rows x 4 vectors of sums, 5 of tables and signs, 6 of weights, 1 of x

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

struct SignedBytes {
  static constexpr size_t kVectors = 4;
  const uint8_t* panel;
  const float* scale;  // of the panel's columns

  void load(size_t k, __m512bh b[kVectors]) const {
    const uint8_t* w = panel + k * kGroup;
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * half, _MM_HINT_T0);
      const __m512i q = _mm512_loadu_si512(w + 64 * half);
      // A table look-up takes the low 7 bits of its index, the magnitude; the sign bit is the result's too.
      const __m512i top = _mm512_ternarylogic_epi64(look_up(kTables.high, q), q, sign, 0xf8);  // a | (b & c)
      const __m512i bottom = look_up(kTables.low, q);
      b[2 * half] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(bottom, top));
      b[2 * half + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(bottom, top));
    }
  }

  static __m512i look_up(const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  }

  __m512 scaled(__m512 sums, size_t column, __mmask16 mask) const {
    return _mm512_mul_ps(sums, _mm512_maskz_loadu_ps(mask, scale + column));
  }
};

inline void panel_rows(const Int8Call& call, size_t panel) {
  const size_t first = panel * kPanel;
  multiply_panel<kRowTile>(panel_of(call, first, kPanel),
                           SignedBytes{call.blob + panel * (call.k / 2) * kGroup, call.scale + first});
}
