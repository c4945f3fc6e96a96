// all_reduce together with bias, residual and norm: one pass over the data instead of three.
#include <stdlib.h>

#include "comm/collective_call.h"

namespace nd {
namespace {

// The sum in a buffer of its own first, for what does not fit the slots row by row.
int reduce_then_finish(NdGroup& g, const Bytes* in, size_t bytes, const Reduction& r, Bytes** sum) {
  *sum = static_cast<Bytes*>(malloc(bytes));
  if (*sum == nullptr) return -ENOMEM;
  if (g.world > 2) return reduce_by_two_shot(g, in, *sum, bytes, r);
  return reduce_by_swap(g, in, bytes, Pieces{}, [&](size_t at, size_t n, const void* const* srcs) {
    r.kernel(*sum + at, srcs, g.world, n / r.elem_bytes);
  });
}

}  // namespace
}  // namespace nd

using namespace nd;

int nd_all_reduce_fused(NdGroup* g, const void* in, void* out, size_t rows, int dtype,
                        const NdEpilogue* epilogue) {
  const NdEpilogue& e = *epilogue;
  Reduction r;
  if (const int rc = find_reduction(dtype, ND_SUM, &r)) return rc;
  const FusedKernel kernel = best_fused_kernel(dtype);
  if (kernel == nullptr) return -EOPNOTSUPP;
  if (e.cols == 0 || e.cols > INT32_MAX) return -EINVAL;
  const size_t row_bytes = e.cols * r.elem_bytes, bytes = rows * row_bytes;
  // The length of a row stands where other calls have their root: ranks must agree on it.
  CollectiveCall call(g, ND_ALL_REDUCE_FUSED, bytes, static_cast<int>(e.cols), dtype, ND_SUM);
  if (call.code != 0) return call.code;
  const auto* src = static_cast<const Bytes*>(in);
  const auto finish = [&](size_t at, size_t n, const void* const* srcs, int num_srcs) {
    Bytes* residual = e.residual == nullptr ? nullptr : static_cast<Bytes*>(e.residual) + at;
    kernel(static_cast<Bytes*>(out) + at, residual, srcs, num_srcs, n / row_bytes, e);
  };
  const auto consume = [&](size_t at, size_t n, const void* const* srcs) { finish(at, n, srcs, g->world); };
  const bool fits = row_bytes <= kSlotBytes;
  const Pieces pieces{round_down(kSlotBytes, fits ? row_bytes : 1), fits ? row_bytes : 1};
  if (g->world == 1) {
    consume(0, bytes, &in);
    return 0;
  }
  if (fits && g->world == 2) return reduce_by_swap(*g, src, bytes, pieces, consume);
  if (fits && bytes <= g->header->tuning.one_shot_bytes)
    return reduce_by_one_shot(*g, src, bytes, pieces, consume);
  Bytes* sum = nullptr;
  const int rc = reduce_then_finish(*g, src, bytes, r, &sum);
  const void* srcs[] = {sum};
  if (rc == 0) finish(0, bytes, srcs, 1);
  free(sum);
  return rc;
}
