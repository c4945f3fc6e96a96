// Linear layers and lookups on quantized weights: the choice of instruction set and layout, and the shares of threads.
#include <errno.h>
#include <string.h>

#include <algorithm>
#include <utility>

#include "bf16.h"
#include "isa.h"
#include "kernels/quantized_call.h"
#include "kernels/team.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nd {
namespace {

#define ND_SOURCE "kernels/quantized-inl.h"
#include "kernels/each_isa-inl.h"

#if defined(__x86_64__)
ND_TARGET_AVX512_VNNI_BEGIN
namespace avx512_vnni {
#define ND_LANES 16
#define ND_HAS_VNNI
constexpr size_t kRegisters = 32;
#include ND_SOURCE
#undef ND_HAS_VNNI
#undef ND_LANES
}  // namespace avx512_vnni
ND_TARGET_END
#endif

#if defined(__aarch64__)
ND_TARGET_NEON_DOTPROD_BEGIN
namespace neon_dotprod {
#define ND_LANES 4
#define ND_HAS_DOTPROD
constexpr size_t kRegisters = 32;
#include ND_SOURCE
#undef ND_HAS_DOTPROD
#undef ND_LANES
}  // namespace neon_dotprod
ND_TARGET_NEON_DOTPROD_END
#endif

// Of one dtype of x.
struct Kernels {
  void (*quantize_row)(const QuantizedCall&, const QuantizedRows&, size_t row);
  Multiply (*find_multiply)(int bits, int kind);
  void (*write_panel)(const QuantizedCall&, const float* sums, size_t panel, size_t row, size_t rows);
};

#define ND_OF(isa, kind) \
  Kernels { isa::quantize_row<isa::kind>, isa::find_multiply, isa::write_panel<isa::kind> }
#if defined(__x86_64__)
#define ND_EACH(kind)                                                                                     \
  ByIsa<Kernels>(ND_OF(portable, kind), ND_OF(avx2, kind), ND_OF(avx512, kind), ND_OF(avx512_vnni, kind), \
                 ND_OF(avx512_vnni, kind), ND_OF(avx512_vnni, kind))
#elif defined(__aarch64__)
#define ND_EACH(kind) ByIsa<Kernels>(ND_OF(portable, kind), ND_OF(neon_dotprod, kind))
#else
#define ND_EACH(kind) ByIsa<Kernels>(ND_OF(portable, kind))
#endif

constexpr ByIsa<Kernels> kF32 = ND_EACH(F32), kBf16 = ND_EACH(Bf16), kF16 = ND_EACH(F16);

const Kernels* kernels_of(int isa, int dtype) {
  Isa chosen;
  if (!isa_at(isa, &chosen)) return nullptr;
  if (dtype == ND_F32) return &kF32[chosen];
  if (dtype == ND_BF16) return &kBf16[chosen];
  return dtype == ND_F16 ? &kF16[chosen] : nullptr;
}

// Rows that pass through the cache together: as whole numbers they are smaller than weights of 16 bits were.
constexpr size_t kPieceRows = 64;
// So much of x each thread rounds for itself, which is faster than that all wait for one.
constexpr size_t kOwnGroups = 256;

constexpr size_t kGroupScratch = kGroup * sizeof(int16_t) + sizeof(RoundedGroup);

size_t group_bytes(int bits) { return size_t(bits) * kGroup * kOutputs / 8; }

QuantizedRows rows_in(void* memory, size_t groups) {
  auto* const rounded = static_cast<RoundedGroup*>(memory);
  return {reinterpret_cast<uint32_t*>(rounded + groups), rounded};
}

void multiply_panels(const QuantizedCall& call, const Kernels& kernels, const QuantizedRows& x, size_t begin,
                     size_t end) {
  alignas(64) float sums[kPieceRows * kOutputs];
  const size_t pieces = (call.rows + kPieceRows - 1) / kPieceRows;
  for (size_t piece = 0; piece < pieces; ++piece) {
    const size_t row = call.rows * piece / pieces, rows = call.rows * (piece + 1) / pieces - row;
    for (size_t panel = begin; panel < end; ++panel) {
      call.multiply.run(call.w, x, panel, row, rows, sums);
      kernels.write_panel(call, sums, panel, row, rows);
    }
  }
}

// multiply(x, begin, end) on every thread, for its share of 0 ... count - 1; x: all rows, rounded. scratch: unless they
// are so few that each thread rounds them for itself.
template <class Body>
void round_and_share(const QuantizedCall& call, const Kernels& kernels, void* scratch, size_t count,
                     const Body& multiply) {
  const size_t groups = call.rows * call.w.groups;
  if (groups <= kOwnGroups) {
    for_shares(count, [&](size_t begin, size_t end) {
      if (begin == end) return;
      alignas(64) char own[kOwnGroups * kGroupScratch];
      const QuantizedRows x = rows_in(own, groups);
      for (size_t row = 0; row < call.rows; ++row) kernels.quantize_row(call, x, row);
      multiply(x, begin, end);
    });
    return;
  }
  const QuantizedRows x = rows_in(scratch, groups);
  for_neighbours(call.rows, [&](size_t row) { kernels.quantize_row(call, x, row); });
  for_shares(count, [&](size_t begin, size_t end) { multiply(x, begin, end); });
}

// Some rows alone, times the panels of one expert of those that lie behind each other.
QuantizedCall of_expert(const QuantizedCall& call, int bits, size_t element, size_t expert, size_t row,
                        size_t rows) {
  QuantizedCall part = call;
  const size_t panels = expert * call.w.num_panels();
  part.w.codes += panels * call.w.groups * group_bytes(bits);
  part.w.scales += panels * call.w.panel_scale_bytes;
  part.y = static_cast<char*>(call.y) + row * call.w.n * element;
  part.rows = rows;
  return part;
}

QuantizedRows rows_from(const QuantizedRows& x, const QuantizedCall& call, size_t first) {
  const size_t groups = first * call.w.groups;
  return {x.values + groups * kSteps * (call.multiply.is_wide ? 2 : 1), x.groups + groups};
}

// ---- lookups: an output as numbers, bit for bit as the format says ----

float f16_at(const uint8_t* p, size_t at) {
  uint16_t last[portable::kLanes] = {};  // no number behind is touched
  memcpy(last, p + at * sizeof last[0], sizeof last[0]);
  return portable::F16::load(last)[0];
}

int code_at(const uint8_t* group, int bits, size_t lane, size_t i) {
  const size_t step = i / kStepInputs, byte = lane * kStepInputs + i % kStepInputs;
  if (bits == 8) return group[step * kStepBytes + byte];
  const int four = group[step / 2 * kStepBytes + byte] >> (step % 2 * 4) & 0xf;
  return bits == 4 ? four : four | (group[kSteps / 2 * kStepBytes + byte] >> step & 1) << 4;
}

// Input i of a group of output `lane` of a panel.
float number_at(const QuantizedWeights& w, int bits, int kind, const uint8_t* codes, const uint8_t* scales,
                size_t g, size_t lane, size_t i) {
  const size_t many = has_minimum(kind) ? 2 : 1, share = (g >> w.shared) * many * kOutputs + lane;
  const auto* factors =
      scales + w.num_shares() * many * kOutputs * sizeof(uint16_t) + g * 2 * kOutputs + lane;
  float scale = f16_at(scales, share), minimum = has_minimum(kind) ? f16_at(scales, share + kOutputs) : 0;
  if (kind == ND_SCALES_U8_MIN) {
    scale *= factors[0];
    minimum *= -static_cast<float>(factors[kOutputs]);
  } else if (kind == ND_SCALES_I8_HALF) {
    scale *= static_cast<int8_t>(factors[i / (kGroup / 2) * kOutputs]);
  }
  const int code = code_at(codes + g * group_bytes(bits), bits, lane, i);
  return has_minimum(kind) ? scale * float(code) + minimum : scale * float(code - (1 << (bits - 1)));
}

template <class W>
void widen_output(const QuantizedWeights& w, int bits, int kind, const int32_t* order, size_t k,
                  size_t output, void* out) {
  using Stored = typename W::Stored;
  const size_t panel = output / kOutputs;
  const uint8_t* codes = w.codes + panel * w.groups * group_bytes(bits);
  const uint8_t* scales = w.scales + panel * w.panel_scale_bytes;
  for (size_t g = 0; g < w.groups; ++g)
    for (size_t i = 0; i < kGroup; ++i) {
      const size_t place = g * kGroup + i;
      const int64_t to = order == nullptr ? int64_t(place) : order[place];
      if (to < 0 || size_t(to) >= k) continue;
      Stored last[portable::kLanes];
      W::store(last, portable::Vec{} + number_at(w, bits, kind, codes, scales, g, output % kOutputs, i));
      static_cast<Stored*>(out)[to] = last[0];
    }
}

bool is_valid(const QuantizedWeights& w, int bits, int kind) {
  if (portable::find_multiply(bits, kind).run == nullptr || w.shared < 0 || w.shared > 8) return false;
  if (w.shared > 0 && !has_factors(kind)) return false;
  return w.panel_scale_bytes == kOutputs * (w.num_shares() * (has_minimum(kind) ? 2 : 1) * sizeof(uint16_t) +
                                            w.groups * (has_factors(kind) ? 2 : 0));
}

QuantizedWeights weights_of(const NdQuantized& q) {
  return {q.codes, q.scales, q.n, q.groups, q.panel_scale_bytes, q.shared};
}

// All but what a caller adds: bias and y of its own. False: such a layout or dtype is none.
bool prepare(int isa, int dtype, const void* x, const NdQuantized& q, size_t rows, QuantizedCall* call,
             const Kernels** kernels) {
  const QuantizedWeights w = weights_of(q);
  *kernels = kernels_of(isa, dtype);
  if (*kernels == nullptr || !is_valid(w, q.bits, q.kind)) return false;
  const Multiply multiply = (*kernels)->find_multiply(q.bits, q.kind);
  *call = {w, x, q.order, nullptr, nullptr, rows, q.k, multiply, q.kind == ND_SCALES_I8_HALF};
  return true;
}

}  // namespace
}  // namespace nd

