// Conversions between f32 and bf16. Always inlined, so that loops compiled for an ISA stay loops of that ISA.
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

}  // namespace nd

#endif
