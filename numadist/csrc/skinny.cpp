// Linear layers for few rows: the choice of ISA, and the shares of the threads.
#include <errno.h>
#include <string.h>

#include "bf16.h"
#include "team.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nd {
namespace {

constexpr size_t kPanel = ND_SKINNY_PANEL;

struct SkinnyCall {
  const uint16_t* x;     // [rows][k]
  const uint32_t* blob;  // pairs of bf16: [ceil(n / kPanel)][k / 2][kPanel]
  const uint16_t* bias;  // [n] or nullptr
  uint16_t* y;           // [rows][n]
  size_t rows, n, k;
};

namespace portable {
#include "skinny.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "skinny.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#include "skinny.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own intrinsics (GCC bug 105593)
namespace avx512_bf16 {
#include "skinny_bf16.h"
}  // namespace avx512_bf16
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

using PanelKernel = void (*)(const SkinnyCall&, size_t panel);

// Names as nd_isa_name has them.
PanelKernel find_kernel(const char* isa) {
#if defined(__x86_64__)
  if (strcmp(isa, "avx512_bf16") == 0) return avx512_bf16::panel_rows;
  if (strcmp(isa, "avx512") == 0) return avx512::panel_rows;
  if (strcmp(isa, "avx2") == 0) return avx2::panel_rows;
#endif
  return portable::panel_rows;
}

}  // namespace
}  // namespace nd

int nd_skinny_linear(int isa, const void* x, const void* blob, const void* bias, void* y, size_t rows,
                     size_t n, size_t k) {
  const char* name = nd_isa_name(isa);
  if (name == nullptr || rows > ND_SKINNY_ROWS || k % 2 != 0) return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  const nd::SkinnyCall call = {static_cast<const uint16_t*>(x),
                               static_cast<const uint32_t*>(blob),
                               static_cast<const uint16_t*>(bias),
                               static_cast<uint16_t*>(y),
                               rows,
                               n,
                               k};
  const nd::PanelKernel kernel = nd::find_kernel(name);
  nd::for_neighbours((n + nd::kPanel - 1) / nd::kPanel, [&](size_t panel) { kernel(call, panel); });
  return 0;
}