size_t nd_quantized_linear_scratch(size_t rows, size_t groups) {
  return rows * groups <= nd::kOwnGroups ? 0 : rows * groups * nd::kGroupScratch;
}

int nd_quantized_linear(int isa, int dtype, const void* x, const NdQuantized* q, const void* bias, void* y,
                        void* scratch, size_t rows) {
  using namespace nd;
  QuantizedCall call;
  const Kernels* kernels;
  if (!prepare(isa, dtype, x, *q, rows, &call, &kernels)) return -EINVAL;
  if (rows == 0 || q->n == 0) return 0;
  call.bias = bias;
  call.y = y;
  round_and_share(call, *kernels, scratch, call.w.num_panels(),
                  [&](const QuantizedRows& rounded, size_t begin, size_t end) {
                    multiply_panels(call, *kernels, rounded, begin, end);
                  });
  return 0;
}

int nd_quantized_experts(int isa, int dtype, const void* x, const NdQuantized* q, const int32_t* ends,
                         size_t experts, void* y, void* scratch, size_t rows) {
  using namespace nd;
  QuantizedCall call;
  const Kernels* kernels;
  if (!prepare(isa, dtype, x, *q, rows, &call, &kernels)) return -EINVAL;
  int32_t last = 0;
  for (size_t e = 0; e < experts; last = ends[e++])
    if (ends[e] < last || size_t(ends[e]) > rows) return -ERANGE;
  if (size_t(last) != rows) return -ERANGE;
  if (rows == 0 || q->n == 0) return 0;
  call.y = y;
  const size_t element = dtype == ND_F32 ? sizeof(float) : sizeof(uint16_t), panels = call.w.num_panels();
  // A panel of an expert counts as often as it has rows, so that shares take the same time.
  round_and_share(call, *kernels, scratch, rows * panels,
                  [&](const QuantizedRows& rounded, size_t begin, size_t end) {
                    for (size_t e = 0, row = 0; e < experts; row = size_t(ends[e++])) {
                      const size_t many = size_t(ends[e]) - row;
                      const auto panel_at = [&](size_t place) {
                        const size_t first = row * panels;
                        return place <= first ? 0 : std::min(panels, (place - first + many - 1) / many);
                      };
                      if (many == 0 || panel_at(begin) == panel_at(end)) continue;
                      multiply_panels(of_expert(call, q->bits, element, e, row, many), *kernels,
                                      rows_from(rounded, call, row), panel_at(begin), panel_at(end));
                    }
                  });
  return 0;
}

int nd_quantized_lookup(int dtype, const NdQuantized* q, const int64_t* outputs, size_t count, void* out) {
  using namespace nd;
  const QuantizedWeights w = weights_of(*q);
  if (!is_valid(w, q->bits, q->kind)) return -EINVAL;
  if (dtype != ND_F32 && dtype != ND_BF16 && dtype != ND_F16) return -EINVAL;
  for (size_t i = 0; i < count; ++i)
    if (outputs[i] < 0 || size_t(outputs[i]) >= q->n) return -ERANGE;
  const auto widen = dtype == ND_F32    ? widen_output<portable::F32>
                     : dtype == ND_BF16 ? widen_output<portable::Bf16>
                                        : widen_output<portable::F16>;
  const size_t bytes = dtype == ND_F32 ? sizeof(float) : sizeof(uint16_t);
  for_neighbours(count, [&](size_t i) {
    widen(w, q->bits, q->kind, q->order, q->k, size_t(outputs[i]),
          static_cast<char*>(out) + i * q->k * bytes);
  });
  return 0;
}
