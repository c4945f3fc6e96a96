// The instruction sets that kernels are compiled for: the one list of them, how code is compiled for one, and which one
// this process uses.
#ifndef ND_ISA_H
#define ND_ISA_H

namespace nd {

// Those of this architecture. Each includes those before it.
#if defined(__x86_64__)
enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmxBf16 };
constexpr int kNumIsas = 6;
#elif defined(__aarch64__)
enum class Isa { kPortable, kNeonDotprod };
constexpr int kNumIsas = 2;
#else
enum class Isa { kPortable };
constexpr int kNumIsas = 1;
#endif

// The best that this CPU runs and nd_limit_isa allows.
Isa best_isa();
inline bool runs(Isa isa) { return isa <= best_isa(); }

// The i-th of those that run, best first. False: there are not so many.
bool isa_at(int i, Isa* out);

// A kernel for each instruction set of this architecture, in their order.
template <class Kernel>
class ByIsa {
 public:
  template <class... Each>
  constexpr explicit ByIsa(const Each&... each) : kernels_{each...} {
    static_assert(sizeof...(each) == kNumIsas, "a kernel for each instruction set");
  }
  constexpr const Kernel& operator[](Isa isa) const { return kernels_[static_cast<int>(isa)]; }

 private:
  Kernel kernels_[kNumIsas];
};

}  // namespace nd

// Code between ND_TARGET_..._BEGIN and ND_TARGET_END is compiled for an instruction set. It stands in a namespace of its
// own, and includes no header of others: an inline function of one would be compiled for the set too, and the linker
// could choose that copy for the whole program.
#if defined(__aarch64__)
#define ND_TARGET_NEON_DOTPROD_BEGIN \
  _Pragma("GCC push_options") _Pragma("GCC target(\"arch=armv8.2-a+dotprod\")")
#define ND_TARGET_NEON_DOTPROD_END _Pragma("GCC pop_options")
#endif
#if defined(__x86_64__)
#define ND_PRAGMA(text) _Pragma(#text)
#define ND_TARGET_BEGIN(features) \
  ND_PRAGMA(GCC push_options)     \
  ND_PRAGMA(GCC target(features)) \
  ND_PRAGMA(GCC diagnostic push)
#define ND_TARGET_END           \
  ND_PRAGMA(GCC diagnostic pop) \
  ND_PRAGMA(GCC pop_options)
// GCC 12 warns of its own intrinsics of AVX512-BF16 (GCC bug 105593).
#define ND_TARGET_BF16_BEGIN(features)                \
  ND_TARGET_BEGIN(features)                           \
  ND_PRAGMA(GCC diagnostic ignored "-Wuninitialized") \
  ND_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized")

#define ND_AVX2 "avx2,fma,f16c"
#define ND_AVX512 ND_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl"
#define ND_AVX512_VNNI ND_AVX512 ",avx512vnni"
#define ND_AVX512_BF16 ND_AVX512_VNNI ",avx512bf16"
// AMX has no macro: its instructions are written in assembler, and what is around them is compiled for AVX-512.
#define ND_TARGET_AVX2_BEGIN ND_TARGET_BEGIN(ND_AVX2)
#define ND_TARGET_AVX512_BEGIN ND_TARGET_BEGIN(ND_AVX512)
#define ND_TARGET_AVX512_VNNI_BEGIN ND_TARGET_BEGIN(ND_AVX512_VNNI)
#define ND_TARGET_AVX512_BF16_BEGIN ND_TARGET_BF16_BEGIN(ND_AVX512_BF16)
#define ND_TARGET_AVX512_BF16_VBMI_BEGIN ND_TARGET_BF16_BEGIN(ND_AVX512_BF16 ",avx512vbmi")
#endif

#endif
