// The reduction kernels by dtype and reduction.
#ifndef ND_REDUCE_H
#define ND_REDUCE_H

#include "nd_core.h"

namespace nd {

// dst[k] = srcs[0][k] op srcs[1][k] op ...
using Kernel = void (*)(void* dst, const void* const* srcs, int num_srcs, size_t count);

// The best kernel of this CPU, or nullptr for a combination that has no meaning (BAND of floats, AVG of integers).
Kernel best_kernel(int dtype, int op);

// Sum, then what NdEpilogue says, of `rows` rows; see nd_core.h.
using FusedKernel = void (*)(void* out, void* residual, const void* const* srcs, int num_srcs, size_t rows,
                             const NdEpilogue& epilogue);

// For f32, f16 and bf16, else nullptr.
FusedKernel best_fused_kernel(int dtype);

// Bytes of one element, 0 for an unknown dtype.
size_t element_bytes(int dtype);

}  // namespace nd

#endif
