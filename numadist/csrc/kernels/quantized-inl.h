// Rows times quantized weights in panels of 16 outputs, by products of whole numbers: x is rounded to 8 bits by groups of
// 32 inputs. Included by quantized.cpp once per instruction set.
//
// Products of a group are summed exactly, in the order of memory; then they become f32, times both scales. So a row's
// bits do not depend on the other rows, nor, but for the last roundings, on the instruction set.

#include "kernels/vec_f32-inl.h"

// Of outputs, that go through the groups together and share what is read of x. More would not fit into registers.
constexpr size_t kVectors = ND_LANES == 8 ? 2 : 1;

using Bytes = uint8_t __attribute__((vector_size(4 * kLanes)));
using BytesInMemory = uint8_t __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
using Few = uint8_t __attribute__((vector_size(kLanes)));
using FewInMemory = uint8_t __attribute__((vector_size(kLanes), aligned(1), may_alias));
using SignedFew = int8_t __attribute__((vector_size(kLanes)));
using ShortFew = int16_t __attribute__((vector_size(2 * kLanes)));

inline Bytes load_bytes(const uint8_t* p) { return *reinterpret_cast<const BytesInMemory*>(p); }

// ---- dot products of 4 codes with 4 values of x, in every lane of 32 bits ----
// kZero8: what is taken from codes of 8 bits before they are multiplied is 128 - kZero8; the rest is taken after.
// x: of a step; where it is wide, two words.

// Of products that add up in 32 bits from the start on.
struct Sum {
  template <int>
  static constexpr bool kIsWide = false;
  Ints sum = {};
  void begin(int32_t start) { sum = Ints{} + start; }
  Ints end() const { return sum; }
};

#if ND_LANES == 16 && defined(ND_HAS_VNNI)
struct Dot : Sum {
  static constexpr int kZero8 = 128;
  template <int kBits>
  void add(Bytes codes, const uint32_t* x, size_t) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(int32_t(x[0])));
  }
};
#elif ND_LANES >= 8
// Codes of fewer than 8 bits: products with bytes are added by pairs to numbers of 16 bits, which hold the sums of kChain
// steps: 15 * 127 * 2 * 8 and 31 * 127 * 2 * 4 are below 2^15. Of 8 bits both sides are widened to 16 bits before, those of
// even places apart from those of odd ones, as x is in memory.
struct Dot {
  static constexpr int kZero8 = 128;
  template <int kBits>
  static constexpr bool kIsWide = kBits == 8;
  using Shorts = uint16_t __attribute__((vector_size(4 * kLanes)));
  int32_t start = 0;
  Ints sum = {};
  Shorts pairs = {};
  void begin(int32_t from) { start = from; }
  Ints end() const { return sum + start; }

  // The order of sums is kept from the compiler, which would hold more of them at a time than there are registers.
  template <int kBits>
  void add(Bytes codes, const uint32_t* x, size_t step) {
    if constexpr (kBits == 8) {
      sum += multiply((Shorts)codes & 0xff, x[0]);
      asm("" : "+x"(sum));
      sum += multiply((Shorts)codes >> 8, x[1]);
      asm("" : "+x"(sum));
    } else {
      constexpr size_t kChain = kBits == 4 ? 8 : 4;
      const Shorts products = multiply_bytes(codes, x[0]);
      pairs = step % kChain == 0 ? products : pairs + products;
      asm("" : "+x"(pairs));
      if ((step + 1) % kChain == 0) sum += multiply(pairs, 0x00010001);
    }
  }

#if ND_LANES == 8
  static Shorts multiply_bytes(Bytes a, uint32_t x) {
    return (Shorts)_mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(int32_t(x)));
  }
  static Ints multiply(Shorts a, uint32_t x) {
    return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(int32_t(x)));
  }
#else
  static Shorts multiply_bytes(Bytes a, uint32_t x) {
    return (Shorts)_mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(int32_t(x)));
  }
  static Ints multiply(Shorts a, uint32_t x) {
    return (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(int32_t(x)));
  }
