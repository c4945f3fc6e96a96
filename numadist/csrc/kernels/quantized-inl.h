// Rows times quantized weights in panels of 16 outputs, by products of whole numbers: x is rounded to 8 bits by groups of
// 32 inputs. Included by quantized.cpp once per instruction set.
//
// Products of a group are summed exactly, in the order of memory; then they become f32, times both scales. So a row's
// bits do not depend on the other rows, nor, but for the last roundings, on the instruction set.

#include "kernels/vec_f32-inl.h"

using Bytes = uint8_t __attribute__((vector_size(4 * kLanes)));
using BytesInMemory = uint8_t __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
using Few = uint8_t __attribute__((vector_size(kLanes)));
using FewInMemory = uint8_t __attribute__((vector_size(kLanes), aligned(1), may_alias));
using SignedFew = int8_t __attribute__((vector_size(kLanes)));

inline Bytes load_bytes(const uint8_t* p) { return *reinterpret_cast<const BytesInMemory*>(p); }

// ---- dot products of 4 codes with 4 values of x, in every lane of 32 bits ----
// kZero8: what is taken from codes of 8 bits before they are multiplied is 128 - kZero8; the rest is taken after.

// Of products that add up in 32 bits from the start on.
struct Sum {
  Ints sum;
  void begin(int32_t start) { sum = Ints{} + start; }
  Ints end() const { return sum; }
};

#if ND_LANES == 16 && defined(ND_HAS_VNNI)
struct Dot : Sum {
  static constexpr int kZero8 = 128;
  template <int kBits>
  void add(Bytes codes, uint32_t x, size_t) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(int32_t(x)));
  }
};
#elif ND_LANES >= 8
// Products of unsigned and signed bytes are added by pairs to numbers of 16 bits, which hold the sums of kChain steps.
struct Dot {
  static constexpr int kZero8 = 0;
  using Shorts = int16_t __attribute__((vector_size(4 * kLanes)));
  int32_t start;
  Ints sum = {};
  Shorts pairs = {};
  void begin(int32_t from) { start = from; }
  Ints end() const { return sum + start; }

  template <int kBits>
  void add(Bytes codes, uint32_t x, size_t step) {
    constexpr size_t kChain = kBits == 4 ? 8 : kBits == 5 ? 4 : 1;
    const Bytes values = (Bytes)(Words{} + x);
    const Shorts products = kBits == 8 ? multiply_signed(codes ^ 0x80, values) : multiply(codes, values);
    pairs = step % kChain == 0 ? products : pairs + products;
    if ((step + 1) % kChain == 0) sum += add_pairs(pairs);
  }

#if ND_LANES == 8
  static Shorts multiply(Bytes a, Bytes b) { return (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
  static Shorts multiply_signed(Bytes a, Bytes b) {
    return multiply((Bytes)_mm256_abs_epi8((__m256i)a), (Bytes)_mm256_sign_epi8((__m256i)b, (__m256i)a));
  }
  static Ints add_pairs(Shorts a) { return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
#else
  static Shorts multiply(Bytes a, Bytes b) { return (Shorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
  static Shorts multiply_signed(Bytes a, Bytes b) {
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)a);
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)b, negative, _mm512_setzero_si512(), (__m512i)b);
    return multiply((Bytes)_mm512_abs_epi8((__m512i)a), (Bytes)turned);
  }
  static Ints add_pairs(Shorts a) { return (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1)); }
#endif
};
#elif defined(ND_HAS_DOTPROD)
// Both sides are signed, which codes of fewer bits are too.
struct Dot : Sum {
  static constexpr int kZero8 = 0;
  template <int kBits>
  void add(Bytes codes, uint32_t x, size_t) {
    const Bytes signed_codes = kBits == 8 ? codes ^ 0x80 : codes;
    sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)signed_codes, (int8x16_t)vdupq_n_u32(x));
  }
};
#else
struct Dot : Sum {
  static constexpr int kZero8 = 128;
  template <int kBits>
  void add(Bytes codes, uint32_t x, size_t) {
    const Words four = (Words)codes;
    for (int i = 0; i < 4; ++i)
      sum += (Ints)(four >> (8 * i) & 0xff) * int32_t(static_cast<int8_t>(x >> (8 * i)));
  }
};
#endif

