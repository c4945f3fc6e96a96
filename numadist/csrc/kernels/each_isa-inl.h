// Code of the vectors of vec_f32-inl.h, compiled for each instruction set. Included by a .cpp that has named its own in
// ND_SOURCE, which comes into the namespaces portable, avx2 and avx512; kRegisters is how many vectors a core holds.

namespace portable {
#define ND_LANES 4
#if defined(__aarch64__)
constexpr size_t kRegisters = 32;
#else
constexpr size_t kRegisters = 16;
#endif
#include ND_SOURCE
#undef ND_LANES
}  // namespace portable

#if defined(__x86_64__)
ND_TARGET_AVX2_BEGIN
namespace avx2 {
#define ND_LANES 8
constexpr size_t kRegisters = 16;
#include ND_SOURCE
#undef ND_LANES
}  // namespace avx2
ND_TARGET_END

ND_TARGET_AVX512_BEGIN
namespace avx512 {
#define ND_LANES 16
constexpr size_t kRegisters = 32;
#include ND_SOURCE
#undef ND_LANES
}  // namespace avx512
ND_TARGET_END
#endif

// The table of the kernels of one kind, of what the .cpp's ND_KERNELS(isa, kind) makes of a namespace.
#if defined(__x86_64__)
// These have nothing better from AVX-512 on.
#define ND_BY_ISA(Kernels, kind)                                                               \
  ByIsa<Kernels>(ND_KERNELS(portable, kind), ND_KERNELS(avx2, kind), ND_KERNELS(avx512, kind), \
                 ND_KERNELS(avx512, kind), ND_KERNELS(avx512, kind), ND_KERNELS(avx512, kind))
#elif defined(__aarch64__)
#define ND_BY_ISA(Kernels, kind) ByIsa<Kernels>(ND_KERNELS(portable, kind), ND_KERNELS(portable, kind))
#else
#define ND_BY_ISA(Kernels, kind) ByIsa<Kernels>(ND_KERNELS(portable, kind))
#endif