#endif
};
#elif defined(ND_HAS_DOTPROD)
// Both sides are signed, which codes of fewer bits are too.
struct Dot : Sum {
  static constexpr int kZero8 = 0;
  template <int kBits>
  void add(Bytes codes, const uint32_t* x, size_t) {
    const Bytes signed_codes = kBits == 8 ? codes ^ 0x80 : codes;
    sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)signed_codes, (int8x16_t)vdupq_n_u32(x[0]));
  }
};
#else
struct Dot : Sum {
  static constexpr int kZero8 = 128;
  template <int kBits>
  void add(Bytes codes, const uint32_t* x, size_t) {
    const Words four = (Words)codes;
    for (int i = 0; i < 4; ++i)
      sum += (Ints)(four >> (8 * i) & 0xff) * int32_t(static_cast<int8_t>(x[0] >> (8 * i)));
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
#if ND_LANES == 8
inline Vec load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Vec load_i8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#else
inline Vec load_u8(const uint8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const FewInMemory*>(p), Ints),
                                 Vec);
}
inline Vec load_i8(const uint8_t* p) {
  return __builtin_convertvector(
      __builtin_convertvector((SignedFew) * reinterpret_cast<const FewInMemory*>(p), Ints), Vec);
}
#endif

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

// kRows rows from `row` on, times kVectors vectors of outputs of a panel from `at` on: sums [kRows][kOutputs].
template <int kBits, int kKind, size_t kRows>
inline void multiply_vectors(const QuantizedWeights& w, const QuantizedRows& x, size_t panel, size_t row,
                             size_t at, float* sums) {
  using Code = Codes<kBits>;
  using Scale = Scales<kKind>;
  constexpr size_t kHalfSteps = kSteps / Scale::kHalves;
  constexpr size_t kWords = Dot::kIsWide<kBits> ? 2 : 1;  // of x, of a step
  constexpr bool kHasStart = !Scale::kHasMinimum && Code::kZero != 0;
  const uint8_t* codes = w.codes + panel * w.groups * Code::kBytes;
  const uint8_t* scales = w.scales + panel * w.panel_scale_bytes;
  const size_t stride = w.groups;  // of rows, in groups
  Vec total[kRows][kVectors] = {};
  for (size_t g = 0; g < w.groups; ++g, codes += Code::kBytes) {
    const uint32_t* values = x.values + (row * stride + g) * kSteps * kWords;
    const RoundedGroup* group = x.groups + row * stride + g;
    // With several rows the next lines are not asked for early enough by themselves.
    for (size_t i = 0; i < Code::kBytes; i += 64) __builtin_prefetch(codes + kAhead + i);
#pragma GCC unroll 2
    for (size_t half = 0; half < Scale::kHalves; ++half) {
      Dot dots[kRows][kVectors];
      if constexpr (kHasStart)
        for (size_t m = 0; m < kRows; ++m)
          for (size_t v = 0; v < kVectors; ++v) dots[m][v].begin(group[m * stride].start[half]);
#pragma GCC unroll 4
      for (size_t s = half * kHalfSteps; s < (half + 1) * kHalfSteps; s += 2) {
        Bytes a[kVectors], b[kVectors];
#pragma GCC unroll 2
        for (size_t v = 0; v < kVectors; ++v)
          Code::load_pair(codes, (at + v * kLanes) * kStepInputs, s, &a[v], &b[v]);
#pragma GCC unroll 8
        for (size_t m = 0; m < kRows; ++m) {
          const uint32_t* words = values + (m * stride * kSteps + s) * kWords;
#pragma GCC unroll 2
          for (size_t v = 0; v < kVectors; ++v) dots[m][v].template add<kBits>(a[v], words, s);
#pragma GCC unroll 2
          for (size_t v = 0; v < kVectors; ++v) dots[m][v].template add<kBits>(b[v], words + kWords, s + 1);
        }
      }
#pragma GCC unroll 2
      for (size_t v = 0; v < kVectors; ++v) {
        const Scale scale(w, scales, g, at + v * kLanes);
#pragma GCC unroll 8
        for (size_t m = 0; m < kRows; ++m) {
          total[m][v] +=
              __builtin_convertvector(dots[m][v].end(), Vec) * group[m * stride].scale * scale.scale[half];
          if constexpr (Scale::kHasMinimum) total[m][v] += scale.minimum * group[m * stride].sum;
        }
      }
    }
  }
  for (size_t m = 0; m < kRows; ++m)
    for (size_t v = 0; v < kVectors; ++v) store(sums + m * kOutputs + at + v * kLanes, total[m][v]);
}