// ---- codes of a group: two neighbouring steps of one vector of outputs ----

template <int kBits>
struct Codes {
  static constexpr size_t kBytes = kSteps * kStepBytes / 2 + (kBits == 5 ? kStepBytes : 0);
  static constexpr int kZero = 1 << (kBits - 1);
  static void load_pair(const uint8_t* group, size_t at, size_t step, Bytes* a, Bytes* b) {
    const Bytes both = load_bytes(group + step / 2 * kStepBytes + at);
    *a = both & 0x0f;
    *b = (Bytes)((Words)both >> 4) & 0x0f;
    if constexpr (kBits == 5) {
      const Words fifth = (Words)load_bytes(group + kSteps / 2 * kStepBytes + at);
      *a |= (Bytes)(fifth >> step << 4) & 0x10;
      *b |= (Bytes)(fifth >> (step + 1) << 4) & 0x10;
    }
  }
};
template <>
struct Codes<8> {
  static constexpr size_t kBytes = kSteps * kStepBytes;
  static constexpr int kZero = Dot::kZero8;
  static void load_pair(const uint8_t* group, size_t at, size_t step, Bytes* a, Bytes* b) {
    *a = load_bytes(group + step * kStepBytes + at);
    *b = load_bytes(group + (step + 1) * kStepBytes + at);
  }
};

// ---- scales of a group ----

inline Vec load_f16(const uint8_t* p, size_t at) {
  return F16::load(reinterpret_cast<const uint16_t*>(p) + at);
}
inline Vec load_u8(const uint8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const FewInMemory*>(p), Ints),
                                 Vec);
}
inline Vec load_i8(const uint8_t* p) {
  return __builtin_convertvector(
      __builtin_convertvector((SignedFew) * reinterpret_cast<const FewInMemory*>(p), Ints), Vec);
}

// Of the outputs from `at` on: scale of each half of the group, and what is added per sum of x where codes have a minimum.
template <int kKind>
struct Scales {
  static constexpr bool kHasMinimum = has_minimum(kKind);
  static constexpr size_t kHalves = kKind == ND_SCALES_I8_HALF ? 2 : 1;
  Vec scale[kHalves], minimum;

  Scales(const QuantizedWeights& w, const uint8_t* panel, size_t group, size_t at) {
    constexpr size_t kMany = kHasMinimum ? 2 : 1;
    const size_t share = (group >> w.shared) * kMany * kOutputs + at;
    scale[0] = load_f16(panel, share);
    if constexpr (kHasMinimum) minimum = load_f16(panel, share + kOutputs);
    if constexpr (has_factors(kKind)) {
      const uint8_t* factors =
          panel + w.num_shares() * kMany * kOutputs * sizeof(uint16_t) + group * 2 * kOutputs + at;
      if constexpr (kKind == ND_SCALES_U8_MIN) {
        scale[0] *= load_u8(factors);
        minimum *= -load_u8(factors + kOutputs);
      } else {
        scale[1] = scale[0] * load_i8(factors + kOutputs);
        scale[0] *= load_i8(factors);
      }
    }
  }
};

// ---- products ----

constexpr size_t kAhead = 4096;  // bytes

