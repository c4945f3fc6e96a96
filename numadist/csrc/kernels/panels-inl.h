// Rows times weights in panels of neighbouring columns, summed in f32. Included by panels.cpp once per ISA, whose
// kRegisters registers hold kSums vectors of kLanes sums beside the weights and a value of x. Weights are of a kind of
// vec_f32-inl.h, W: where they have 16 bits they are widened in registers.
//
// A panel is cut into blocks of inputs that stay in the first-level cache, and a block into tiles whose sums
// stay in registers. The tiles of a block fetch the next one meanwhile, line by line as it lies in memory: if
// each fetched its own columns, parts of lines, they would come half as fast. A sum of short sums is also
// more exact, and as blocks are the same for all tiles, a row's bits do not depend on the other rows.

#include "kernels/vec_f32-inl.h"

constexpr size_t kMaxRows = 6;

constexpr size_t kSums = kRegisters / 4 * 3;

// Columns of a tile, in vectors: the fewer rows, the more. A product takes f32 weights from memory as they are; those
// of 16 bits need registers too.
template <class W>
constexpr size_t vectors_for(size_t rows) {
  constexpr bool kIsWide = sizeof(typename W::Stored) == sizeof(float);
  size_t vectors = 1;
  while (2 * vectors * kLanes <= kMaxPanel && 2 * vectors * rows <= kSums &&
         (kIsWide || 2 * vectors * (rows + 1) < kRegisters))
    vectors *= 2;
  return vectors;
}

template <class W>
struct Block {
  const float* x;               // [rows][x_stride]
  const typename W::Stored* w;  // [inputs][width]
  float* sums;                  // [rows][kMaxPanel]
  size_t x_stride, width, inputs;
  const char* ahead;  // what tiles prefetch meanwhile: as many weights, in their order in memory
};

template <class W, size_t R, size_t V, bool kFetches>
inline void multiply_tile(const Block<W>& b, size_t row, size_t column) {
  constexpr size_t kAhead = kFetches ? sizeof(typename W::Stored) : 0;
  const float* x = b.x + row * b.x_stride;
  const auto* w = b.w + column;
  const char* ahead = b.ahead + column * b.inputs * kAhead;
  float* to = b.sums + row * kMaxPanel + column;
  Vec sums[R][V];
#pragma GCC unroll 6
  for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 16
    for (size_t v = 0; v < V; ++v) sums[m][v] = Vec{};
  for (size_t k = 0; k < b.inputs; ++k, w += b.width) {
#pragma GCC unroll 16
    for (size_t i = 0; i < V * kLanes * kAhead; i += kLineBytes) __builtin_prefetch(ahead + i);
    ahead += V * kLanes * kAhead;
    Vec weights[V];
#pragma GCC unroll 16
    for (size_t v = 0; v + 1 < V; v += 2) W::load_mixed(w + v * kLanes, &weights[v], &weights[v + 1]);
    if constexpr (V % 2 == 1) weights[V - 1] = W::load(w + (V - 1) * kLanes);
#pragma GCC unroll 6
    for (size_t m = 0; m < R; ++m)
#pragma GCC unroll 16
      for (size_t v = 0; v < V; ++v) sums[m][v] += x[m * b.x_stride + k] * weights[v];
  }
#pragma GCC unroll 6
  for (size_t m = 0; m < R; ++m) {
#pragma GCC unroll 16
    for (size_t v = 0; v + 1 < V; v += 2) W::sort(&sums[m][v], &sums[m][v + 1]);
#pragma GCC unroll 16
    for (size_t v = 0; v < V; ++v) {
      float* at = to + m * kMaxPanel + v * kLanes;
      store(at, load(at) + sums[m][v]);
    }
  }
}

// The columns from `column` on.
template <class W, size_t R, size_t V>
inline void multiply_columns(const Block<W>& b, size_t row, size_t column) {
  for (; column + V * kLanes <= b.width; column += V * kLanes) multiply_tile<W, R, V, true>(b, row, column);
  if constexpr (V > 1) multiply_columns<W, R, V / 2>(b, row, column);
}

template <class W, size_t R>
inline void multiply_rows(const Block<W>& b, size_t row, size_t rows) {
  if (rows == R) return multiply_columns<W, R, vectors_for<W>(R)>(b, row, 0);
  if constexpr (R > 1) multiply_rows<W, R - 1>(b, row, rows);
}

template <class W>
inline void multiply_block(const Block<W>& b, size_t rows) {
  const size_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (size_t t = 0; t < tiles; ++t) {
    const size_t row = rows * t / tiles;
    multiply_rows<W, kMaxRows>(b, row, rows * (t + 1) / tiles - row);
  }
}

// Numbers of memory to f32; what is past the last whole vector one by one.
template <class W>
inline void widen(const typename W::Stored* from, float* to, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, W::load(from + i));
  if (i == count) return;
  typename W::Stored last[kLanes] = {};
  memcpy(last, from + i, sizeof last[0] * (count - i));
  const Vec wide = W::load(last);
  memcpy(to + i, &wide, sizeof(float) * (count - i));
}

