// The collectives. Every one of them waits for every peer, so a call that differs is seen by all ranks and
// none returns. docs/algorithms.md has steps and bytes of each.
#include <errno.h>
#include <string.h>

#include <algorithm>

#include "kernels.h"
#include "sync.h"

namespace nd {
namespace {

// The pipelined sum goes over a chunk in pieces that stay in the first-level cache, so that refilling a slot
// hits the lines that the sum just fetched.
constexpr size_t kPieceBytes = 2048;

using Bytes = char;

// Chunk k of a message cut in pieces of `chunk` bytes.
struct Chunks {
  size_t total;
  size_t chunk;
  size_t count() const { return total == 0 ? 1 : (total - 1) / chunk + 1; }
  size_t begin(size_t k) const { return k * chunk; }
  size_t size(size_t k) const { return std::min(chunk, total - std::min(total, k * chunk)); }
};

// Empty tensors have no address, which memcpy must not see.
void copy(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) memcpy(dst, src, bytes);
}

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
size_t round_down(size_t n, size_t unit) { return n / unit * unit; }

// Peers in shifted order: at any time the ranks address different peers.
int peer_at(const NdGroup& g, int shift) { return (g.rank + shift) % g.world; }

// Enters a collective: takes the lock, refuses a forked or failed handle, sets the deadline, announces the
// call.
class Scope {
 public:
  Scope(NdGroup* group, NdColl coll, uint64_t bytes, int root = -1, int dtype = 0, int op = 0) : g_(*group) {
    if (g_.magic != kMagic) {
      code = -ECHILD;
      return;
    }
    wait_for_queue(g_);
    g_.mutex->lock();
    locked_ = true;
    code = g_.failed.load(std::memory_order_acquire);
    if (code != 0) return;
    if (g_.header->abort.load(std::memory_order_relaxed) != kRunning) {
      code = adopt_abort(g_);
      return;
    }
    begin_ns_ = now_ns();
    g_.deadline_ns = begin_ns_ + g_.options.timeout_ns;
    g_.call = NdCall{
        static_cast<uint8_t>(coll), static_cast<uint8_t>(op), static_cast<uint8_t>(dtype), 0, root, bytes};
    CallWords& words = g_.parts[g_.rank].control.flag.call[++g_.num_colls & 1];
    uint64_t what;
    memcpy(&what, &g_.call, sizeof what);
    // relaxed: the release of the first event makes them visible.
    words.what.store(what, std::memory_order_relaxed);
    words.bytes.store(bytes, std::memory_order_relaxed);
  }
  ~Scope() {
    if (!locked_) return;
    if (begin_ns_ != 0) {
      ++g_.stats.num_calls;
      g_.stats.total_ns += now_ns() - begin_ns_;
    }
    g_.mutex->unlock();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  int code = 0;

 private:
  NdGroup& g_;
  bool locked_ = false;
  uint64_t begin_ns_ = 0;
};

// Wait until every peer has published its event `seq`; the first of a collective also compares the calls.
int wait_all(NdGroup& g, uint64_t seq, bool first) {
  for (int s = 1; s < g.world; ++s) {
    const int peer = peer_at(g, s);
    if (const int rc = first ? meet(g, peer, seq) : wait_event(g, peer, seq)) return rc;
  }
  return 0;
}

// The frame of all one-step collectives. For each of `num_rounds` chunks: fill(k, my slot), publish, wait for
// all, drain(k, seq of the chunk's event). Chunk k+1 is filled before chunk k is waited for.
template <typename Fill, typename Drain>
int run_rounds(NdGroup& g, size_t num_rounds, Fill fill, Drain drain) {
  const uint64_t base = g.seq;
  if (g.world == 1) {
    for (size_t k = 0; k < num_rounds; ++k) drain(k, base);
    return 0;
  }
  fill(0, slot_of(g, g.rank, base + 1));
  publish(g);
  for (size_t k = 0; k < num_rounds; ++k) {
    if (k + 1 < num_rounds) {
      fill(k + 1, slot_of(g, g.rank, base + k + 2));
      publish(g);
    }
    if (const int rc = wait_all(g, base + k + 1, k == 0)) return rc;
    drain(k, base + k + 1);
  }
  return 0;
}

struct Reduction {
  Kernel kernel;
  size_t elem_bytes;
};

int find_reduction(int dtype, int op, Reduction* out) {
  out->elem_bytes = element_bytes(dtype);
  out->kernel = out->elem_bytes == 0 || op < 0 || op >= ND_NUM_OPS ? nullptr : best_kernel(dtype, op);
  return out->kernel == nullptr ? -EOPNOTSUPP : 0;
}

// Two ranks: see "Slots" in sync.h. My chunk j goes out in a slot that I read two chunks ago, and the peer's
// is read and refilled in one pass.
int all_reduce_swap(NdGroup& g, const Bytes* in, Bytes* out, size_t bytes, const Reduction& r) {
  const int peer = 1 - g.rank;
  const Chunks chunks{bytes, kSlotBytes};
  const size_t num_chunks = chunks.count();
  const uint64_t base = g.seq, first_swap = g.num_swaps;
  const auto slot_to_write = [&](uint64_t j) { return g.parts[(g.rank + (j >> 1)) & 1].swap[j & 1]; };
  for (size_t k = 0; k < std::min<size_t>(2, num_chunks); ++k) {
    copy(slot_to_write(first_swap + k), in + chunks.begin(k), chunks.size(k));
    publish(g);
  }
  for (size_t k = 0; k < num_chunks; ++k) {
    if (const int rc = k == 0 ? meet(g, peer, base + 1) : wait_event(g, peer, base + k + 1)) return rc;
    Bytes* slot = slot_to_write(first_swap + k + 2);  // the peer's chunk k is where my chunk k + 2 goes
    const size_t size = chunks.size(k), refill = chunks.size(k + 2);
    for (size_t at = 0; at < size; at += kPieceBytes) {
      const size_t n = std::min(kPieceBytes, size - at);
      const void* srcs[2];
      srcs[g.rank] = in + chunks.begin(k) + at;
      srcs[peer] = slot + at;
      r.kernel(out + chunks.begin(k) + at, srcs, 2, n / r.elem_bytes);
      if (at < refill) copy(slot + at, in + chunks.begin(k + 2) + at, std::min(n, refill - at));
    }
    if (k + 2 < num_chunks) publish(g);
  }
  g.num_swaps += num_chunks;
  return 0;
}

// Every rank sends its whole vector and sums all of them: one wait, (world - 1) * bytes read by each rank.
int all_reduce_one_shot(NdGroup& g, const Bytes* in, Bytes* out, size_t bytes, const Reduction& r) {
  const Chunks chunks{bytes, kSlotBytes};
  const auto fill = [&](size_t k, Bytes* slot) { copy(slot, in + chunks.begin(k), chunks.size(k)); };
  const auto drain = [&](size_t k, uint64_t seq) {
    const void* srcs[ND_MAX_WORLD];
    for (int p = 0; p < g.world; ++p) srcs[p] = slot_of(g, p, seq);
    srcs[g.rank] = in + chunks.begin(k);
    r.kernel(out + chunks.begin(k), srcs, g.world, chunks.size(k) / r.elem_bytes);
  };
  return run_rounds(g, chunks.count(), fill, drain);
}

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

// A slot cut in one piece for each destination.
size_t piece_bytes(const NdGroup& g) { return round_down(kSlotBytes / static_cast<size_t>(g.world), kLine); }

void copy_unless_same(void* dst, const void* src, size_t bytes) {
  if (dst != src) copy(dst, src, bytes);
}

}  // namespace
}  // namespace nd

