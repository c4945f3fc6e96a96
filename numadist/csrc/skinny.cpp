// Linear layers for few rows: the choice of ISA, and the shares of the threads.
#include <errno.h>
#include <string.h>

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

inline float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t bf16_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

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

struct Panels {
  SkinnyCall call;
  PanelKernel kernel;
  size_t count;
};

// Every thread takes neighbouring panels: contiguous pages.
void my_panels(void* data) {
  const auto* work = static_cast<const Panels*>(data);
  const size_t parts = static_cast<size_t>(num_threads()), part = static_cast<size_t>(thread_index());
  const size_t end = work->count * (part + 1) / parts;
  for (size_t panel = work->count * part / parts; panel < end; ++panel) work->kernel(work->call, panel);
}

}  // namespace
}  // namespace nd

int nd_skinny_linear(int isa, const void* x, const void* blob, const void* bias, void* y, size_t rows,
                     size_t n, size_t k) {
  const char* name = nd_isa_name(isa);
  if (name == nullptr || rows > ND_SKINNY_ROWS || k % 2 != 0) return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  nd::Panels work = {{static_cast<const uint16_t*>(x), static_cast<const uint32_t*>(blob),
                      static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(y), rows, n, k},
                     nd::find_kernel(name),
                     (n + nd::kPanel - 1) / nd::kPanel};
  nd::run_on_team(nd::my_panels, &work);
  return 0;
}
