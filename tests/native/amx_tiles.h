// AMX tiles in plain C++, as Intel's manual describes the instructions, for CPUs that have none. What would
// be a fault of the CPU ends the test.
#ifndef ND_TESTS_AMX_TILES_H
#define ND_TESTS_AMX_TILES_H

#include <math.h>
#include <string.h>

#include "harness.h"

struct DescribedTiles {
  struct Tile {
    size_t rows, row_bytes;  // both 0: the tile is not configured
    char row[16][64];
  };
  static inline thread_local Tile tiles[8];

  // LDTILECFG; it clears all tiles.
  template <class Shapes>
  static void configure(const Shapes& shapes) {
    static_assert(sizeof(Shapes) == 64);
    unsigned char bytes[64];
    memcpy(bytes, &shapes, sizeof bytes);
    CHECK_EQ(bytes[0], 1, "palette");
    memset(tiles, 0, sizeof tiles);
    bool used[64] = {true};
    for (size_t t = 0; t < 8; ++t) {
      uint16_t row_bytes;
      memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
      tiles[t].rows = bytes[48 + t], tiles[t].row_bytes = row_bytes;
      used[16 + 2 * t] = used[17 + 2 * t] = used[48 + t] = true;
      CHECK_EQ(tiles[t].rows <= 16 && row_bytes <= 64 && (tiles[t].rows == 0) == (row_bytes == 0), true,
               "tile %zu of %zu rows, %d bytes each", t, tiles[t].rows, row_bytes);
    }
    for (size_t i = 0; i < 64; ++i) CHECK_EQ(used[i] || bytes[i] == 0, true, "byte %zu is reserved", i);
  }

  // TILERELEASE
  static void release() { memset(tiles, 0, sizeof tiles); }
  static bool released() {
    for (const Tile& tile : tiles)
      if (tile.rows != 0) return false;
    return true;
  }

  template <size_t T>
  static Tile& configured() {
    static_assert(T < 8);
    CHECK_EQ(tiles[T].rows > 0, true, "tile %zu is not configured", T);
    return tiles[T];
  }

  // TILEZERO
  template <size_t T>
  static void zero() {
    memset(configured<T>().row, 0, sizeof Tile::row);
  }

  // TILELOADD; the rest of the tile is cleared.
  template <size_t T>
  static void load(const void* rows, size_t stride) {
    Tile& tile = configured<T>();
    memset(tile.row, 0, sizeof tile.row);
    for (size_t r = 0; r < tile.rows; ++r)
      memcpy(tile.row[r], static_cast<const char*>(rows) + r * stride, tile.row_bytes);
  }

  // TILESTORED
  template <size_t T>
  static void store(void* rows, size_t stride) {
    const Tile& tile = configured<T>();
    for (size_t r = 0; r < tile.rows; ++r)
      memcpy(static_cast<char*>(rows) + r * stride, tile.row[r], tile.row_bytes);
  }

  // TDPBF16PS: the even and the odd products of a row and a column are summed apart, then together, then onto
  // the old sum.
  template <size_t Sums, size_t A, size_t B>
  static void multiply() {
    static_assert(Sums != A && Sums != B && A != B);
    Tile &sums = configured<Sums>(), &a = configured<A>(), &b = configured<B>();
    CHECK_EQ(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows, true,
             "%zu x %zu bytes += %zu x %zu bytes times %zu x %zu bytes", sums.rows, sums.row_bytes, a.rows,
             a.row_bytes, b.rows, b.row_bytes);
    for (size_t m = 0; m < a.rows; ++m)
      for (size_t n = 0; n < b.row_bytes / 4; ++n) {
        float even = 0, odd = 0, sum;
        for (size_t k = 0; k < b.rows; ++k) {
          even = normal(fmaf(bf16(a.row[m] + 4 * k), bf16(b.row[k] + 4 * n), even));
          odd = normal(fmaf(bf16(a.row[m] + 4 * k + 2), bf16(b.row[k] + 4 * n + 2), odd));
        }
        memcpy(&sum, sums.row[m] + 4 * n, 4);
        sum = normal(normal(sum) + normal(even + odd));
        memcpy(sums.row[m] + 4 * n, &sum, 4);
      }
  }

 private:
  // Denormals are zeros, read and written.
  static float normal(float f) { return fpclassify(f) == FP_SUBNORMAL ? copysignf(0, f) : f; }

  static float bf16(const char* bytes) {
    uint16_t high;
    memcpy(&high, bytes, 2);
    const uint32_t bits = static_cast<uint32_t>(high) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return normal(f);
  }
};

#endif
