// Elementwise reductions over several sources, written once. reduce.cpp includes this file once per ISA, inside
// a target of isa.h and a namespace of its own, so there is no include guard and nothing but templates here. The
// loops are plain C++ over blocks of fixed length, which the compiler turns into vectors; only the conversions of f16
// have instructions of their own (ND_ISA_F16C). ND_ISA_FLOATS_ONLY leaves the integers out.

constexpr size_t kBlock = 64;

// An element type: how a block of it becomes accumulators and back.
template <typename T>
struct Plain {
  using Elem = T;
  using Acc = T;
  static void load(const T* p, T* acc, size_t n) { memcpy(acc, p, n * sizeof(T)); }
  static void store(const T* acc, T* p, size_t n) { memcpy(p, acc, n * sizeof(T)); }
};

struct Bf16 {
  using Elem = uint16_t;
  using Acc = float;
  static void load(const uint16_t* p, float* acc, size_t n) {
    for (size_t i = 0; i < n; ++i) acc[i] = float_of_bf16(p[i]);
  }
  static void store(const float* acc, uint16_t* p, size_t n) {
    for (size_t i = 0; i < n; ++i) p[i] = bf16_of_float(acc[i]);
  }
};

struct F16 {
  using Elem = uint16_t;
  using Acc = float;
  static float to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t rest = h & 0x7fff;
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return float_of_bits(sign | ((rest << 13) + (112u << 23)));
    return float_of_bits(sign | bits_of_float(static_cast<float>(rest) * 0x1p-24f));
  }
  static uint16_t from_float(float f) {
    const uint32_t u = bits_of_float(f) & 0x7fffffff;
    const uint32_t sign = (bits_of_float(f) >> 16) & 0x8000;
    uint32_t h;
    if (u > 0x7f800000)
      h = 0x7e00;
    else if (u >= 0x477ff000)  // rounds to 65536 or more
      h = 0x7c00;
    else if (u < 0x38800000)  // below the smallest normal: adding 0.5 rounds at its last place
      h = bits_of_float(float_of_bits(u) + 0.5f) - bits_of_float(0.5f);
    else
      h = (u + 0xfff + ((u >> 13) & 1) - (112u << 23)) >> 13;
    return static_cast<uint16_t>(sign | h);
  }
#ifdef ND_ISA_F16C
  static constexpr size_t kVector = 8;  // elements a conversion instruction takes
#else
  static constexpr size_t kVector = 1;
#endif
  static void load(const uint16_t* p, float* acc, size_t n) {
    const size_t whole = kVector > 1 ? n / kVector * kVector : 0;
#ifdef ND_ISA_F16C
    for (size_t i = 0; i < whole; i += kVector)
      _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
    for (size_t i = whole; i < n; ++i) acc[i] = to_float(p[i]);
  }
  static void store(const float* acc, uint16_t* p, size_t n) {
    const size_t whole = kVector > 1 ? n / kVector * kVector : 0;
#ifdef ND_ISA_F16C
    for (size_t i = 0; i < whole; i += kVector)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), 0));
#endif
    for (size_t i = whole; i < n; ++i) p[i] = from_float(acc[i]);
  }
};

// Reductions. Integers wrap around: computed in an unsigned type no narrower than int, where overflow is defined.
template <typename T>
using Wide = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
    return a + b;
  }
};
struct Avg : Sum {};
struct Prod {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b));
    return a * b;
  }
};
// `b != b`: a NaN on either side is carried on.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};
struct Band {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Bor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Bxor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename D, typename Op>
inline __attribute__((always_inline)) void reduce_block(typename D::Elem* dst, const void* const* srcs,
                                                        int num_srcs, size_t at, size_t n) {
  using Elem = typename D::Elem;
  using Acc = typename D::Acc;
  Acc acc[kBlock];
  Acc next[kBlock];
  D::load(static_cast<const Elem*>(srcs[0]) + at, acc, n);
  for (int s = 1; s < num_srcs; ++s) {
    D::load(static_cast<const Elem*>(srcs[s]) + at, next, n);
    for (size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], next[i]);
  }
  if constexpr (std::is_same_v<Op, Avg>)
    for (size_t i = 0; i < n; ++i) acc[i] /= static_cast<Acc>(num_srcs);
  D::store(acc, dst + at, n);
}

template <typename D, typename Op>
void reduce(void* dst, const void* const* srcs, int num_srcs, size_t count) {
  auto* out = static_cast<typename D::Elem*>(dst);
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) reduce_block<D, Op>(out, srcs, num_srcs, i, kBlock);
  if (i < count) reduce_block<D, Op>(out, srcs, num_srcs, i, count - i);
}

#ifndef ND_ISA_FLOATS_ONLY
template <typename T>
constexpr Kernel integer_kernel(int op) {
  switch (op) {
    case ND_SUM:
      return reduce<Plain<T>, Sum>;
    case ND_PROD:
      return reduce<Plain<T>, Prod>;
    case ND_MIN:
      return reduce<Plain<T>, Min>;
    case ND_MAX:
      return reduce<Plain<T>, Max>;
    case ND_BAND:
      return reduce<Plain<T>, Band>;
    case ND_BOR:
      return reduce<Plain<T>, Bor>;
    case ND_BXOR:
      return reduce<Plain<T>, Bxor>;
    default:
      return nullptr;
  }
}

#endif

template <typename D>
constexpr Kernel float_kernel(int op) {
  switch (op) {
    case ND_SUM:
      return reduce<D, Sum>;
    case ND_AVG:
      return reduce<D, Avg>;
    case ND_PROD:
      return reduce<D, Prod>;
    case ND_MIN:
      return reduce<D, Min>;
    case ND_MAX:
      return reduce<D, Max>;
    default:
      return nullptr;
  }
}

constexpr Kernel find_float_kernel(int dtype, int op) {
  switch (dtype) {
    case ND_F32:
      return float_kernel<Plain<float>>(op);
    case ND_F64:
      return float_kernel<Plain<double>>(op);
    case ND_F16:
      return float_kernel<F16>(op);
    case ND_BF16:
      return float_kernel<Bf16>(op);
    default:
      return nullptr;
  }
}

#ifndef ND_ISA_FLOATS_ONLY
constexpr Kernel find_kernel(int dtype, int op) {
  switch (dtype) {
    case ND_I8:
      return integer_kernel<int8_t>(op);
    case ND_U8:
      return integer_kernel<uint8_t>(op);
    case ND_I16:
      return integer_kernel<int16_t>(op);
    case ND_U16:
      return integer_kernel<uint16_t>(op);
    case ND_I32:
      return integer_kernel<int32_t>(op);
    case ND_U32:
      return integer_kernel<uint32_t>(op);
    case ND_I64:
      return integer_kernel<int64_t>(op);
    case ND_U64:
      return integer_kernel<uint64_t>(op);
    case ND_BOOL:
      if (op == ND_SUM) op = ND_BOR;
      if (op == ND_PROD) op = ND_BAND;
      return integer_kernel<uint8_t>(op);
    default:
      return find_float_kernel(dtype, op);
  }
}
#endif

#include "comm/fused-inl.h"
