// Sum of several sources, and what follows it in a transformer, row by row: the end of reduce-inl.h.

// f(column, n) for the blocks of a row; n is kBlock but for the last, so that most blocks have a fixed length.
template <typename F>
inline __attribute__((always_inline)) void for_blocks(size_t cols, F f) {
  size_t i = 0;
  for (; i + kBlock <= cols; i += kBlock) f(i, kBlock);
  if (i < cols) f(i, cols - i);
}

template <typename D>
inline __attribute__((always_inline)) void add_block(const void* src, size_t at, float* acc, size_t n) {
  float next[kBlock];
  D::load(static_cast<const typename D::Elem*>(src) + at, next, n);
  for (size_t i = 0; i < n; ++i) acc[i] += next[i];
}

// y = sum + bias + residual of one row, to `out` and back to the residual.
template <typename D>
void sum_row(typename D::Elem* out, typename D::Elem* residual, const void* const* srcs, int num_srcs,
             size_t row, const NdEpilogue& e) {
  using Elem = typename D::Elem;
  for_blocks(e.cols, [&](size_t col, size_t n) {
    const size_t at = row * e.cols + col;
    float acc[kBlock];
    D::load(static_cast<const Elem*>(srcs[0]) + at, acc, n);
    for (int s = 1; s < num_srcs; ++s) add_block<D>(srcs[s], at, acc, n);
    if (e.bias != nullptr) add_block<D>(e.bias, col, acc, n);
    if (residual != nullptr) add_block<D>(residual, at, acc, n);
    if (residual != nullptr) D::store(acc, residual + at, n);
    D::store(acc, out + at, n);
  });
}

// Sum over a row of f(x), by blocks of partial sums in a fixed order.
template <typename D, typename F>
float sum_over_row(const typename D::Elem* y, size_t cols, F f) {
  float partial[kBlock] = {};
  for_blocks(cols, [&](size_t col, size_t n) {
    float x[kBlock];
    D::load(y + col, x, n);
    for (size_t i = 0; i < n; ++i) partial[i] += f(x[i]);
  });
  for (size_t half = kBlock / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) partial[i] += partial[i + half];
  return partial[0];
}

// In place: (y - mean) / deviation * weight + norm_bias; RMS norm has no mean.
template <typename D>
void norm_row(typename D::Elem* y, const NdEpilogue& e) {
  using Elem = typename D::Elem;
  const float cols = static_cast<float>(e.cols);
  const float mean =
      e.norm == ND_LAYER_NORM ? sum_over_row<D>(y, e.cols, [](float x) { return x; }) / cols : 0.0f;
  const float square = sum_over_row<D>(y, e.cols, [mean](float x) { return (x - mean) * (x - mean); }) / cols;
  const float scale = 1.0f / __builtin_sqrtf(square + e.eps);
  for_blocks(e.cols, [&](size_t col, size_t n) {
    float x[kBlock], w[kBlock];
    D::load(y + col, x, n);
    for (size_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * scale;
    if (e.weight != nullptr) {
      D::load(static_cast<const Elem*>(e.weight) + col, w, n);
      for (size_t i = 0; i < n; ++i) x[i] *= w[i];
    }
    if (e.norm_bias != nullptr) add_block<D>(e.norm_bias, col, x, n);
    D::store(x, y + col, n);
  });
}

template <typename D>
void fused_rows(void* out, void* residual, const void* const* srcs, int num_srcs, size_t rows,
                const NdEpilogue& e) {
  auto* y = static_cast<typename D::Elem*>(out);
  for (size_t row = 0; row < rows; ++row) {
    sum_row<D>(y, static_cast<typename D::Elem*>(residual), srcs, num_srcs, row, e);
    if (e.norm != ND_NO_NORM) norm_row<D>(y + row * e.cols, e);
  }
}

constexpr FusedKernel find_fused_kernel(int dtype) {
  switch (dtype) {
    case ND_F32:
      return fused_rows<Plain<float>>;
    case ND_F16:
      return fused_rows<F16>;
    case ND_BF16:
      return fused_rows<Bf16>;
    default:
      return nullptr;
  }
}
