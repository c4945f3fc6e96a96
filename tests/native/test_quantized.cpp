// Linear layers and lookups on quantized weights on a team of threads: every ISA and layout, exact.
#include <errno.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "bf16.h"
#include "harness.h"
#include "team_of_threads.h"

namespace {

constexpr size_t kGroup = 32, kOutputs = 16;

struct Layout {
  int bits, kind, shared;
};
constexpr Layout kLayouts[] = {{4, ND_SCALES_F16, 0},    {4, ND_SCALES_F16_MIN, 0}, {4, ND_SCALES_U8_MIN, 3},
                               {5, ND_SCALES_F16, 0},    {5, ND_SCALES_F16_MIN, 0}, {5, ND_SCALES_U8_MIN, 1},
                               {8, ND_SCALES_F16, 0},    {8, ND_SCALES_I8_HALF, 3}, {4, ND_SCALES_U8_MIN, 0},
                               {8, ND_SCALES_I8_HALF, 0}};

struct Sizes {
  size_t rows, n, k;
  bool has_order, has_bias;
};

// Weights, their bytes, and what they are. Numbers are so small that all sums are exact in f32, whatever their order.
struct Weights {
  std::vector<uint8_t> codes, scales;
  std::vector<int32_t> order;
  std::vector<float> numbers;  // [n][32 groups], of places
  size_t groups;

  Weights(const Layout& l, const Sizes& s, std::mt19937& random) : groups(s.k / kGroup + 1) {
    const bool has_minimum = l.kind == ND_SCALES_F16_MIN || l.kind == ND_SCALES_U8_MIN;
    const bool has_factors = l.kind == ND_SCALES_I8_HALF || l.kind == ND_SCALES_U8_MIN;
    const size_t panels = (s.n + kOutputs - 1) / kOutputs, many = has_minimum ? 2 : 1;
    const size_t shares = (groups + (size_t(1) << l.shared) - 1) >> l.shared;
    const size_t group_bytes = size_t(l.bits) * kGroup * kOutputs / 8;
    panel_scale_bytes = kOutputs * (shares * many * 2 + (has_factors ? groups * 2 : 0));
    codes.resize(panels * groups * group_bytes);
    for (auto& byte : codes) byte = uint8_t(random());
    scales.resize(panels * panel_scale_bytes);
    std::uniform_int_distribution<int> small(-2, 2), factor(0, 3);
    numbers.resize(s.n * groups * kGroup);
    for (size_t p = 0; p < panels; ++p) {
      uint8_t* const at = scales.data() + p * panel_scale_bytes;
      for (size_t i = 0; i < shares * many * kOutputs; ++i) {
        const uint16_t half = nd::f16_of_float(float(small(random)));
        memcpy(at + 2 * i, &half, 2);
        halves[{p, i}] = half;
      }
      for (size_t i = shares * many * kOutputs * 2; i < panel_scale_bytes; ++i)
        at[i] = uint8_t(l.kind == ND_SCALES_I8_HALF ? small(random) : factor(random));
    }
    for (size_t out = 0; out < s.n; ++out)
      for (size_t place = 0; place < groups * kGroup; ++place) {
        const size_t p = out / kOutputs, lane = out % kOutputs, g = place / kGroup, i = place % kGroup;
        const uint8_t* const group = codes.data() + (p * groups + g) * group_bytes;
        const size_t step = i / 4, byte = 4 * lane + i % 4;
        int code = l.bits == 8 ? group[step * 64 + byte] : group[step / 2 * 64 + byte] >> (step % 2 * 4) & 15;
        if (l.bits == 5) code += (group[256 + byte] >> step & 1) * 16;
        const auto number = [&](size_t which) {
          return float_of_f16(halves[{p, ((g >> l.shared) * many + which) * kOutputs + lane}]);
        };
        const uint8_t* const factors =
            scales.data() + p * panel_scale_bytes + shares * many * kOutputs * 2 + g * 2 * kOutputs + lane;
        float w;
        if (l.kind == ND_SCALES_F16_MIN)
          w = number(0) * code + number(1);
        else if (l.kind == ND_SCALES_U8_MIN)
          w = number(0) * factors[0] * code - number(1) * factors[kOutputs];
        else
          w = number(0) * (code - (1 << (l.bits - 1))) *
              (l.kind == ND_SCALES_I8_HALF ? float(int8_t(factors[i / 16 * kOutputs])) : 1.0f);
        numbers[out * groups * kGroup + place] = w;
      }
    order.resize(groups * kGroup, -1);
    std::iota(order.begin(), order.begin() + long(s.k), 0);
    if (s.has_order) std::shuffle(order.begin(), order.end(), random);
  }

