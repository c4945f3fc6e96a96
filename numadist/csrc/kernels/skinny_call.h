// What the kernels of skinny.cpp are given, whatever their ISA.
#ifndef ND_SKINNY_CALL_H
#define ND_SKINNY_CALL_H

#include <stddef.h>
#include <stdint.h>

namespace nd {

// Weights lie in panels of `width` columns, 32 or 64; kernels have the width as a template parameter.
struct SkinnyCall {
  const uint16_t* x;     // [rows][k]
  const uint32_t* blob;  // pairs of bf16: [ceil(n / width)][k / 2][width]
  const uint16_t* bias;  // [n] or nullptr
  uint16_t* y;           // [rows][n]
  size_t rows, n, k;
};

}  // namespace nd

#endif