// Sums of a panel's columns, from `first` on, with the bias, rounded once.
template <class W>
inline void write_rows(const PanelCall& call, const float* sums, size_t first, size_t columns, size_t row,
                       size_t rows) {
  using Stored = typename W::Stored;
  alignas(64) float bias[kMaxPanel] = {};
  if (call.bias != nullptr) widen<W>(static_cast<const Stored*>(call.bias) + first, bias, columns);
  for (size_t m = 0; m < rows; ++m, sums += kMaxPanel) {
    Stored* y = static_cast<Stored*>(call.y) + (row + m) * call.n + first;
    size_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) W::store(y + c, load(sums + c) + load(bias + c));
    if (c == columns) continue;
    Stored last[kLanes];
    W::store(last, load(sums + c) + load(bias + c));
    memcpy(y + c, last, sizeof last[0] * (columns - c));
  }
}

// At most ND_SKINNY_ROWS rows times one panel.
template <class W>
inline void panel_rows(const PanelCall& call, size_t panel) {
  using Stored = typename W::Stored;
  constexpr bool kIsWide = sizeof(Stored) == sizeof(float);
  const auto* x = static_cast<const Stored*>(call.x);
  alignas(64) float sums[ND_SKINNY_ROWS * kMaxPanel] = {};
  alignas(64) float wide_x[kIsWide ? 1 : ND_SKINNY_ROWS * kBlockInputs];
  for (size_t k = 0; k < call.k; k += kBlockInputs) {
    const size_t inputs = call.k - k < kBlockInputs ? call.k - k : kBlockInputs;
    const auto* w = static_cast<const Stored*>(call.blob) + (panel * call.k + k) * call.width;
    const auto* ahead = reinterpret_cast<const char*>(w + inputs * call.width);
    Block<W> block = {wide_x, w, sums, kBlockInputs, call.width, inputs, ahead};
    if constexpr (kIsWide) {
      block.x = x + k;
      block.x_stride = call.k;
    } else {
      for (size_t m = 0; m < call.rows; ++m) widen<W>(x + m * call.k + k, wide_x + m * kBlockInputs, inputs);
    }
    multiply_block(block, call.rows);
  }
  const size_t first = panel * call.width;
  write_rows<W>(call, sums, first, call.n - first < call.width ? call.n - first : call.width, 0, call.rows);
}

// ---- many rows ----
// Each piece of x and of the weights is widened once for many products, into memory that the cache holds.

// Row `row` of x into `wide`, [ceil(k / kPieceInputs)][rows][kPieceInputs].
template <class W>
inline void widen_row(const PanelCall& call, float* wide, size_t row) {
  const auto* x = static_cast<const typename W::Stored*>(call.x) + row * call.k;
  for (size_t k = 0; k < call.k; k += kPieceInputs)
    widen<W>(x + k, wide + k * call.rows + row * kPieceInputs,
             call.k - k < kPieceInputs ? call.k - k : kPieceInputs);
}

constexpr size_t kTileColumns = vectors_for<F32>(kMaxRows) * kLanes;

// Inputs k to k + inputs of the columns from `first` on, by tiles of columns: [columns / kTileColumns][inputs]
// [kTileColumns]. Columns past the last panel stay as they are: their sums are never written.
template <class W>
inline void widen_weights(const PanelCall& call, size_t first, size_t k, size_t inputs, float* out) {
  const size_t end = (call.n + call.width - 1) / call.width * call.width;
  for (size_t c = 0; c < kMaxPanel && first + c < end; c += kLanes) {
    const size_t panel = (first + c) / call.width, column = (first + c) % call.width;
    const auto* w =
        static_cast<const typename W::Stored*>(call.blob) + (panel * call.k + k) * call.width + column;
    float* to = out + c / kTileColumns * inputs * kTileColumns + c % kTileColumns;
    for (size_t i = 0; i < inputs; ++i) store(to + i * kTileColumns, W::load(w + i * call.width));
  }
}

template <size_t R>
inline void multiply_last_rows(const Block<F32>& b, size_t rows) {
  if (rows == R) return multiply_tile<F32, R, kTileColumns / kLanes, false>(b, 0, 0);
  if constexpr (R > 1) multiply_last_rows<R - 1>(b, rows);
}

// Rows [begin, begin + rows), kPieceRows at most, times kMaxPanel columns from `first` on.
template <class W>
inline void multiply_piece(const PanelCall& call, const float* x, size_t first, size_t begin, size_t rows) {
  alignas(64) float sums[kPieceRows * kMaxPanel], weights[kPieceInputs * kMaxPanel];
  memset(sums, 0, sizeof(float) * rows * kMaxPanel);
  const size_t columns = call.n - first < kMaxPanel ? call.n - first : kMaxPanel;
  for (size_t k = 0; k < call.k; k += kPieceInputs) {
    const size_t inputs = call.k - k < kPieceInputs ? call.k - k : kPieceInputs;
    widen_weights<W>(call, first, k, inputs, weights);
    for (size_t c = 0; c < columns; c += kTileColumns)
      for (size_t m = 0; m < rows; m += kMaxRows)
        multiply_last_rows<kMaxRows>({x + k * call.rows + (begin + m) * kPieceInputs, weights + c * inputs,
                                      sums + m * kMaxPanel + c, kPieceInputs, kTileColumns, inputs, nullptr},
                                     rows - m < kMaxRows ? rows - m : kMaxRows);
  }
  write_rows<W>(call, sums, first, columns, begin, rows);
}
