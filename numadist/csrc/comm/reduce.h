// The reduction kernels by ISA, dtype and reduction.
#ifndef ND_KERNELS_H
#define ND_KERNELS_H

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

// Whether nd_isa_name has the name on this CPU.
bool runs_isa(const char* name);

// Whether a CPU of variant `isa` runs the kernels of `part` too. Names as nd_isa_name has them.
bool isa_includes(const char* isa, const char* part);

// Bytes of one element, 0 for an unknown dtype.
size_t element_bytes(int dtype);

}  // namespace nd

#endif