template <int kBits, int kKind, size_t kRows>
inline void multiply_tile(const QuantizedWeights& w, const QuantizedRows& x, size_t panel, size_t row,
                          float* sums) {
  for (size_t at = 0; at < kOutputs; at += kVectors * kLanes)
    multiply_vectors<kBits, kKind, kRows>(w, x, panel, row, at, sums);
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

// What all lanes give together, in each of them.
template <class V, class Together, size_t... I>
inline V with_turned(V v, Together together, size_t width, std::index_sequence<I...>) {
  return together(v, __builtin_shuffle(v, Ints{int32_t(I ^ width)...}));
}
template <size_t kWidth = kLanes / 2, class Together>
inline Ints folded(Ints v, Together together) {
  v = with_turned(v, together, kWidth, std::make_index_sequence<kLanes>());
  if constexpr (kWidth > 1) return folded<kWidth / 2>(v, together);
  return v;
}

inline Ints sum_of(Ints a, Ints b) { return a + b; }
inline Ints greater_of(Ints a, Ints b) { return a > b ? a : b; }

// Of each four the even ones first.
template <size_t... I>
inline ShortFew in_wide_order(ShortFew few, std::index_sequence<I...>) {
  return __builtin_shuffle(few, ShortFew{int16_t(I / 4 * 4 + I % 2 * 2 + I % 4 / 2)...});
}

template <class W>
inline void quantize_group(const typename W::Stored* from, const Multiply& multiply, bool by_halves,
                           uint32_t* words, RoundedGroup* group) {
  constexpr size_t kHalf = kGroup / 2 / kLanes;  // vectors
  Vec wide[2 * kHalf];
  Ints largest = {};  // bits of magnitudes, of which those of what is not finite are the greatest
  for (size_t i = 0; i < 2 * kHalf; ++i) {
    wide[i] = W::load(from + i * kLanes);
    largest = greater_of(largest, (Ints)wide[i] & 0x7fffffff);
  }
  const float most = ((Vec)folded(largest, greater_of))[0];
  const bool is_zero = most < 0x1p-100f;
  const float inverse = is_zero ? 0.0f : 127.0f / most;
  int32_t sums[2];
  for (size_t half = 0; half < 2; ++half) {
    Ints sum = {};
    for (size_t i = half * kHalf; i < (half + 1) * kHalf; ++i) {
      const Ints whole = rounded(wide[i] * inverse);
      sum += whole;
      const ShortFew few = __builtin_convertvector(whole, ShortFew);
      if (multiply.is_wide) {
        const ShortFew ordered = in_wide_order(few, std::make_index_sequence<kLanes>());
        memcpy(words + i * kLanes / 2, &ordered, sizeof ordered);
      } else {
        const SignedFew fewer = __builtin_convertvector(few, SignedFew);
        memcpy(words + i * kLanes / 4, &fewer, sizeof fewer);
      }
    }
    sums[half] = folded(sum, sum_of)[0];
  }
  group->scale = (is_zero ? 0.0f : most / 127.0f) + most * 0.0f;  // NaN for what is not finite
  group->sum = group->scale * float(sums[0] + sums[1]);
  group->start[0] = -multiply.zero * (by_halves ? sums[0] : sums[0] + sums[1]);
  group->start[1] = -multiply.zero * sums[1];
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
    quantize_group<W>(from, call.multiply, call.by_halves,
                      to.values + at * kSteps * (call.multiply.is_wide ? 2 : 1), to.groups + at);
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

constexpr Multiply find_multiply(int bits, int kind) {
  switch (bits * ND_NUM_SCALES + kind) {
#define ND_LAYOUT(bits, kind)      \
  case bits* ND_NUM_SCALES + kind: \
    return {multiply_rows<bits, kind>, Codes<bits>::kZero, Dot::kIsWide<bits>};
    ND_QUANTIZED_LAYOUTS(ND_LAYOUT)
#undef ND_LAYOUT
    default:
      return {nullptr, 0, false};
  }
}
