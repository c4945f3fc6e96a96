// A few rows times packed bf16 weights, written once in plain C++. skinny.cpp includes this file once per
// ISA, inside a target of isa.h and a namespace of its own.

// acc[c] += row . column c of a panel, for all columns of the panel.
template <size_t Width>
inline __attribute__((always_inline)) void add_row(const uint16_t* row, const uint32_t* panel, size_t pairs,
                                                   float* acc) {
  for (size_t k = 0; k < pairs; ++k) {
    const float even = float_of_bf16(row[2 * k]);
    const float odd = float_of_bf16(row[2 * k + 1]);
    const uint32_t* w = panel + k * Width;
    for (size_t c = 0; c < Width; ++c)
      acc[c] += even * float_of_bits(w[c] << 16) + odd * float_of_bits(w[c] & 0xffff0000);
  }
}

template <size_t Width>
inline void multiply_panels(const SkinnyCall& call, size_t begin, size_t end) {
  const size_t pairs = call.k / 2;
  for (size_t panel = begin; panel < end; ++panel) {
    const size_t first = panel * Width;
    const size_t cols = call.n - first < Width ? call.n - first : Width;
    for (size_t m = 0; m < call.rows; ++m) {
      float acc[Width] = {};
      add_row<Width>(call.x + m * call.k, call.blob + first * pairs, pairs, acc);
      for (size_t c = 0; c < cols; ++c)
        call.y[m * call.n + first + c] =
            bf16_of_float(acc[c] + (call.bias ? float_of_bf16(call.bias[first + c]) : 0));
    }
  }
}