// kRows rows from `row` on, times kLanes outputs of a panel from `at` on: sums [kRows][kOutputs]. One vector of outputs
// goes through all groups before the next, which then finds their lines in the cache: more would not fit into registers.
template <int kBits, int kKind, size_t kRows>
inline void multiply_vector(const QuantizedWeights& w, const QuantizedRows& x, size_t panel, size_t row,
                            size_t at, float* sums) {
  using Code = Codes<kBits>;
  using Scale = Scales<kKind>;
  constexpr size_t kHalfSteps = kSteps / Scale::kHalves;
  const uint8_t* codes = w.codes + panel * w.groups * Code::kBytes;
  const uint8_t* scales = w.scales + panel * w.panel_scale_bytes;
  const size_t stride = w.groups;  // of rows, in groups
  Vec total[kRows] = {};
  for (size_t g = 0; g < w.groups; ++g, codes += Code::kBytes) {
    const size_t first = row * stride + g;
    const auto* values = reinterpret_cast<const uint32_t*>(x.values + first * kGroup);
    const int32_t* x_sums = x.sums + first * 2;
    // With several rows the next lines are not asked for early enough by themselves.
    for (size_t i = 0; i < Code::kBytes; i += 64) __builtin_prefetch(codes + kAhead + i);
    const Scale scale(w, scales, g, at);
#pragma GCC unroll 2
    for (size_t half = 0; half < Scale::kHalves; ++half) {
      Dot dots[kRows];
#pragma GCC unroll 8
      for (size_t m = 0; m < kRows; ++m) {
        const int32_t* sum = x_sums + m * stride * 2;
        dots[m].begin(
            Scale::kHasMinimum ? 0 : -Code::kZero * (Scale::kHalves == 2 ? sum[half] : sum[0] + sum[1]));
      }
#pragma GCC unroll 4
      for (size_t s = half * kHalfSteps; s < (half + 1) * kHalfSteps; s += 2) {
        Bytes a, b;
        Code::load_pair(codes, at * kStepInputs, s, &a, &b);
#pragma GCC unroll 8
        for (size_t m = 0; m < kRows; ++m) {
          const uint32_t* four = values + m * stride * kSteps + s;
          dots[m].template add<kBits>(a, four[0], s);
          dots[m].template add<kBits>(b, four[1], s + 1);
        }
      }
#pragma GCC unroll 8
      for (size_t m = 0; m < kRows; ++m)
        total[m] +=
            __builtin_convertvector(dots[m].end(), Vec) * x.scale[first + m * stride] * scale.scale[half];
    }
    if constexpr (Scale::kHasMinimum) {
#pragma GCC unroll 8
      for (size_t m = 0; m < kRows; ++m) {
        const int32_t* sum = x_sums + m * stride * 2;
        total[m] += scale.minimum * (x.scale[first + m * stride] * float(sum[0] + sum[1]));
      }
    }
  }
  for (size_t m = 0; m < kRows; ++m) store(sums + m * kOutputs + at, total[m]);
}

template <int kBits, int kKind, size_t kRows>
inline void multiply_tile(const QuantizedWeights& w, const QuantizedRows& x, size_t panel, size_t row,
                          float* sums) {
  for (size_t at = 0; at < kOutputs; at += kLanes)
    multiply_vector<kBits, kKind, kRows>(w, x, panel, row, at, sums);
}

// ---- x to whole numbers ----

// Numbers to the nearest whole ones, ties to even; at most 2^22. The compiler must not see where v comes from: fused with
// a product it would be rounded once, elsewhere twice.
inline Ints rounded(Vec v) {
#if defined(__aarch64__)
  asm("" : "+w"(v));
#else
  asm("" : "+x"(v));
#endif
  const Vec magic = Vec{} + 0x1.8p23f;
  return (Ints)(v + magic) - (Ints)magic;
}

