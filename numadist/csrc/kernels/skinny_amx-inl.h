// A few rows times packed bf16 weights with AMX: all rows at once, whose number costs nothing while weights
// come from memory. Included once by skinny.cpp. The tests include it too, with a description in C++ in place
// of AmxTiles, so that every CPU checks all but the instructions.
//
// Tiles 0 to 3 are sums of 16 columns each, 4 a block of x, 5 to 7 weights, in turn: none waits for a product.

constexpr size_t kTileRows = 16, kTileColumns = 16;  // a column: an f32, or a pair of bf16
constexpr size_t kTileBytes = 4 * kTileColumns;      // of a row

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];  // of 8 tiles; the others do not exist
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "an operand of 64 bytes");

#if defined(__x86_64__)
// The instructions. Not GCC's intrinsics: their numbers of tiles cannot be template parameters, and they do
// not say that a load reads memory.
struct AmxTiles {
  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }
  template <size_t T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <size_t T>
  static void load(const void* rows, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(T) : "memory");
  }
  template <size_t T>
  static void store(void* rows, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(T) : "memory");
  }
  // sums += a b
  template <size_t Sums, size_t A, size_t B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
  }
};
#endif

inline TileShapes shapes_for(size_t rows) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (size_t tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = kTileBytes;
    shapes.rows[tile] = static_cast<uint8_t>(tile < 5 ? rows : kTileRows);
  }
  return shapes;
}

// x times a block of weights onto the sums. A panel's tiles of columns lie side by side, panels `apart`.
template <class Tiles, size_t Width, size_t... T>
inline void add_products(const uint32_t* w, size_t apart, std::index_sequence<T...>) {
  constexpr size_t kInPanel = Width / kTileColumns;
  ((Tiles::template load<5 + T % 3>(w + T / kInPanel * apart + T % kInPanel * kTileColumns, 4 * Width),
    Tiles::template multiply<T, 4, 5 + T % 3>()),
   ...);
}

template <class Tiles, size_t... T>
inline void zero_sums(std::index_sequence<T...>) {
  (Tiles::template zero<T>(), ...);
}

template <class Tiles, size_t... T>
inline void store_sums(float* sums, std::index_sequence<T...>) {
  (Tiles::template store<T>(sums + T * kTileColumns, sizeof...(T) * kTileBytes), ...);
}

// With the bias, rounded, of all rows.
template <size_t Columns>
inline void write_result(const SkinnyCall& call, const float* sums, size_t first) {
  const size_t columns = call.n - first < Columns ? call.n - first : Columns;
  float bias[Columns] = {};
  for (size_t c = 0; c < columns && call.bias != nullptr; ++c) bias[c] = float_of_bf16(call.bias[first + c]);
  for (size_t m = 0; m < call.rows; ++m)
    for (size_t c = 0; c < columns; ++c)
      call.y[m * call.n + first + c] = bf16_of_float(sums[m * Columns + c] + bias[c]);
}

// Inputs that do not fill a block are padded with zeros, so that nothing behind x or the weights is read.
struct alignas(64) LastBlock {
  uint16_t x[kTileRows][2 * kTileColumns];
};

// Panels whose columns fill the tiles of sums: one, or two narrow ones.
template <class Tiles, size_t Width, size_t Panels>
inline void multiply_together(const SkinnyCall& call, const LastBlock& last, size_t panel) {
  constexpr size_t kColumns = Panels * Width;
  constexpr auto kEach = std::make_index_sequence<kColumns / kTileColumns>();
  const size_t pairs = call.k / 2, apart = pairs * Width;
  const uint32_t* w = call.blob + panel * apart;
  zero_sums<Tiles>(kEach);
  size_t k = 0;
  for (; k + kTileRows <= pairs; k += kTileRows) {
    // A block ahead. The one after a panel's last is the first of the panel that this one's tiles take next.
    const size_t next = k + kTileRows < pairs ? (k + kTileRows) * Width : Panels * apart;
    for (size_t p = 0; p < Panels; ++p)
      for (size_t i = 0; i < kTileRows * Width; i += 16) __builtin_prefetch(w + p * apart + next + i);
    Tiles::template load<4>(call.x + 2 * k, 2 * call.k);
    add_products<Tiles, Width>(w + k * Width, apart, kEach);
  }
  if (k < pairs) {
    alignas(64) uint32_t padded[Panels][kTileRows * Width] = {};
    for (size_t p = 0; p < Panels; ++p) memcpy(padded[p], w + p * apart + k * Width, 4 * (pairs - k) * Width);
    Tiles::template load<4>(last.x, kTileBytes);
    add_products<Tiles, Width>(padded[0], kTileRows * Width, kEach);
  }
  alignas(64) float sums[kTileRows * kColumns];
  store_sums<Tiles>(sums, kEach);
  write_result<kColumns>(call, sums, panel * Width);
}

// Tiles are released at the end of a thread's share: its next user may want other shapes, and a thread that
// holds none is cheaper to switch.
template <class Tiles, size_t Width>
void multiply_panels(const SkinnyCall& call, size_t begin, size_t end) {
  if (begin == end) return;
  LastBlock last = {};
  const size_t filled = call.k % 32;
  for (size_t m = 0; m < call.rows; ++m) memcpy(last.x[m], call.x + (m + 1) * call.k - filled, 2 * filled);
  Tiles::configure(shapes_for(call.rows));
  constexpr size_t kTogether = 64 / Width;
  size_t panel = begin;
  for (; panel + kTogether <= end; panel += kTogether)
    multiply_together<Tiles, Width, kTogether>(call, last, panel);
  for (; panel < end; ++panel) multiply_together<Tiles, Width, 1>(call, last, panel);
  Tiles::release();
}