  NdQuantized described(const Layout& l, const Sizes& s) const {
    return {codes.data(),
            scales.data(),
            s.has_order ? order.data() : nullptr,
            s.n,
            s.k,
            groups,
            panel_scale_bytes,
            l.bits,
            l.kind,
            l.shared};
  }

  size_t panel_scale_bytes;

 private:
  static float float_of_f16(uint16_t h) {
    for (int i = -2; i <= 2; ++i)
      if (nd::f16_of_float(float(i)) == h) return float(i);
    return 0;  // -0
  }
  std::map<std::pair<size_t, size_t>, uint16_t> halves;
};

// Whole numbers of which every group's largest is 127, so that they are their own codes.
std::vector<float> draw_rows(const Sizes& s, const Weights& w, std::mt19937& random) {
  std::vector<float> x(s.rows * s.k);
  std::uniform_int_distribution<int> number(-127, 127);
  for (auto& v : x) v = float(number(random));
  for (size_t m = 0; m < s.rows; ++m)
    for (size_t g = 0; g < w.groups; ++g)
      for (size_t i = 0; i < kGroup; ++i)
        if (const int32_t at = w.order[g * kGroup + i]; at >= 0) {
          x[m * s.k + size_t(at)] = random() % 2 ? 127.0f : -127.0f;
          break;
        }
  return x;
}

// The weights as those of one expert of three, the others being other bytes: rows meet the same numbers as alone.
void check_experts(int isa, const Layout& l, const Sizes& s, const NdQuantized& q, const Weights& w,
                   const std::vector<float>& x, std::mt19937& random) {
  const Weights before(l, s, random), behind(l, s, random);
  std::vector<uint8_t> codes, scales;
  for (const Weights* each : {&before, &w, &behind}) {
    codes.insert(codes.end(), each->codes.begin(), each->codes.end());
    scales.insert(scales.end(), each->scales.begin(), each->scales.end());
  }
  NdQuantized all = q;
  all.codes = codes.data(), all.scales = scales.data();
  const size_t first = s.rows / 3, last = s.rows - s.rows / 4;
  const int32_t ends[3] = {int32_t(first), int32_t(last), int32_t(s.rows)};
  std::vector<float> y(s.rows * s.n, -1), alone((last - first) * s.n, -2);
  std::vector<char> scratch(nd_quantized_linear_scratch(s.rows, w.groups));
  CHECK_EQ(nd_quantized_experts(isa, ND_F32, x.data(), &all, ends, 3, y.data(), scratch.data(), s.rows), 0,
           "%s", nd_isa_name(isa));
  CHECK_EQ(nd_quantized_linear(isa, ND_F32, x.data() + first * s.k, &q, nullptr, alone.data(), scratch.data(),
                               last - first),
           0, "%s", nd_isa_name(isa));
  for (size_t i = 0; i < alone.size(); ++i)
    CHECK_EQ(y[first * s.n + i], alone[i], "%s, %d bits, scales %d, %zu rows, number %zu", nd_isa_name(isa),
             l.bits, l.kind, s.rows, i);
}

// Sizes of memory are exact, so that ASAN sees a read or write beyond an end.
void check(int isa, const Layout& l, const Sizes& s, std::mt19937& random) {
  const Weights w(l, s, random);
  const NdQuantized q = w.described(l, s);
  const auto x = draw_rows(s, w, random);
  std::vector<float> bias(s.n), y(s.rows * s.n, -1);
  for (auto& b : bias) b = float(int(random() % 9) - 4);
  std::vector<char> scratch(nd_quantized_linear_scratch(s.rows, w.groups));
  CHECK_EQ(nd_quantized_linear(isa, ND_F32, x.data(), &q, s.has_bias ? bias.data() : nullptr, y.data(),
                               scratch.data(), s.rows),
           0, "%s", nd_isa_name(isa));
  for (size_t m = 0; m < s.rows; ++m)
    for (size_t out = 0; out < s.n; ++out) {
      double sum = s.has_bias ? bias[out] : 0;
      for (size_t place = 0; place < w.groups * kGroup; ++place)
        if (w.order[place] >= 0)
          sum += double(x[m * s.k + size_t(w.order[place])]) * w.numbers[out * w.groups * kGroup + place];
      CHECK_EQ(double(y[m * s.n + out]), sum,
               "%s, %d bits, scales %d, row %zu of %zu, output %zu of %zu, k %zu", nd_isa_name(isa), l.bits,
               l.kind, m, s.rows, out, s.n, s.k);
    }
  check_experts(isa, l, s, q, w, x, random);
  if (isa != 0) return;
  std::vector<int64_t> wanted(s.n);
  std::iota(wanted.begin(), wanted.end(), 0);
  std::vector<float> table(s.n * s.k, -1e9f);
  CHECK_EQ(nd_quantized_lookup(ND_F32, &q, wanted.data(), s.n, table.data()), 0, "all outputs");
  for (size_t out = 0; out < s.n; ++out)
    for (size_t place = 0; place < w.groups * kGroup; ++place)
      if (w.order[place] >= 0)
        CHECK_EQ(table[out * s.k + size_t(w.order[place])], w.numbers[out * w.groups * kGroup + place],
                 "%d bits, scales %d, output %zu, place %zu", l.bits, l.kind, out, place);
}

}  // namespace

