// What a linear layer on quantized weights is called with; nd_core.h tells the layout.
#ifndef ND_QUANTIZED_CALL_H
#define ND_QUANTIZED_CALL_H

#include <stddef.h>
#include <stdint.h>

#include "nd_core.h"

namespace nd {

constexpr size_t kGroup = 32;    // inputs that share a scale, of weights and of x
constexpr size_t kOutputs = 16;  // of a panel
constexpr size_t kSteps = 8;     // of kStepInputs inputs, of a group
constexpr size_t kStepInputs = 4;
constexpr size_t kStepBytes = kOutputs * kStepInputs;

// Of a kind of scales.
constexpr bool has_minimum(int kind) { return kind == ND_SCALES_F16_MIN || kind == ND_SCALES_U8_MIN; }
constexpr bool has_factors(int kind) { return kind == ND_SCALES_I8_HALF || kind == ND_SCALES_U8_MIN; }

struct QuantizedWeights {
  const uint8_t* codes;
  const uint8_t* scales;
  size_t n, groups;
  size_t panel_scale_bytes;
  int shared;  // log2 of the groups that share a scale in f16

  size_t num_panels() const { return (n + kOutputs - 1) / kOutputs; }
  size_t num_shares() const { return (groups + (size_t(1) << shared) - 1) >> shared; }
};

// What products need of a group of a row of x beside its whole numbers.
// start: what products of each half add up from, or of the whole in [0], as codes have another number for zero.
struct RoundedGroup {
  float scale;
  float sum;  // of the numbers, as they are with the scale
  int32_t start[2];
};

// Rows of x as whole numbers of 8 bits; where a kernel wants them wide of 16, and of each step the even ones first.
struct QuantizedRows {
  uint32_t* values;      // [rows][groups][kGroup numbers]
  RoundedGroup* groups;  // [rows][groups]
};

using MultiplyRows = void (*)(const QuantizedWeights&, const QuantizedRows&, size_t panel, size_t row,
                              size_t rows, float* sums);

struct Multiply {
  MultiplyRows run;
  int zero;      // the code that stands for it
  bool is_wide;  // how rows are wanted
};

struct QuantizedCall {
  QuantizedWeights w;
  const void* x;         // [rows][k]
  const int32_t* order;  // [groups * kGroup] or nullptr
  const void* bias;      // [n] or nullptr
  void* y;               // [rows][n]
  size_t rows, k;
  Multiply multiply;
  bool by_halves;  // scales of weights
};

// Those that formats have: bits of a code, kind of scales.
#define ND_QUANTIZED_LAYOUTS(X) \
  X(4, ND_SCALES_F16)           \
  X(4, ND_SCALES_F16_MIN)       \
  X(4, ND_SCALES_U8_MIN)        \
  X(5, ND_SCALES_F16)           \
  X(5, ND_SCALES_F16_MIN)       \
  X(5, ND_SCALES_U8_MIN)        \
  X(8, ND_SCALES_F16)           \
  X(8, ND_SCALES_I8_HALF)

}  // namespace nd

#endif
