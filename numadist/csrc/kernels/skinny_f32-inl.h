// A few rows times packed f32 weights. Included by skinny_f32.cpp once per ISA, whose registers hold kSums
// vectors of kLanes sums beside the weights and a value of x.
//
// A panel is cut into blocks of inputs that stay in the first-level cache, and a block into tiles whose sums
// stay in registers. The tiles of a block fetch the next one meanwhile, line by line as it lies in memory: if
// each fetched its own columns, parts of lines, they would come half as fast. A sum of short sums is also
// more exact, and as blocks are the same for all tiles, a row's bits do not depend on the other rows.

#include "kernels/vec_f32-inl.h"

constexpr size_t kMaxRows = 6;

// Columns of a tile, in vectors: the fewer rows, the more.
constexpr size_t vectors_for(size_t rows) {
  size_t vectors = 1;
  while (2 * vectors * rows <= kSums && 2 * vectors * kLanes <= kMaxPanel) vectors *= 2;
  return vectors;
}

struct Block {
  const float* x;  // [rows][x_stride]
  const float* w;  // [inputs][width]
  float* sums;     // [rows][kMaxPanel]
  size_t x_stride, width, inputs;
  const float* ahead;  // what the tiles prefetch meanwhile: as many weights, in their order in memory
};

template <size_t R, size_t V>
inline void multiply_tile(const Block& b, size_t row, size_t column) {
  const float* x = b.x + row * b.x_stride;
  const float* w = b.w + column;
  const float* ahead = b.ahead + column * b.inputs;
  float* to = b.sums + row * kMaxPanel + column;
  Vec sums[R][V];
#pragma GCC unroll 6
  for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 16
    for (size_t v = 0; v < V; ++v) sums[m][v] = Vec{};
  for (size_t k = 0; k < b.inputs; ++k, w += b.width, ahead += V * kLanes) {
#pragma GCC unroll 16
    for (size_t v = 0; v < V; v += kLine / kLanes) __builtin_prefetch(ahead + v * kLanes);
    Vec weights[V];
#pragma GCC unroll 16
    for (size_t v = 0; v < V; ++v) weights[v] = load(w + v * kLanes);
#pragma GCC unroll 6
    for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 16
      for (size_t v = 0; v < V; ++v) sums[m][v] += x[m * b.x_stride + k] * weights[v];
  }
#pragma GCC unroll 6
  for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 16
    for (size_t v = 0; v < V; ++v) {
      float* at = to + m * kMaxPanel + v * kLanes;
      store(at, load(at) + sums[m][v]);
    }
}

// The columns from `column` on.
template <size_t R, size_t V>
inline void multiply_columns(const Block& b, size_t row, size_t column) {
  for (; column + V * kLanes <= b.width; column += V * kLanes) multiply_tile<R, V>(b, row, column);
  if constexpr (V > 1) multiply_columns<R, V / 2>(b, row, column);
}

template <size_t R>
inline void multiply_rows(const Block& b, size_t row, size_t rows) {
  if (rows == R) return multiply_columns<R, vectors_for(R)>(b, row, 0);
  if constexpr (R > 1) multiply_rows<R - 1>(b, row, rows);
}

inline void panel_rows(const SkinnyF32& call, size_t panel) {
  const size_t tiles = (call.rows + kMaxRows - 1) / kMaxRows;
  alignas(64) float sums[ND_SKINNY_ROWS * kMaxPanel] = {};
  for (size_t k = 0; k < call.k; k += kBlockInputs) {
    const size_t inputs = call.k - k < kBlockInputs ? call.k - k : kBlockInputs;
    const float* w = call.blob + (panel * call.k + k) * call.width;
    const Block block = {call.x + k, w, sums, call.k, call.width, inputs, w + inputs * call.width};
    for (size_t t = 0; t < tiles; ++t) {
      const size_t row = call.rows * t / tiles;
      multiply_rows<kMaxRows>(block, row, call.rows * (t + 1) / tiles - row);
    }
  }
  const size_t first = panel * call.width;
  const size_t columns = call.n - first < call.width ? call.n - first : call.width;
  for (size_t m = 0; m < call.rows; ++m)
    for (size_t c = 0; c < columns; ++c) {
      const float bias = call.bias == nullptr ? 0 : call.bias[first + c];
      call.y[m * call.n + first + c] = sums[m * kMaxPanel + c] + bias;
    }
}
