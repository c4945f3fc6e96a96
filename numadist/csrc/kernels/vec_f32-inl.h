// Vectors of f32 in the compiler's own notation. Included inside a target of isa.h and the namespace of an
// ISA, which says how wide its registers are: kLanes.

using Vec = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using VecInMemory = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecInMemory*>(p) = v; }