using namespace nd;

int nd_barrier(NdGroup* g) {
  Scope scope(g, ND_BARRIER, 0);
  if (scope.code != 0) return scope.code;
  publish(*g);
  return wait_all(*g, g->seq, true);
}

int nd_all_reduce(NdGroup* g, const void* in, void* out, size_t count, int dtype, int op) {
  Reduction r;
  if (const int rc = find_reduction(dtype, op, &r)) return rc;
  const size_t bytes = count * r.elem_bytes;
  Scope scope(g, ND_ALL_REDUCE, bytes, -1, dtype, op);
  if (scope.code != 0) return scope.code;
  const auto* src = static_cast<const Bytes*>(in);
  auto* dst = static_cast<Bytes*>(out);
  if (g->world == 2) return all_reduce_swap(*g, src, dst, bytes, r);
  if (g->world == 1 || bytes <= g->header->tuning.one_shot_bytes)
    return all_reduce_one_shot(*g, src, dst, bytes, r);
  return TwoShot(*g, src, dst, bytes, r).run();
}

int nd_all_gather(NdGroup* g, const void* in, void* const* outs, size_t bytes, int dtype) {
  Scope scope(g, ND_ALL_GATHER, bytes, -1, dtype);
  if (scope.code != 0) return scope.code;
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
  Scope scope(g, ND_REDUCE_SCATTER, bytes, -1, dtype, op);
  if (scope.code != 0) return scope.code;
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
  Scope scope(g, ND_BROADCAST, bytes, root, dtype);
  if (scope.code != 0) return scope.code;
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
  Scope scope(g, ND_SCATTER, bytes, root, dtype);
  if (scope.code != 0) return scope.code;
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
  Scope scope(g, ND_GATHER, bytes, root, dtype);
  if (scope.code != 0) return scope.code;
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
  Scope scope(g, ND_REDUCE, bytes, root, dtype, op);
  if (scope.code != 0) return scope.code;
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
  Scope scope(g, ND_ALL_TO_ALL, 0, -1, dtype);
  if (scope.code != 0) return scope.code;
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
