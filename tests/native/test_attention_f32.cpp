// nd_attention in f32 by every ISA against plain loops in double, over random sizes and masks. Buffers end
// where the tensors end, so a kernel that reads past a row is caught.
#include <errno.h>
#include <math.h>

#include <algorithm>

#include "harness.h"

namespace {

int pick(std::mt19937& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

std::vector<float> draw(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

struct Case {
  NdAttention sizes;
  std::vector<float> q, k, v, added;
  std::vector<uint8_t> seen;

  const void* mask() const {
    if (sizes.mask_kind == ND_MASK_NONE) return nullptr;
    return sizes.mask_kind == ND_MASK_BOOL ? static_cast<const void*>(seen.data()) : added.data();
  }
};

void set_strides(ptrdiff_t stride[3], int heads, int rows, int dim) {
  stride[0] = ptrdiff_t(heads) * rows * dim;
  stride[1] = ptrdiff_t(rows) * dim;
  stride[2] = dim;
}

Case draw_case(int round, std::mt19937& random) {
  Case c = {};
  NdAttention& a = c.sizes;
  a.batch = pick(random, 1, 2);
  a.kv_heads = pick(random, 1, 2);
  a.heads = a.kv_heads * pick(random, 1, 3);
  a.queries = round % 2 ? 1 : pick(random, 2, 110);
  a.keys = pick(random, 1, a.queries == 1 ? 900 : 150);
  a.head_dim = 16 * pick(random, 1, 9);
  a.causal = round % 5 == 4;
  a.scale = 1 / sqrtf(float(a.head_dim));
  a.mask_kind = round % 3 == 0 ? ND_MASK_NONE : round % 3 == 1 ? ND_MASK_BOOL : ND_MASK_F32;
  set_strides(a.q_stride, a.heads, a.queries, a.head_dim);
  set_strides(a.out_stride, a.heads, a.queries, a.head_dim);
  set_strides(a.k_stride, a.kv_heads, a.keys, a.head_dim);
  set_strides(a.v_stride, a.kv_heads, a.keys, a.head_dim);
  a.mask_stride[0] = ptrdiff_t(a.queries) * a.keys;  // one for all heads
  a.mask_stride[2] = a.keys;
  c.q = draw(a.batch * a.q_stride[0], random);
  c.k = draw(a.batch * a.k_stride[0], random);
  c.v = draw(a.batch * a.v_stride[0], random);
  c.added = draw(size_t(a.batch) * a.queries * a.keys, random);
  for (size_t i = 0; i < c.added.size(); ++i) c.seen.push_back(pick(random, 0, 3) == 0);
  for (float& x : c.added)
    if (pick(random, 0, 3) == 0) x = -INFINITY;
  return c;
}

// One output row in double.
std::vector<double> wanted_row(const Case& c, int b, int h, int i) {
  const NdAttention& a = c.sizes;
  const int g = h / (a.heads / a.kv_heads);
  const float* q = c.q.data() + b * a.q_stride[0] + h * a.q_stride[1] + i * a.q_stride[2];
  const ptrdiff_t masks = (ptrdiff_t(b) * a.queries + i) * a.keys;
  std::vector<double> out(a.head_dim);
  double sum = 0;
  for (int j = 0; j < (a.causal ? std::min(i + 1, a.keys) : a.keys); ++j) {
    const ptrdiff_t at = b * a.k_stride[0] + g * a.k_stride[1] + j * a.k_stride[2];
    double score = 0;
    for (int d = 0; d < a.head_dim; ++d) score += double(q[d]) * c.k[at + d];
    score *= a.scale;
    if (a.mask_kind == ND_MASK_F32) score += c.added[masks + j];
    const bool hidden = a.mask_kind == ND_MASK_BOOL && !c.seen[masks + j];
    const double weight = hidden ? 0 : exp(score);
    sum += weight;
    for (int d = 0; d < a.head_dim; ++d) out[d] += weight * c.v[at + d];
  }
  for (double& x : out) x = sum == 0 ? 0 : x / sum;
  return out;
}

double worst_error(int isa, const Case& c) {
  const NdAttention& a = c.sizes;
  std::vector<float> out(c.q.size(), 1e9f);
  std::vector<char> scratch(nd_attention_scratch(isa, ND_F32, &a));
  CHECK_EQ(
      nd_attention(isa, ND_F32, &a, c.q.data(), c.k.data(), c.v.data(), c.mask(), out.data(), scratch.data()),
      0, "%s", nd_isa_name(isa));
  double worst = 0;
  for (int b = 0; b < a.batch; ++b)
    for (int h = 0; h < a.heads; ++h)
      for (int i = 0; i < a.queries; ++i) {
        const auto wanted = wanted_row(c, b, h, i);
        const float* row = out.data() + b * a.out_stride[0] + h * a.out_stride[1] + i * a.out_stride[2];
        for (int d = 0; d < a.head_dim; ++d) worst = std::max(worst, fabs(row[d] - wanted[d]));
      }
  return worst;
}

}  // namespace

int main() {
  std::mt19937 random(9);
  double worst = 0;
  for (int round = 0; round < 30; ++round) {
    const Case c = draw_case(round, random);
    for (int isa = 0; nd_isa_name(isa) != nullptr; ++isa) worst = std::max(worst, worst_error(isa, c));
  }
  Case c = draw_case(0, random);
  c.sizes.head_dim = 24;
  CHECK_EQ(nd_attention(0, ND_F32, &c.sizes, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), -EINVAL,
           "heads of 24");
  CHECK_EQ(nd_attention(0, ND_F64, &c.sizes, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), -EINVAL,
           "f64");
  printf("worst error %.1e\n", worst);
  return worst < 3e-6 ? 0 : 1;  // values up to 4 of 24 bits each
}
