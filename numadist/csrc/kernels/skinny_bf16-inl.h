// A few rows times packed bf16 weights with AVX-512 BF16. Included once by skinny.cpp.

#include "kernels/row_tile-inl.h"

template <size_t Width>
struct PairsOfBf16 {
  static constexpr size_t kVectors = Width / 16;
  const uint32_t* panel;

  void load(size_t k, __m512bh b[kVectors]) const {
    const uint32_t* w = panel + k * Width;
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64 * v, _MM_HINT_T0);
      b[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + 16 * v));
    }
  }

  __m512 scaled(__m512 sums, size_t, __mmask16) const { return sums; }
};

template <size_t Width>
inline void multiply_panels(const SkinnyCall& call, size_t begin, size_t end) {
  // 6 rows x 4 vectors or 12 x 2 of sums, 4 or 2 of weights, 1 of x: at most 29 of 32 registers.
  constexpr size_t kRowTile = 24 / PairsOfBf16<Width>::kVectors;
  for (size_t panel = begin; panel < end; ++panel) {
    const size_t first = panel * Width;
    multiply_panel<kRowTile>(panel_of(call, first, Width),
                             PairsOfBf16<Width>{call.blob + first * (call.k / 2)});
  }
}
