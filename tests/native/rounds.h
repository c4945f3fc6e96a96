// One round of each collective, every element checked against what the ranks put in.
#ifndef ND_TESTS_ROUNDS_H
#define ND_TESTS_ROUNDS_H

#include <string.h>

#include "harness.h"

// What rank r puts at element i of round n: small integers, so that sums are exact in any order.
inline int value(int round, int rank, size_t i) {
  return static_cast<int>((i * 7 + static_cast<size_t>(round) * 13) % 61) + rank;
}

inline int sum_of_values(int round, int world, size_t i) {
  return world * value(round, 0, i) + world * (world - 1) / 2;
}

struct Round {
  NdGroup* group;
  int rank, world, number;
  size_t count;   // elements of int32
  size_t offset;  // of the tensor in its buffer, a multiple of 4
  int root;
};

inline void all_reduce_i32(const Round& r, bool in_place) {
  Buffer in(r.count * 4, r.offset), out(r.count * 4, 64 - r.offset);
  for (size_t i = 0; i < r.count; ++i) in.as<int32_t>()[i] = value(r.number, r.rank, i);
  int32_t* result = in_place ? in.as<int32_t>() : out.as<int32_t>();
  CHECK_EQ(nd_all_reduce(r.group, in.data(), result, r.count, ND_I32, ND_SUM), 0, "round %d", r.number);
  for (size_t i = 0; i < r.count; ++i)
    CHECK_EQ(result[i], sum_of_values(r.number, r.world, i), "rank %d round %d element %zu of %zu", r.rank,
             r.number, i, r.count);
  in.check_guards("all_reduce");
  out.check_guards("all_reduce");
}

inline void all_reduce_bf16(const Round& r) {
  const size_t count = r.count * 2;
  Buffer x(count * 2, r.offset);
  const auto bf16 = [](float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return static_cast<uint16_t>(bits >> 16);
  };
  for (size_t i = 0; i < count; ++i)
    x.as<uint16_t>()[i] = bf16(static_cast<float>(value(r.number, r.rank, i)));
  CHECK_EQ(nd_all_reduce(r.group, x.data(), x.data(), count, ND_BF16, ND_SUM), 0, "round %d", r.number);
  for (size_t i = 0; i < count; ++i) {
    const int sum = sum_of_values(r.number, r.world, i);  // below 256, so exact in bf16
    if (sum <= 256)
      CHECK_EQ(x.as<uint16_t>()[i], bf16(static_cast<float>(sum)), "rank %d round %d element %zu of %zu",
               r.rank, r.number, i, count);
  }
  x.check_guards("all_reduce bf16");
}

inline void all_gather(const Round& r) {
  Buffer in(r.count * 4, r.offset);
  for (size_t i = 0; i < r.count; ++i) in.as<int32_t>()[i] = value(r.number, r.rank, i);
  std::vector<Buffer> out(r.world, Buffer(r.count * 4, 64 - r.offset));
  std::vector<void*> outs;
  for (auto& b : out) outs.push_back(b.data());
  CHECK_EQ(nd_all_gather(r.group, in.data(), outs.data(), r.count * 4, ND_I32), 0, "round %d", r.number);
  for (int p = 0; p < r.world; ++p) {
    for (size_t i = 0; i < r.count; ++i)
      CHECK_EQ(out[p].as<int32_t>()[i], value(r.number, p, i), "rank %d round %d from %d", r.rank, r.number,
               p);
    out[p].check_guards("all_gather");
  }
}

inline void reduce_scatter(const Round& r) {
  std::vector<Buffer> in(r.world, Buffer(r.count * 4, r.offset));
  std::vector<const void*> ins;
  for (int p = 0; p < r.world; ++p) {
    for (size_t i = 0; i < r.count; ++i) in[p].as<int32_t>()[i] = value(r.number + p, r.rank, i);
    ins.push_back(in[p].data());
  }
  Buffer out(r.count * 4, 64 - r.offset);
  CHECK_EQ(nd_reduce_scatter(r.group, ins.data(), out.data(), r.count, ND_I32, ND_SUM), 0, "round %d",
           r.number);
  for (size_t i = 0; i < r.count; ++i)
    CHECK_EQ(out.as<int32_t>()[i], sum_of_values(r.number + r.rank, r.world, i),
             "rank %d round %d element %zu", r.rank, r.number, i);
  out.check_guards("reduce_scatter");
}

inline void broadcast(const Round& r) {
  Buffer x(r.count * 4, r.offset);
  for (size_t i = 0; i < r.count; ++i) x.as<int32_t>()[i] = value(r.number, r.rank, i);
  CHECK_EQ(nd_broadcast(r.group, x.data(), r.count * 4, ND_I32, r.root), 0, "round %d", r.number);
  for (size_t i = 0; i < r.count; ++i)
    CHECK_EQ(x.as<int32_t>()[i], value(r.number, r.root, i), "rank %d round %d root %d", r.rank, r.number,
             r.root);
  x.check_guards("broadcast");
}

