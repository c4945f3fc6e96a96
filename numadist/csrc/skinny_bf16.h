// A few rows times packed bf16 weights with AVX-512 BF16. Included once by skinny.cpp.

#include "row_tile.h"

constexpr size_t kRowTile = 6;  // 6 rows x 4 vectors of sums, 4 of weights, 1 of x: 29 of 32 registers

struct PairsOfBf16 {
  const uint32_t* panel;

  void load(size_t k, __m512bh b[4]) const {
    const uint32_t* w = panel + k * kPanel;
#pragma GCC unroll 4
    for (size_t v = 0; v < 4; ++v) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * v, _MM_HINT_T0);
      b[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + 16 * v));
    }
  }

  __m512 scaled(__m512 sums, size_t, __mmask16) const { return sums; }
};

inline void panel_rows(const SkinnyCall& call, size_t panel) {
  const size_t first = panel * kPanel;
  multiply_panel<kRowTile>(panel_of(call, first), PairsOfBf16{call.blob + first * (call.k / 2)});
}
