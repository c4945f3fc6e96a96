// The collectives. Every one of them waits for every peer, so a call that differs is seen by all ranks and
// none returns. docs/algorithms.md has steps and bytes of each.
#include "comm/collective_call.h"

namespace nd {
namespace {

// Reduce-scatter + all-gather in a pipeline over chunks. Iteration k: publish in(k+1); wait for in(k) of all,
// sum my slice, publish it as res(k); wait for res(k-1) of all and gather it. Events of a rank in order: in0
// in1 res0 in2 res1 in3 ... in(K-1) res(K-2) res(K-1). Slots: when I publish in(k+1), peers have published
// res(k-2), so they gathered up to k-4 and may still read res(k-3), five events ago; when I publish res(k),
// they may still read res(k-2), four events ago.
class TwoShot {
 public:
  TwoShot(NdGroup& g, const Bytes* in, Bytes* out, size_t bytes, const Reduction& r)
      : g_(g),
        in_(in),
        out_(out),
        r_(r),
        max_slice_(round_down(kSlotBytes / static_cast<size_t>(g.world), kLine)),
        chunks_{bytes, max_slice_ * static_cast<size_t>(g.world)},
        base_(g.seq) {}

  int run() {
    put(0);
    for (size_t k = 0; k <= chunks_.count(); ++k) {
      if (k + 1 < chunks_.count()) put(k + 1);
      if (k < chunks_.count()) {
        if (const int rc = wait_all(g_, in_event(k), k == 0)) return rc;
        sum_my_slice(k);
      }
      if (k == 0) continue;
      if (const int rc = gather(k - 1)) return rc;
    }
    return 0;
  }

 private:
  uint64_t in_event(size_t k) const { return base_ + (k == 0 ? 1 : 2 * k); }
  uint64_t res_event(size_t k) const { return base_ + std::min<uint64_t>(2 * k + 3, 2 * chunks_.count()); }

  // Rank p's slice of chunk k, in whole lines but the last.
  size_t slice_begin(size_t k, int p) const {
    const size_t slice = round_up((chunks_.size(k) + g_.world - 1) / g_.world, kLine);
    return std::min(chunks_.size(k), slice * static_cast<size_t>(p));
  }
  size_t slice_size(size_t k, int p) const { return slice_begin(k, p + 1) - slice_begin(k, p); }

  void put(size_t k) {
    copy(slot_of(g_, g_.rank, in_event(k)), in_ + chunks_.begin(k), chunks_.size(k));
    publish(g_);
  }

  void sum_my_slice(size_t k) {
    const size_t at = slice_begin(k, g_.rank), size = slice_size(k, g_.rank);
    Bytes* result = slot_of(g_, g_.rank, res_event(k));
    const void* srcs[ND_MAX_WORLD];
    for (int p = 0; p < g_.world; ++p) srcs[p] = slot_of(g_, p, in_event(k)) + at;
    r_.kernel(result, srcs, g_.world, size / r_.elem_bytes);
    publish(g_);
    copy(out_ + chunks_.begin(k) + at, result, size);
  }

  int gather(size_t k) {
    for (int s = 1; s < g_.world; ++s) {
      const int p = peer_at(g_, s);
      if (const int rc = wait_event(g_, p, res_event(k))) return rc;
      copy(out_ + chunks_.begin(k) + slice_begin(k, p), slot_of(g_, p, res_event(k)), slice_size(k, p));
    }
    return 0;
  }

  NdGroup& g_;
  const Bytes* in_;
  Bytes* out_;
  const Reduction& r_;
  const size_t max_slice_;
  const Chunks chunks_;
  const uint64_t base_;
};

void copy_unless_same(void* dst, const void* src, size_t bytes) {
  if (dst != src) copy(dst, src, bytes);
}

}  // namespace

int reduce_by_two_shot(NdGroup& g, const Bytes* in, Bytes* out, size_t bytes, const Reduction& r) {
  return TwoShot(g, in, out, bytes, r).run();
}

}  // namespace nd

using namespace nd;

int nd_barrier(NdGroup* g) {
  CollectiveCall call(g, ND_BARRIER, 0);
  if (call.code != 0) return call.code;
  publish(*g);
  return wait_all(*g, g->seq, true);
}

