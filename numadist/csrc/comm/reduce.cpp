// The same kernels compiled for each ISA, and the choice among them.
#include "comm/reduce.h"

#include <errno.h>
#include <string.h>

#include <type_traits>

#include "bf16.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nd {

namespace portable {
#include "comm/reduce-inl.h"
}  // namespace portable

#if defined(__x86_64__)
#define ND_ISA_F16C
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "comm/reduce-inl.h"
}  // namespace avx2
#pragma GCC pop_options

// Wider vectors gain nothing on integers, whose reductions wait for memory: AVX-512 takes the AVX2 ones,
// which halves the time to compile this file.
#define ND_ISA_FLOATS_ONLY
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#include "comm/reduce-inl.h"
inline Kernel find_kernel(int dtype, int op) {
  const Kernel kernel = find_float_kernel(dtype, op);
  return kernel != nullptr ? kernel : avx2::find_kernel(dtype, op);
}
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own intrinsics (GCC bug 105593)
namespace avx512_bf16 {
#include "comm/sum_bf16-inl.h"
inline Kernel find_kernel(int dtype, int op) {
  return dtype == ND_BF16 && op == ND_SUM ? sum_bf16 : avx512::find_kernel(dtype, op);
}
}  // namespace avx512_bf16
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

namespace {

struct Isa {
  const char* name;
  Kernel (*find)(int dtype, int op);
  FusedKernel (*find_fused)(int dtype);
  bool runs;
};

#if defined(__x86_64__)
// The tiles are 8 KiB more to save for every thread: Linux gives them to processes that ask.
bool may_use_tiles() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // CPUID 7, EDX
  constexpr long kArchReqXcompPerm = 0x1023,
                 kXfeatureXtiledata = 18;  // asm/prctl.h has them since Linux 5.16
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxBf16) && (edx & kAmxTile) &&
         syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}
#endif

const Isa* all_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  // Initialised once, so tiles are asked for once. For reductions AMX has nothing.
  static const Isa isas[] = {
      {"amx_bf16", avx512_bf16::find_kernel, avx512::find_fused_kernel, has_bf16 && may_use_tiles()},
      {"avx512_bf16", avx512_bf16::find_kernel, avx512::find_fused_kernel, has_bf16},
      {"avx512", avx512::find_kernel, avx512::find_fused_kernel, has_avx512},
      {"avx2", avx2::find_kernel, avx2::find_fused_kernel, has_avx2},
      {"portable", portable::find_kernel, portable::find_fused_kernel, true},
      {nullptr, nullptr, nullptr, true},
  };
#else
  static const Isa isas[] = {{"portable", portable::find_kernel, portable::find_fused_kernel, true},
                             {nullptr, nullptr, nullptr, true}};
#endif
  return isas;
}

// The i-th variant this CPU runs; the end mark past the last.
const Isa& isa_at(int i) {
  const Isa* isa = all_isas();
  for (;; ++isa) {
    if (!isa->runs) continue;
    if (isa->name == nullptr || i-- == 0) return *isa;
  }
}

}  // namespace

Kernel best_kernel(int dtype, int op) { return isa_at(0).find(dtype, op); }

FusedKernel best_fused_kernel(int dtype) { return isa_at(0).find_fused(dtype); }

bool runs_isa(const char* name) {
  for (const Isa* isa = all_isas(); isa->name != nullptr; ++isa)
    if (strcmp(isa->name, name) == 0) return isa->runs;
  return false;
}

// The list has every variant before those it includes.
bool isa_includes(const char* isa, const char* part) {
  const Isa* i = all_isas();
  while (i->name != nullptr && strcmp(i->name, isa) != 0) ++i;
  for (; i->name != nullptr; ++i)
    if (strcmp(i->name, part) == 0) return true;
  return false;
}

size_t element_bytes(int dtype) {
  static const uint8_t bytes[ND_NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1};
  return dtype >= 0 && dtype < ND_NUM_DTYPES ? bytes[dtype] : 0;
}

}  // namespace nd

const char* nd_isa_name(int i) { return i < 0 ? nullptr : nd::isa_at(i).name; }

int nd_reduce_local(int isa, void* dst, const void* const* srcs, int num_srcs, size_t count, int dtype,
                    int op) {
  if (nd_isa_name(isa) == nullptr || num_srcs < 1) return -EINVAL;
  const nd::Kernel kernel = nd::isa_at(isa).find(dtype, op);
  if (kernel == nullptr) return -EOPNOTSUPP;
  kernel(dst, srcs, num_srcs, count);
  return 0;
}
