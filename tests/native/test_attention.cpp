// nd_attention in bf16 by every ISA against plain loops in double, over random sizes, strides and masks: for the
// sanitizers' eyes.
// Buffers end where the tensors end, so a kernel that reads past a row is caught.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "nd_core.h"
#include "team_of_threads.h"

namespace {

std::mt19937 random_bits(20261130);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }

double value_of(uint16_t bf16) {
  const uint32_t bits = uint32_t(bf16) << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

std::vector<uint16_t> random_bf16(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> out(count);
  for (uint16_t& x : out) {
    const float f = normal(random_bits);
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    x = uint16_t(bits >> 16);
  }
  return out;
}

void set_strides(ptrdiff_t stride[3], int heads, int rows, int dim) {
  stride[0] = ptrdiff_t(heads) * rows * dim;
  stride[1] = ptrdiff_t(rows) * dim;
  stride[2] = dim;
}

struct Attention : NdAttention {
  const void *q, *k, *v, *mask;
};

// One output row in double.
std::vector<double> expected_row(const Attention& a, int b, int h, int i) {
  const int g = h / (a.heads / a.kv_heads);
  const auto row = [&](const void* x, const ptrdiff_t s[3], int head, int r) {
    return static_cast<const uint16_t*>(x) + b * s[0] + head * s[1] + r * s[2];
  };
  const auto* mask = static_cast<const uint8_t*>(a.mask);
  std::vector<double> weight(a.keys), out(a.head_dim);
  double sum = 0;
  for (int j = 0; j < a.keys; ++j) {
    if (a.causal && j > i) continue;
    if (mask && !mask[b * a.mask_stride[0] + h * a.mask_stride[1] + i * a.mask_stride[2] + j]) continue;
    double score = 0;
    for (int d = 0; d < a.head_dim; ++d)
      score += value_of(row(a.q, a.q_stride, h, i)[d]) * value_of(row(a.k, a.k_stride, g, j)[d]);
    sum += weight[j] = exp(score * a.scale);
  }
  for (int j = 0; j < a.keys; ++j)
    for (int d = 0; d < a.head_dim && weight[j] > 0; ++d)
      out[d] += weight[j] / sum * value_of(row(a.v, a.v_stride, g, j)[d]);
  return out;
}

double worst_error(int round) {
  Attention a = {};
  a.batch = pick(1, 6);  // of many heads a thread packs whole ones
  a.kv_heads = pick(1, 3);
  a.heads = a.kv_heads * pick(1, 3);
  a.queries = round % 2 ? 1 : pick(1, 110);
  a.keys = pick(1, a.queries == 1 ? 900 : 150);  // of one query: several ranges
  a.head_dim = 16 * pick(1, 8);
  a.causal = round % 3 == 0;
  a.scale = 1 / sqrtf(float(a.head_dim));
  set_strides(a.q_stride, a.heads, a.queries, a.head_dim);
  set_strides(a.out_stride, a.heads, a.queries, a.head_dim);
  set_strides(a.k_stride, a.kv_heads, a.keys, a.head_dim);
  set_strides(a.v_stride, a.kv_heads, a.keys, a.head_dim);
  const auto q = random_bf16(a.batch * a.q_stride[0]), k = random_bf16(a.batch * a.k_stride[0]);
  const auto v = random_bf16(a.batch * a.v_stride[0]);
  std::vector<uint16_t> out(q.size());
  std::vector<uint8_t> mask(size_t(a.queries) * a.keys);
  for (uint8_t& x : mask) x = pick(0, 3) == 0;
  if (round % 3 == 1) {
    a.mask = mask.data();
    a.mask_kind = ND_MASK_BOOL;
    a.mask_stride[2] = a.keys;  // one for all batches and heads
  }
  a.q = q.data(), a.k = k.data(), a.v = v.data();
  double worst = 0;
  for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa) {
    std::vector<char> scratch(nd_attention_scratch(isa, ND_BF16, &a));
    std::fill(out.begin(), out.end(), uint16_t(0xffff));  // NaN
    if (nd_attention(isa, ND_BF16, &a, a.q, a.k, a.v, a.mask, out.data(), scratch.data()) != 0) return 1e9;
    for (int b = 0; b < a.batch; ++b)
      for (int h = 0; h < a.heads; ++h)
        for (int i = 0; i < a.queries; ++i) {
          const auto want = expected_row(a, b, h, i);
          const uint16_t* got = out.data() + b * a.out_stride[0] + h * a.out_stride[1] + i * a.out_stride[2];
          for (int d = 0; d < a.head_dim; ++d) {
            const double error = fabs(value_of(got[d]) - want[d]);
            worst = error <= worst ? worst : std::isnan(error) ? 1e9 : error;
          }
        }
  }
  return worst;
}

}  // namespace

int main(int, char** argv) {
  const int rounds = atoi(argv[1]);
  const NdTeam team = team_of_threads();
  if (nd_team_use(&team) != 0) return 1;
  double worst = 0;
  for (int round = 0; round < rounds; ++round) worst = std::max(worst, worst_error(round));
  printf("worst error %.4f\n", worst);
  return worst < 0.03 ? 0 : 1;  // values up to 4, weights and results rounded to 8 bits
}
