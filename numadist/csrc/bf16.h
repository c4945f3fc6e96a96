// Conversions between f32 and formats of 16 bits. Always inlined, so that loops compiled for an ISA stay loops of that ISA.
#ifndef ND_BF16_H
#define ND_BF16_H

#include <stdint.h>
#include <string.h>

namespace nd {

#define ND_INLINE inline __attribute__((always_inline))

ND_INLINE float float_of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

ND_INLINE uint32_t bits_of_float(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

ND_INLINE float float_of_bf16(uint16_t b) { return float_of_bits(static_cast<uint32_t>(b) << 16); }

// To nearest, ties to even.
ND_INLINE uint16_t bf16_of_float(float f) {
  const uint32_t u = bits_of_float(f);
  const uint32_t even = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40;  // rounding could carry a NaN over to zero
  return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? nan : even);
}

// To nearest, ties to even.
ND_INLINE uint16_t f16_of_float(float f) {
  const uint32_t sign = (bits_of_float(f) >> 16) & 0x8000, u = bits_of_float(f) & 0x7fffffff;
  const uint32_t below = bits_of_float(float_of_bits(u) + 0.5f) - 0x3f000000;  // the sum is rounded to 2^-24
  const uint32_t normal = (u + 0xfff + ((u >> 13) & 1) - 0x38000000) >> 13;
  const uint32_t magnitude = u > 0x7f800000    ? 0x7e00  // NaN
                             : u >= 0x477ff000 ? 0x7c00  // from 65520 on it rounds to infinity
                             : u < 0x38800000  ? below   // 2^-14, the first normal number
                                               : normal;
  return static_cast<uint16_t>(sign | magnitude);
}

}  // namespace nd

#endif