int nd_all_reduce(NdGroup* g, const void* in, void* out, size_t count, int dtype, int op) {
  Reduction r;
  if (const int rc = find_reduction(dtype, op, &r)) return rc;
  const size_t bytes = count * r.elem_bytes;
  CollectiveCall call(g, ND_ALL_REDUCE, bytes, -1, dtype, op);
  if (call.code != 0) return call.code;
  const auto* src = static_cast<const Bytes*>(in);
  auto* dst = static_cast<Bytes*>(out);
  const auto consume = [&](size_t at, size_t n, const void* const* srcs) {
    r.kernel(dst + at, srcs, g->world, n / r.elem_bytes);
  };
  if (g->world == 2) return reduce_by_swap(*g, src, bytes, Pieces{}, consume);
  if (g->world == 1 || bytes <= g->header->tuning.one_shot_bytes)
    return reduce_by_one_shot(*g, src, bytes, Pieces{}, consume);
  return reduce_by_two_shot(*g, src, dst, bytes, r);
}

int nd_all_gather(NdGroup* g, const void* in, void* const* outs, size_t bytes, int dtype) {
  CollectiveCall call(g, ND_ALL_GATHER, bytes, -1, dtype);
  if (call.code != 0) return call.code;
  const Chunks chunks{bytes, kSlotBytes};
  const auto fill = [&](size_t k, Bytes* slot) {
    copy(slot, static_cast<const Bytes*>(in) + chunks.begin(k), chunks.size(k));
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    for (int s = 1; s < g->world; ++s) {
      const int p = peer_at(*g, s);
      copy(static_cast<Bytes*>(outs[p]) + chunks.begin(k), slot_of(*g, p, seq), chunks.size(k));
    }
  };
  const int rc = run_rounds(*g, chunks.count(), fill, drain);
  if (rc == 0) copy_unless_same(outs[g->rank], in, bytes);
  return rc;
}

int nd_reduce_scatter(NdGroup* g, const void* const* ins, void* out, size_t count, int dtype, int op) {
  Reduction r;
  if (const int rc = find_reduction(dtype, op, &r)) return rc;
  const size_t bytes = count * r.elem_bytes, piece = piece_bytes(*g);
  CollectiveCall call(g, ND_REDUCE_SCATTER, bytes, -1, dtype, op);
  if (call.code != 0) return call.code;
  const Chunks chunks{bytes, piece};
  const auto fill = [&](size_t k, Bytes* slot) {
    for (int s = 1; s < g->world; ++s) {
      const int p = peer_at(*g, s);
      copy(slot + p * piece, static_cast<const Bytes*>(ins[p]) + chunks.begin(k), chunks.size(k));
    }
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    const void* srcs[ND_MAX_WORLD];
    for (int p = 0; p < g->world; ++p) srcs[p] = slot_of(*g, p, seq) + g->rank * piece;
    srcs[g->rank] = static_cast<const Bytes*>(ins[g->rank]) + chunks.begin(k);
    r.kernel(static_cast<Bytes*>(out) + chunks.begin(k), srcs, g->world, chunks.size(k) / r.elem_bytes);
  };
  return run_rounds(*g, chunks.count(), fill, drain);
}

int nd_broadcast(NdGroup* g, void* buf, size_t bytes, int dtype, int root) {
  if (root < 0 || root >= g->world) return -EINVAL;
  CollectiveCall call(g, ND_BROADCAST, bytes, root, dtype);
  if (call.code != 0) return call.code;
  const Chunks chunks{bytes, kSlotBytes};
  const auto fill = [&](size_t k, Bytes* slot) {
    if (g->rank == root) copy(slot, static_cast<Bytes*>(buf) + chunks.begin(k), chunks.size(k));
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    if (g->rank != root)
      copy(static_cast<Bytes*>(buf) + chunks.begin(k), slot_of(*g, root, seq), chunks.size(k));
  };
  return run_rounds(*g, chunks.count(), fill, drain);
}

int nd_scatter(NdGroup* g, const void* const* ins, void* out, size_t bytes, int dtype, int root) {
  if (root < 0 || root >= g->world) return -EINVAL;
  const size_t piece = piece_bytes(*g);
  CollectiveCall call(g, ND_SCATTER, bytes, root, dtype);
  if (call.code != 0) return call.code;
  const Chunks chunks{bytes, piece};
  const auto fill = [&](size_t k, Bytes* slot) {
    for (int s = 1; g->rank == root && s < g->world; ++s) {
      const int p = peer_at(*g, s);
      copy(slot + p * piece, static_cast<const Bytes*>(ins[p]) + chunks.begin(k), chunks.size(k));
    }
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    if (g->rank != root)
      copy(static_cast<Bytes*>(out) + chunks.begin(k), slot_of(*g, root, seq) + g->rank * piece,
           chunks.size(k));
  };
  const int rc = run_rounds(*g, chunks.count(), fill, drain);
  if (rc == 0 && g->rank == root) copy_unless_same(out, ins[root], bytes);
  return rc;
}