inline void scatter_then_gather(const Round& r) {
  std::vector<Buffer> in(r.world, Buffer(r.count * 4, r.offset)), back = in;
  std::vector<const void*> ins;
  std::vector<void*> backs;
  for (int p = 0; p < r.world; ++p) {
    for (size_t i = 0; i < r.count; ++i) in[p].as<int32_t>()[i] = value(r.number, p, i);
    ins.push_back(in[p].data());
    backs.push_back(back[p].data());
  }
  Buffer mine(r.count * 4, 0);
  CHECK_EQ(nd_scatter(r.group, ins.data(), mine.data(), r.count * 4, ND_I32, r.root), 0, "round %d",
           r.number);
  for (size_t i = 0; i < r.count; ++i)
    CHECK_EQ(mine.as<int32_t>()[i], value(r.number, r.rank, i), "rank %d round %d", r.rank, r.number);
  CHECK_EQ(nd_gather(r.group, mine.data(), backs.data(), r.count * 4, ND_I32, r.root), 0, "round %d",
           r.number);
  for (int p = 0; r.rank == r.root && p < r.world; ++p) {
    CHECK_EQ(memcmp(back[p].data(), in[p].data(), r.count * 4), 0, "round %d from %d", r.number, p);
    back[p].check_guards("gather");
  }
}

inline void reduce(const Round& r) {
  Buffer x(r.count * 4, r.offset);
  for (size_t i = 0; i < r.count; ++i) x.as<int32_t>()[i] = value(r.number, r.rank, i);
  CHECK_EQ(nd_reduce(r.group, x.data(), x.data(), r.count, ND_I32, ND_MAX, r.root), 0, "round %d", r.number);
  for (size_t i = 0; i < r.count; ++i)
    CHECK_EQ(x.as<int32_t>()[i], value(r.number, r.rank == r.root ? r.world - 1 : r.rank, i),
             "rank %d round %d root %d", r.rank, r.number, r.root);
}

// Rank s sends (s + 2d) mod 5 times a fifth of the bytes to rank d.
inline void all_to_all(const Round& r) {
  const auto size = [&](int from, int to) {
    return static_cast<size_t>((from + 2 * to) % 5) * (r.count / 5) * 4;
  };
  std::vector<Buffer> in, out;
  for (int p = 0; p < r.world; ++p) {
    in.emplace_back(size(r.rank, p), r.offset);
    out.emplace_back(size(p, r.rank), 64 - r.offset);
  }
  std::vector<const void*> ins;
  std::vector<void*> outs;
  std::vector<size_t> in_bytes, out_bytes;
  for (int p = 0; p < r.world; ++p) {
    for (size_t i = 0; i < size(r.rank, p) / 4; ++i) in[p].as<int32_t>()[i] = value(r.number + p, r.rank, i);
    ins.push_back(in[p].data());
    outs.push_back(out[p].data());
    in_bytes.push_back(size(r.rank, p));
    out_bytes.push_back(size(p, r.rank));
  }
  CHECK_EQ(nd_all_to_all(r.group, ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), ND_I32), 0,
           "round %d", r.number);
  for (int p = 0; p < r.world; ++p) {
    for (size_t i = 0; i < out_bytes[p] / 4; ++i)
      CHECK_EQ(out[p].as<int32_t>()[i], value(r.number + r.rank, p, i), "rank %d round %d from %d", r.rank,
               r.number, p);
    out[p].check_guards("all_to_all");
  }
}

// y = sum + bias + residual on rows; integers small enough to be exact in f32. A norm is only compared with
// the sum's own.
inline void all_reduce_fused(const Round& r) {
  const size_t cols = 1 + r.count % 700, rows = r.count / cols;
  Buffer x(rows * cols * 4, r.offset), residual(rows * cols * 4, 64 - r.offset),
      out(rows * cols * 4, r.offset);
  std::vector<float> bias(cols);
  for (size_t i = 0; i < rows * cols; ++i) {
    x.as<float>()[i] = static_cast<float>(value(r.number, r.rank, i));
    residual.as<float>()[i] = static_cast<float>(value(r.number + 1, 0, i));
  }
  for (size_t i = 0; i < cols; ++i) bias[i] = static_cast<float>(i % 5);
  NdEpilogue e{};
  e.cols = cols;
  e.bias = bias.data();
  e.residual = residual.data();
  e.norm = r.number % 2 ? ND_RMS_NORM : ND_NO_NORM;
  CHECK_EQ(nd_all_reduce_fused(r.group, x.data(), out.data(), rows, ND_F32, &e), 0, "round %d", r.number);
  for (size_t i = 0; i < rows * cols; ++i) {
    const size_t wanted =
        static_cast<size_t>(sum_of_values(r.number, r.world, i) + value(r.number + 1, 0, i)) + i % cols % 5;
    CHECK_EQ(residual.as<float>()[i], wanted, "rank %d round %d element %zu of %zu x %zu", r.rank, r.number,
             i, rows, cols);
    if (e.norm == ND_NO_NORM)
      CHECK_EQ(out.as<float>()[i], wanted, "rank %d round %d element %zu", r.rank, r.number, i);
  }
  out.check_guards("fused");
  residual.check_guards("fused");
}

inline void run_round(const Round& r, unsigned kind) {
  switch (kind) {
    case 0:
      return all_reduce_i32(r, false);
    case 1:
      return all_reduce_bf16(r);
    case 2:
      return all_gather(r);
    case 3:
      return reduce_scatter(r);
    case 4:
      return broadcast(r);
    case 5:
      return scatter_then_gather(r);
    case 6:
      return reduce(r);
    case 7:
      return all_to_all(r);
    case 9:
      return all_reduce_fused(r);
    case 8:
      CHECK_EQ(nd_barrier(r.group), 0, "round %d", r.number);
      return;
    default:
      return all_reduce_i32(r, true);
  }
}

#endif