template <class W>
inline void quantize_group(const typename W::Stored* from, int8_t* values, float* scale, int32_t* sums) {
  alignas(64) float wide[kGroup];
  Vec largest = {}, poison = {};
  for (size_t i = 0; i < kGroup; i += kLanes) {
    const Vec v = W::load(from + i);
    const Vec magnitude = (Vec)((Words)v & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
    poison += v * 0.0f;  // NaN for what is not finite
    store(wide + i, v);
  }
  float most = 0, bad = 0;
  for (size_t i = 0; i < kLanes; ++i) {
    most = largest[i] > most ? largest[i] : most;
    bad += poison[i];
  }
  const bool is_zero = most < 0x1p-100f;
  const float inverse = is_zero ? 0.0f : 127.0f / most;
  *scale = (is_zero ? 0.0f : most / 127.0f) + bad;
  sums[0] = sums[1] = 0;
  for (size_t i = 0; i < kGroup; i += kLanes) {
    const Ints whole = rounded(load(wide + i) * inverse);
    const SignedFew few = __builtin_convertvector(whole, SignedFew);
    memcpy(values + i, &few, sizeof few);
    for (size_t j = 0; j < kLanes; ++j) sums[i / (kGroup / 2)] += few[j];
  }
}

template <class W>
inline void quantize_row(const QuantizedCall& call, const QuantizedRows& to, size_t row) {
  using Stored = typename W::Stored;
  const auto* x = static_cast<const Stored*>(call.x) + row * call.k;
  for (size_t g = 0; g < call.w.groups; ++g) {
    const size_t at = row * call.w.groups + g;
    const Stored* from = x + g * kGroup;
    Stored gathered[kGroup] = {};
    if (call.order != nullptr) {
      for (size_t i = 0; i < kGroup; ++i)
        if (const int32_t input = call.order[g * kGroup + i]; input >= 0) gathered[i] = x[input];
      from = gathered;
    } else if ((g + 1) * kGroup > call.k) {
      if (g * kGroup < call.k) memcpy(gathered, from, sizeof(Stored) * (call.k - g * kGroup));
      from = gathered;
    }
    quantize_group<W>(from, to.values + at * kGroup, to.scale + at, to.sums + at * 2);
  }
}

// Sums of a panel with the bias, rounded once.
template <class W>
inline void write_panel(const QuantizedCall& call, const float* sums, size_t panel, size_t row, size_t rows) {
  using Stored = typename W::Stored;
  const size_t first = panel * kOutputs;
  const size_t outputs = call.w.n - first < kOutputs ? call.w.n - first : kOutputs;
  Stored bias[kOutputs] = {};
  if (call.bias != nullptr)
    memcpy(bias, static_cast<const Stored*>(call.bias) + first, sizeof(Stored) * outputs);
  for (size_t m = 0; m < rows; ++m) {
    Stored last[kOutputs];
    for (size_t c = 0; c < kOutputs; c += kLanes)
      W::store(last + c, load(sums + m * kOutputs + c) + W::load(bias + c));
    memcpy(static_cast<Stored*>(call.y) + (row + m) * call.w.n + first, last, sizeof(Stored) * outputs);
  }
}

// Rows at a time: their sums and a group's codes stay in registers.
constexpr size_t kTileRows = kRegisters == 32 ? 8 : 4;

template <int kBits, int kKind, size_t kRows = kTileRows>
inline void multiply_rows(const QuantizedWeights& w, const QuantizedRows& x, size_t panel, size_t row,
                          size_t rows, float* sums) {
  for (; rows >= kRows; row += kRows, rows -= kRows, sums += kRows * kOutputs)
    multiply_tile<kBits, kKind, kRows>(w, x, panel, row, sums);
  if constexpr (kRows > 1) multiply_rows<kBits, kKind, kRows / 2>(w, x, panel, row, rows, sums);
}

constexpr MultiplyRows find_multiply(int bits, int kind) {
  switch (bits * ND_NUM_SCALES + kind) {
#define ND_LAYOUT(bits, kind)      \
  case bits* ND_NUM_SCALES + kind: \
    return multiply_rows<bits, kind>;
    ND_QUANTIZED_LAYOUTS(ND_LAYOUT)
#undef ND_LAYOUT
    default:
      return nullptr;
  }
}
