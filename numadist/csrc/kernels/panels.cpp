// Linear layers on weights in panels: few rows in f32, any number of rows on weights of 16 bits. The choice of ISA,
// and the shares of the threads.
#include <errno.h>
#include <string.h>

#include <utility>

#include "bf16.h"
#include "isa.h"
#include "kernels/team.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nd {
namespace {

constexpr size_t kMaxPanel = 64;
constexpr size_t kBlockInputs = 64;
constexpr size_t kLineBytes = 64;
// Of many rows: widened weights of kPieceInputs inputs are 32 KiB.
constexpr size_t kPieceInputs = 128, kPieceRows = 192;

struct PanelCall {
  const void* x;     // [rows][k]
  const void* blob;  // [ceil(n / width)][k][width]
  const void* bias;  // [n] or nullptr
  void* y;           // [rows][n]
  size_t rows, n, k, width;
};

#define ND_SOURCE "kernels/panels-inl.h"
#include "kernels/each_isa-inl.h"

using PanelKernel = void (*)(const PanelCall&, size_t panel);

// Of one kind of weights.
struct Kernels {
  PanelKernel panel_rows;
  void (*widen_row)(const PanelCall&, float* wide, size_t row);
  void (*multiply_piece)(const PanelCall&, const float* x, size_t first, size_t begin, size_t rows);
};

#define ND_KERNELS(isa, W) \
  Kernels { isa::panel_rows<isa::W>, isa::widen_row<isa::W>, isa::multiply_piece<isa::W> }

constexpr ByIsa<Kernels> kF32 = ND_BY_ISA(Kernels, F32), kBf16 = ND_BY_ISA(Kernels, Bf16),
                         kF16 = ND_BY_ISA(Kernels, F16);

bool is_valid(const PanelCall& call) {
  return call.width > 0 && call.width <= kMaxPanel && call.width % 16 == 0;
}

void multiply_few(const PanelCall& call, PanelKernel kernel) {
  for_neighbours((call.n + call.width - 1) / call.width, [&](size_t panel) { kernel(call, panel); });
}

void multiply_many(const PanelCall& call, const Kernels& kernels, float* wide) {
  for_neighbours(call.rows, [&](size_t row) { kernels.widen_row(call, wide, row); });
  const size_t groups = (call.n + kMaxPanel - 1) / kMaxPanel;
  // Pieces of one size, for threads to end together.
  const size_t pieces = (call.rows + kPieceRows - 1) / kPieceRows;
  for_each_item(static_cast<int>(groups * pieces), [&](int item) {
    const size_t group = size_t(item) / pieces, piece = size_t(item) % pieces;
    const size_t begin = call.rows * piece / pieces, end = call.rows * (piece + 1) / pieces;
    kernels.multiply_piece(call, wide, group * kMaxPanel, begin, end - begin);
  });
}

}  // namespace
}  // namespace nd

int nd_skinny_linear_f32(int isa, const float* x, const float* blob, const float* bias, float* y, size_t rows,
                         size_t n, size_t k, size_t width) {
  using namespace nd;
  const PanelCall call = {x, blob, bias, y, rows, n, k, width};
  Isa chosen;
  if (!isa_at(isa, &chosen) || rows > ND_SKINNY_ROWS || !is_valid(call)) return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  multiply_few(call, kF32[chosen].panel_rows);
  return 0;
}

size_t nd_half_linear_scratch(size_t rows, size_t k) {
  if (rows <= ND_SKINNY_ROWS) return 0;
  return sizeof(float) * rows * ((k + nd::kPieceInputs - 1) / nd::kPieceInputs * nd::kPieceInputs);
}

int nd_half_linear(int isa, int dtype, const void* x, const void* blob, const void* bias, void* y,
                   void* scratch, size_t rows, size_t n, size_t k, size_t width) {
  using namespace nd;
  const PanelCall call = {x, blob, bias, y, rows, n, k, width};
  Isa chosen;
  if (!isa_at(isa, &chosen) || (dtype != ND_BF16 && dtype != ND_F16) || !is_valid(call)) return -EINVAL;
  if (rows == 0 || n == 0) return 0;
  const Kernels& kernels = (dtype == ND_BF16 ? kBf16 : kF16)[chosen];
  if (rows <= ND_SKINNY_ROWS)
    multiply_few(call, kernels.panel_rows);
  else
    multiply_many(call, kernels, static_cast<float*>(scratch));
  return 0;
}
