// Linear layers on a team of threads: every ISA, panels shared out, against sums in double. AMX also where
// the CPU has none, by a description of its instructions.
#include <float.h>
#include <math.h>
#include <string.h>

#include <utility>

#include "amx_tiles.h"
#include "bf16.h"
#include "harness.h"
#include "kernels/skinny_call.h"
#include "kernels/team.h"
#include "team_of_threads.h"

namespace {

using nd::bf16_of_float, nd::float_of_bf16, nd::SkinnyCall;
#include "kernels/skinny_amx-inl.h"

using Linear = std::function<void(const SkinnyCall& call, size_t width)>;

Linear by_isa(int isa) {
  return [=](const SkinnyCall& c, size_t width) {
    CHECK_EQ(nd_skinny_linear(isa, c.x, c.blob, c.bias, c.y, c.rows, c.n, c.k, width), 0, "isa %d", isa);
  };
}

void by_described_amx(const SkinnyCall& call, size_t width) {
  if (call.rows == 0) return;  // nor does nd_skinny_linear ask a kernel then
  const auto kernel = width == 32 ? multiply_panels<DescribedTiles, 32> : multiply_panels<DescribedTiles, 64>;
  nd::for_shares((call.n + width - 1) / width, [&](size_t begin, size_t end) {
    kernel(call, begin, end);
    CHECK_EQ(DescribedTiles::released(), true, "panels %zu to %zu", begin, end);
  });
}

// As bf16: their sums are exact, whatever the order.
std::vector<uint16_t> small_integers(size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> digit(-2, 2);
  std::vector<uint16_t> values(count);
  for (auto& v : values) v = bf16_of_float(static_cast<float>(digit(random)));
  return values;
}

// Sizes are exact, so that ASAN sees a read or write beyond an end.
void check(const char* name, const Linear& linear, size_t rows, size_t n, size_t k, size_t width,
           std::mt19937& random) {
  const auto x = small_integers(rows * k, random), bias = small_integers(n, random);
  std::vector<uint32_t> blob((n + width - 1) / width * width * k / 2);
  const auto weights = small_integers(2 * blob.size(), random);
  memcpy(blob.data(), weights.data(), 4 * blob.size());
  std::vector<uint16_t> y(rows * n, 0x7fff);
  linear({x.data(), blob.data(), bias.data(), y.data(), rows, n, k}, width);
  for (size_t m = 0; m < rows; ++m)
    for (size_t c = 0; c < n; ++c) {
      double sum = float_of_bf16(bias[c]);
      const uint16_t* w = weights.data() + c / width * width * k + c % width * 2;
      for (size_t i = 0; i < k; ++i)
        sum += double(float_of_bf16(x[m * k + i])) * float_of_bf16(w[i / 2 * width * 2 + i % 2]);
      // Sums below 256 are exact in bf16 too.
      if (fabs(sum) < 256)
        CHECK_EQ(float_of_bf16(y[m * n + c]), sum,
                 "%s, panels of %zu, row %zu of %zu, column %zu of %zu, k %zu", name, width, m, rows, c, n,
                 k);
    }
}

int check_all(const char* name, const Linear& linear, std::mt19937& random) {
  int cases = 0;
  for (size_t width : {32, 64})
    for (size_t rows = 0; rows <= ND_SKINNY_ROWS; ++rows)
      for (size_t n : {1, 32, 63, 65, 200})
        for (size_t k : {2, 64, 94}) check(name, linear, rows, n, k, width, random), ++cases;
  return cases;
}

// One product of tiles whose sums are exact in any order. Denormals count as zeros, among the factors (row 1,
// column 1) and as products (row 2, column 2).
template <class Tiles>
void check_tiles(const char* name, std::mt19937& random) {
  constexpr size_t kRows = 5, kPairs = 16, kColumns = 16, kDenormal = 0x0055, kLeastNormal = 0x0080;
  auto a = small_integers(kRows * 2 * kPairs, random), b = small_integers(kPairs * 2 * kColumns, random);
  float sums[kRows][kColumns] = {};
  for (size_t i = 0; i < 2 * kPairs; ++i) {
    a[2 * kPairs + i] = kDenormal, a[4 * kPairs + i] = bf16_of_float(0.5f);
    uint16_t* row = &b[i / 2 * 2 * kColumns + i % 2];
    row[2] = kDenormal, row[4] = kLeastNormal, row[6] = bf16_of_float(0x1p100f);
  }
  float wanted[kRows][kColumns];
  for (size_t m = 0; m < kRows; ++m)
    for (size_t n = 0; n < kColumns; ++n) {
      sums[m][n] = n < 4 ? 0 : static_cast<float>(n) - 8;
      double sum = sums[m][n];
      for (size_t i = 0; i < 2 * kPairs; ++i) {
        const auto value = [](uint16_t bits) { return bits == kDenormal ? 0 : double(float_of_bf16(bits)); };
        const double product = value(a[m * 2 * kPairs + i]) * value(b[(i / 2 * kColumns + n) * 2 + i % 2]);
        sum += fabs(product) < FLT_MIN ? 0 : product;
      }
      wanted[m][n] = static_cast<float>(sum);
    }
  Tiles::configure(shapes_for(kRows));
  Tiles::template load<0>(sums, kTileBytes);
  Tiles::template load<4>(a.data(), kTileBytes);
  Tiles::template load<5>(b.data(), kTileBytes);
  Tiles::template multiply<0, 4, 5>();
  Tiles::template store<0>(sums, kTileBytes);
  Tiles::release();
  for (size_t m = 0; m < kRows; ++m)
    for (size_t n = 0; n < kColumns; ++n)
      CHECK_EQ(sums[m][n] == wanted[m][n], true, "%s, row %zu, column %zu: %g, wanted %g", name, m, n,
               double(sums[m][n]), double(wanted[m][n]));
}

}  // namespace

int main() {
  const NdTeam nothing = {nullptr, nullptr, nullptr}, team = team_of_threads();
  CHECK_EQ(nd_team_use(&nothing), -EINVAL, "a team without entries");
  int threads = 0, fresh = 0;
  CHECK_EQ(nd_team_form(&threads, &fresh), 0, "alone");
  CHECK_EQ(threads, 1, "alone");
  CHECK_EQ(nd_team_use(&team), 0, "a team of %d", kThreads);
  CHECK_EQ(nd_team_form(&threads, &fresh), 0, "a team of %d", kThreads);
  CHECK_EQ(threads, kThreads, "a team of %d", kThreads);
  CHECK_EQ(fresh, kThreads - 1, "the caller was counted before");
  std::mt19937 random(6);
  check_tiles<DescribedTiles>("described tiles", random);
  int cases = check_all("described AMX", by_described_amx, random);
  for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa) {
#if defined(__x86_64__)
    if (strcmp(nd_isa_name(isa), "amx_bf16") == 0) check_tiles<AmxTiles>("AMX tiles", random);
#endif
    cases += check_all(nd_isa_name(isa), by_isa(isa), random);
  }
  printf("ok, %d cases\n", cases);
}
