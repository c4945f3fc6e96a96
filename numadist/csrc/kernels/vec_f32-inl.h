// Vectors of f32 in the compiler's own notation, and what they are loaded from. Included inside a target of isa.h
// and the namespace of an ISA; ND_LANES says how wide its registers are.

constexpr size_t kLanes = ND_LANES;
using Vec = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using VecInMemory = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using HalvesInMemory = uint16_t __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecInMemory*>(p) = v; }

// Kinds of elements in memory; in registers all are f32. Where two vectors come cheaper together than one by one,
// but with their columns mixed, load_mixed gives them so, and sort puts sums of such into order.
struct F32 {
  using Stored = float;
  static Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }
  static void store(float* p, Vec v) { *reinterpret_cast<VecInMemory*>(p) = v; }
  static void load_mixed(const float* p, Vec* a, Vec* b) { *a = load(p), *b = load(p + kLanes); }
  static void sort(Vec*, Vec*) {}
};

struct Bf16 {
  using Stored = uint16_t;
  static Vec load(const uint16_t* p) {
    const Halves halves = *reinterpret_cast<const HalvesInMemory*>(p);
    return reinterpret_cast<Vec>(__builtin_convertvector(halves, Words) << 16);
  }
  // As bf16_of_float.
  static void store(uint16_t* p, Vec v) {
    const Words u = reinterpret_cast<Words>(v);
    const Words even = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const Words rounded = v != v ? (u >> 16) | 0x40 : even;
    *reinterpret_cast<HalvesInMemory*>(p) = __builtin_convertvector(rounded, Halves);
  }
  // Zeros are put under the numbers by one instruction each, inside lanes of 16 bytes, which hold 8 numbers before and
  // 4 after: a gets the even quarters of 4, b the odd ones.
  static void load_mixed(const uint16_t* p, Vec* a, Vec* b) {
    mixed(*reinterpret_cast<const PairInMemory*>(p), a, b, std::make_index_sequence<2 * kLanes>());
  }
  static void sort(Vec* a, Vec* b) { sorted(a, b, std::make_index_sequence<kLanes>()); }

 private:
  using Pair = uint16_t __attribute__((vector_size(4 * kLanes)));
  using PairInMemory = uint16_t __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
  template <size_t... I>
  static void mixed(Pair both, Vec* a, Vec* b, std::index_sequence<I...>) {
    constexpr size_t kSecond = 2 * kLanes;  // numbers from here on are of the second operand
    *a = reinterpret_cast<Vec>(
        __builtin_shuffle(Pair{}, both, Pair{uint16_t(I / 8 * 8 + I % 8 / 2 + (I % 2) * kSecond)...}));
    *b = reinterpret_cast<Vec>(
        __builtin_shuffle(Pair{}, both, Pair{uint16_t(I / 8 * 8 + 4 + I % 8 / 2 + (I % 2) * kSecond)...}));
  }
  // Number i of all is in quarter i / 4, which is number i / 8 of a or of b.
  template <size_t... I>
  static void sorted(Vec* a, Vec* b, std::index_sequence<I...>) {
    const auto at = [](size_t i) { return int32_t(i / 8 * 4 + i % 4 + i / 4 % 2 * kLanes); };
    const Vec first = __builtin_shuffle(*a, *b, Ints{at(I)...});
    *b = __builtin_shuffle(*a, *b, Ints{at(I + kLanes)...});
    *a = first;
  }
};

struct F16 {
  using Stored = uint16_t;
  static void load_mixed(const uint16_t* p, Vec* a, Vec* b) { *a = load(p), *b = load(p + kLanes); }
  static void sort(Vec*, Vec*) {}
#if ND_LANES == 8
  static Vec load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static void store(uint16_t* p, Vec v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif ND_LANES == 16
  // With masks of all lanes: of its intrinsics without one GCC 12 warns.
  static Vec load(const uint16_t* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
  }
  static void store(uint16_t* p, Vec v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__aarch64__)
  static Vec load(const uint16_t* p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
#else
  // Exponents move by a product, which makes numbers below the normal ones right too; those of infinity and NaN
  // are the highest in both formats.
  static Vec load(const uint16_t* p) {
    const Words h = __builtin_convertvector(*reinterpret_cast<const HalvesInMemory*>(p), Words);
    const Words scaled = reinterpret_cast<Words>(reinterpret_cast<Vec>((h & 0x7fff) << 13) * 0x1p112f);
    const Words special = reinterpret_cast<Words>((h & 0x7c00) == 0x7c00) & 0x7f800000;
    return reinterpret_cast<Vec>(scaled | special | (h & 0x8000) << 16);
  }
  static void store(uint16_t* p, Vec v) {
    for (size_t i = 0; i < kLanes; ++i) p[i] = f16_of_float(v[i]);
  }
#endif
};
