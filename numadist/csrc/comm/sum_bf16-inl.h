// The sum of bf16 with AVX-512 BF16 instructions. Included once by reduce.cpp, like reduce-inl.h.

// 32 elements a step, split in even and odd ones: each half becomes f32 by one shift or mask. The conversion
// back rounds to nearest even and flushes denormal results to zero, unlike the portable code.
inline void sum_bf16(void* dst, const void* const* srcs, int num_srcs, size_t count) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  alignas(64) uint16_t order[32];
  for (uint16_t i = 0; i < 16; ++i) order[2 * i] = i, order[2 * i + 1] = static_cast<uint16_t>(16 + i);
  const __m512i interleave = _mm512_load_si512(order);
  for (size_t i = 0; i < count; i += 32) {
    const __mmask32 mask = count - i >= 32 ? ~0u : (1u << (count - i)) - 1;
    __m512i v = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(srcs[0]) + i);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(v, high));
    for (int s = 1; s < num_srcs; ++s) {
      v = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(srcs[s]) + i);
      even = _mm512_add_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)));
      odd = _mm512_add_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(v, high)));
    }
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_mask_storeu_epi16(static_cast<uint16_t*>(dst) + i, mask,
                             _mm512_permutexvar_epi16(interleave, halves));
  }
}