int main() {
  const NdTeam team = team_of_threads();
  CHECK_EQ(nd_team_use(&team), 0, "a team of %d", kThreads);
  std::mt19937 random(7);
  for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa)
    for (const Layout& l : kLayouts)
      for (size_t rows : {0, 1, 2, 3, 4, 7, 8, 9, 16, 33, 130})
        for (size_t n : {1, 47, 64})
          check(isa, l, {rows, n, 1 + (rows * 37 + n) % 200, (rows + n) % 3 == 0, rows % 2 == 0}, random);
  const Layout l = kLayouts[0];
  const Sizes s = {1, 3, 40, false, false};
  const Weights w(l, s, random);
  float x[40] = {}, y[40];
  for (NdQuantized bad : {w.described({6, ND_SCALES_F16, 0}, s), w.described({8, ND_SCALES_F16_MIN, 0}, s),
                          w.described({4, ND_SCALES_F16, 1}, s), w.described({4, 9, 0}, s)}) {
    CHECK_EQ(nd_quantized_linear(0, ND_F32, x, &bad, nullptr, y, nullptr, 1), -EINVAL, "%d bits", bad.bits);
    const int64_t first = 0;
    CHECK_EQ(nd_quantized_lookup(ND_F32, &bad, &first, 1, y), -EINVAL, "%d bits", bad.bits);
  }
  const NdQuantized good = w.described(l, s);
  CHECK_EQ(nd_quantized_linear(0, ND_I8, x, &good, nullptr, y, nullptr, 1), -EINVAL, "int8 rows");
  for (int32_t bad : {-1, 0, 2})
    CHECK_EQ(nd_quantized_experts(0, ND_F32, x, &good, &bad, 1, y, nullptr, 1), -ERANGE, "an end of rows");
  for (int64_t outside : {-1, 3})
    CHECK_EQ(nd_quantized_lookup(ND_F32, &good, &outside, 1, y), -ERANGE, "a token");
  printf("%s: ok\n", nd_isa_name(0));
}
