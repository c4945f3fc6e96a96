// The same kernels compiled for each ISA, and the choice among them.
#include "comm/reduce.h"

#include <errno.h>
#include <string.h>

#include <type_traits>

#include "bf16.h"
#include "isa.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nd {

constexpr bool is_float(int dtype) { return dtype <= ND_BF16; }

namespace portable {
#include "comm/reduce-inl.h"
}  // namespace portable

#if defined(__x86_64__)
#define ND_ISA_F16C
ND_TARGET_AVX2_BEGIN
namespace avx2 {
#include "comm/reduce-inl.h"
}  // namespace avx2
ND_TARGET_END

// Wider vectors gain nothing on integers, whose reductions wait for memory: AVX-512 takes the AVX2 ones,
// which halves the time to compile this file.
#define ND_ISA_FLOATS_ONLY
ND_TARGET_AVX512_BEGIN
namespace avx512 {
#include "comm/reduce-inl.h"
constexpr Kernel find_kernel(int dtype, int op) {
  return is_float(dtype) ? find_float_kernel(dtype, op) : avx2::find_kernel(dtype, op);
}
}  // namespace avx512
ND_TARGET_END

ND_TARGET_AVX512_BF16_BEGIN
namespace avx512_bf16 {
#include "comm/sum_bf16-inl.h"
constexpr Kernel find_kernel(int dtype, int op) {
  return dtype == ND_BF16 && op == ND_SUM ? sum_bf16 : avx512::find_kernel(dtype, op);
}
}  // namespace avx512_bf16
ND_TARGET_END
#endif

namespace {

// All kernels of an ISA, nullptr where there is none.
struct Table {
  Kernel reduce[ND_NUM_DTYPES][ND_NUM_OPS];
  FusedKernel fused[ND_NUM_DTYPES];
};

constexpr Table table_of(Kernel (*find)(int dtype, int op), FusedKernel (*find_fused)(int dtype)) {
  Table table = {};
  for (int dtype = 0; dtype < ND_NUM_DTYPES; ++dtype) {
    for (int op = 0; op < ND_NUM_OPS; ++op) table.reduce[dtype][op] = find(dtype, op);
    table.fused[dtype] = find_fused(dtype);
  }
  return table;
}

constexpr ByIsa<Table> kTables{
    table_of(portable::find_kernel, portable::find_fused_kernel),
#if defined(__x86_64__)
    table_of(avx2::find_kernel, avx2::find_fused_kernel),
    table_of(avx512::find_kernel, avx512::find_fused_kernel),
    table_of(avx512::find_kernel, avx512::find_fused_kernel),  // dot products of bytes are none
    table_of(avx512_bf16::find_kernel, avx512::find_fused_kernel),
    table_of(avx512_bf16::find_kernel, avx512::find_fused_kernel),  // the tiles have nothing for reductions
#elif defined(__aarch64__)
    table_of(portable::find_kernel, portable::find_fused_kernel),
#endif
};

bool is_dtype(int dtype) { return dtype >= 0 && dtype < ND_NUM_DTYPES; }

Kernel find_kernel(Isa isa, int dtype, int op) {
  return is_dtype(dtype) && op >= 0 && op < ND_NUM_OPS ? kTables[isa].reduce[dtype][op] : nullptr;
}

}  // namespace

Kernel best_kernel(int dtype, int op) { return find_kernel(best_isa(), dtype, op); }

FusedKernel best_fused_kernel(int dtype) {
  return is_dtype(dtype) ? kTables[best_isa()].fused[dtype] : nullptr;
}

size_t element_bytes(int dtype) {
  static const uint8_t bytes[ND_NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1};
  return is_dtype(dtype) ? bytes[dtype] : 0;
}

}  // namespace nd

int nd_reduce_local(int isa, void* dst, const void* const* srcs, int num_srcs, size_t count, int dtype,
                    int op) {
  nd::Isa chosen;
  if (!nd::isa_at(isa, &chosen) || num_srcs < 1) return -EINVAL;
  const nd::Kernel kernel = nd::find_kernel(chosen, dtype, op);
  if (kernel == nullptr) return -EOPNOTSUPP;
  kernel(dst, srcs, num_srcs, count);
  return 0;
}