int nd_gather(NdGroup* g, const void* in, void* const* outs, size_t bytes, int dtype, int root) {
  if (root < 0 || root >= g->world) return -EINVAL;
  CollectiveCall call(g, ND_GATHER, bytes, root, dtype);
  if (call.code != 0) return call.code;
  const Chunks chunks{bytes, kSlotBytes};
  const auto fill = [&](size_t k, Bytes* slot) {
    if (g->rank != root) copy(slot, static_cast<const Bytes*>(in) + chunks.begin(k), chunks.size(k));
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    for (int s = 1; g->rank == root && s < g->world; ++s) {
      const int p = peer_at(*g, s);
      copy(static_cast<Bytes*>(outs[p]) + chunks.begin(k), slot_of(*g, p, seq), chunks.size(k));
    }
  };
  const int rc = run_rounds(*g, chunks.count(), fill, drain);
  if (rc == 0 && g->rank == root) copy_unless_same(outs[root], in, bytes);
  return rc;
}

int nd_reduce(NdGroup* g, const void* in, void* out, size_t count, int dtype, int op, int root) {
  if (root < 0 || root >= g->world) return -EINVAL;
  Reduction r;
  if (const int rc = find_reduction(dtype, op, &r)) return rc;
  const size_t bytes = count * r.elem_bytes;
  CollectiveCall call(g, ND_REDUCE, bytes, root, dtype, op);
  if (call.code != 0) return call.code;
  const Chunks chunks{bytes, kSlotBytes};
  const auto fill = [&](size_t k, Bytes* slot) {
    if (g->rank != root) copy(slot, static_cast<const Bytes*>(in) + chunks.begin(k), chunks.size(k));
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    if (g->rank != root) return;
    const void* srcs[ND_MAX_WORLD];
    for (int p = 0; p < g->world; ++p) srcs[p] = slot_of(*g, p, seq);
    srcs[root] = static_cast<const Bytes*>(in) + chunks.begin(k);
    r.kernel(static_cast<Bytes*>(out) + chunks.begin(k), srcs, g->world, chunks.size(k) / r.elem_bytes);
  };
  return run_rounds(*g, chunks.count(), fill, drain);
}

// A first round exchanges the sizes, which both checks them and tells every rank the number of rounds.
static int agree_on_sizes(NdGroup& g, const size_t* in_bytes, const size_t* out_bytes, size_t* max_bytes) {
  const size_t n = static_cast<size_t>(g.world);
  int code = 0;
  const auto fill = [&](size_t, Bytes* slot) { copy(slot, in_bytes, n * sizeof(size_t)); };
  const auto drain = [&](size_t, uint64_t seq) {
    for (int p = 0; p < g.world; ++p) {
      const auto* sizes = p == g.rank ? in_bytes : reinterpret_cast<const size_t*>(slot_of(g, p, seq));
      *max_bytes = std::max(*max_bytes, *std::max_element(sizes, sizes + n));
      if (code != 0 || sizes[g.rank] == out_bytes[p]) continue;
      // What I expect of p, against what p sends.
      g.call.bytes = out_bytes[p];
      NdCall theirs = g.call;
      theirs.bytes = sizes[g.rank];
      code = fail_call(g, -EPROTO, p, theirs);
    }
  };
  const int rc = run_rounds(g, 1, fill, drain);
  return rc != 0 ? rc : code;
}

int nd_all_to_all(NdGroup* g, const void* const* ins, const size_t* in_bytes, void* const* outs,
                  const size_t* out_bytes, int dtype) {
  const size_t piece = piece_bytes(*g);
  CollectiveCall call(g, ND_ALL_TO_ALL, 0, -1, dtype);
  if (call.code != 0) return call.code;
  size_t max_bytes = 0;
  if (const int rc = agree_on_sizes(*g, in_bytes, out_bytes, &max_bytes)) return rc;
  const auto fill = [&](size_t k, Bytes* slot) {
    for (int s = 1; s < g->world; ++s) {
      const int p = peer_at(*g, s);
      const Chunks chunks{in_bytes[p], piece};
      if (k < chunks.count())
        copy(slot + p * piece, static_cast<const Bytes*>(ins[p]) + chunks.begin(k), chunks.size(k));
    }
  };
  const auto drain = [&](size_t k, uint64_t seq) {
    for (int s = 1; s < g->world; ++s) {
      const int p = peer_at(*g, s);
      const Chunks chunks{out_bytes[p], piece};
      if (k < chunks.count())
        copy(static_cast<Bytes*>(outs[p]) + chunks.begin(k), slot_of(*g, p, seq) + g->rank * piece,
             chunks.size(k));
    }
  };
  const int rc = run_rounds(*g, Chunks{max_bytes, piece}.count(), fill, drain);
  if (rc == 0) copy_unless_same(outs[g->rank], ins[g->rank], in_bytes[g->rank]);
  return rc;
}
