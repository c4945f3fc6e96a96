// What all collectives share: entering and leaving, chunks, and the frame of the one-step ones.
#ifndef ND_COLLECTIVE_CALL_H
#define ND_COLLECTIVE_CALL_H

#include <errno.h>
#include <string.h>

#include <algorithm>

#include "comm/reduce.h"
#include "comm/sync.h"

namespace nd {

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
inline void copy(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) memcpy(dst, src, bytes);
}

inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
inline size_t round_down(size_t n, size_t unit) { return n / unit * unit; }

// Peers in shifted order: at any time the ranks address different peers.
inline int peer_at(const NdGroup& g, int shift) { return (g.rank + shift) % g.world; }

// Collectives of one round can be made in two parts, see async.cpp: one publishes this rank's data and returns, the
// other waits for the peers. Which part this thread makes now:
enum class Stage { kWhole, kBegin, kFinish };
extern thread_local Stage stage;

// A slot cut in one piece for each destination.
inline size_t piece_bytes(const NdGroup& g) {
  return round_down(kSlotBytes / static_cast<size_t>(g.world), kLine);
}

// Enters a collective: takes the lock, refuses a forked or failed handle, sets the deadline, announces the call.
class CollectiveCall {
 public:
  CollectiveCall(NdGroup* group, NdColl coll, uint64_t bytes, int root = -1, int dtype = 0, int op = 0)
      : g_(*group), stage_(stage) {
    code = lock();
    if (code != 0) return;
    code = g_.failed.load(std::memory_order_acquire);
    if (code == 0 && g_.header->abort.load(std::memory_order_relaxed) != kRunning) code = adopt_abort(g_);
    if (code != 0) return;
    entered_ = stage_ != Stage::kBegin;
    // A look at the clock takes a tenth of a small call, so only who asked for times pays for it.
    if (g_.timed && entered_) {
      begin_ns_ = now_ns();
      waited_ns_ = g_.stats.wait_ns;
    }
    g_.deadline_ns = 0;
    if (stage_ == Stage::kFinish) return;
    g_.begun = stage_ == Stage::kBegin;
    g_.call = NdCall{
        static_cast<uint8_t>(coll), static_cast<uint8_t>(op), static_cast<uint8_t>(dtype), 0, root, bytes};
    g_.history[(g_.num_colls + 1) % ND_HISTORY] = g_.call;
    CallWords& words = g_.parts[g_.rank].control.flag.call[++g_.num_colls & 1];
    uint64_t what;
    memcpy(&what, &g_.call, sizeof what);
    // relaxed: the release of the first event makes them visible.
    words.what.store(what, std::memory_order_relaxed);
    words.bytes.store(bytes, std::memory_order_relaxed);
  }
  ~CollectiveCall() {
    if (!locked_) return;
    if (stage_ == Stage::kFinish) g_.begun = false;
    if (entered_) ++g_.stats.num_calls;
    if (begin_ns_ != 0) {
      const uint64_t ns = now_ns() - begin_ns_;
      g_.stats.total_ns += ns;
      if (g_.trace != nullptr) g_.trace->add(g_.call, ns, g_.stats.wait_ns - waited_ns_);
    }
    g_.mutex->unlock();
  }
  CollectiveCall(const CollectiveCall&) = delete;
  CollectiveCall& operator=(const CollectiveCall&) = delete;

  int code = 0;

 private:
  int lock() {
    if (g_.magic != kMagic) return -ECHILD;
    if (stage_ == Stage::kBegin) {  // must not wait: a call of another thread may take long
      locked_ = g_.mutex->try_lock();
      return locked_ ? 0 : -EAGAIN;
    }
    for (;;) {
      if (stage_ == Stage::kWhole) wait_for_queue(g_);
      g_.mutex->lock();
      // Another thread may have begun a call between the two lines above.
      if (stage_ == Stage::kFinish || !g_.begun) break;
      g_.mutex->unlock();
    }
    locked_ = true;
    return 0;
  }

  NdGroup& g_;
  const Stage stage_;
  bool locked_ = false;
  bool entered_ = false;
  uint64_t begin_ns_ = 0, waited_ns_ = 0;
};

// Wait until every peer has published its event `seq`; the first of a collective also compares the calls.
inline int wait_all(NdGroup& g, uint64_t seq, bool first) {
  for (int s = 1; s < g.world; ++s) {
    const int peer = peer_at(g, s);
    if (const int rc = first ? meet(g, peer, seq) : wait_event(g, peer, seq)) return rc;
  }
  return 0;
}

// The events that this rank had published when the running collective, of one event so far if begun, started.
inline uint64_t first_event(const NdGroup& g) { return g.seq - (stage == Stage::kFinish ? 1 : 0); }

// The frame of all one-step collectives. For each of `num_rounds` chunks: fill(k, my slot), publish, wait for
// all, drain(k, seq of the chunk's event). Chunk k+1 is filled before chunk k is waited for.
template <typename Fill, typename Drain>
int run_rounds(NdGroup& g, size_t num_rounds, Fill fill, Drain drain) {
  const uint64_t base = first_event(g);
  if (g.world == 1) {
    for (size_t k = 0; k < num_rounds; ++k) drain(k, base);
    return 0;
  }
  if (stage != Stage::kFinish) {
    fill(0, slot_of(g, g.rank, base + 1));
    publish(g);
  }
  if (stage == Stage::kBegin) return 0;
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

inline int find_reduction(int dtype, int op, Reduction* out) {
  out->elem_bytes = element_bytes(dtype);
  out->kernel = out->elem_bytes == 0 || op < 0 || op >= ND_NUM_OPS ? nullptr : best_kernel(dtype, op);
  return out->kernel == nullptr ? -EOPNOTSUPP : 0;
}

// The sum of two and more ranks, handed out in pieces: consume(offset, bytes, one source a rank, in rank
// order). A chunk of at most a slot and a piece of it are whole multiples of what consume takes.
struct Pieces {
  size_t chunk_bytes = kSlotBytes;
  // A piece stays in the first-level cache, so that refilling a slot hits the lines that the sum just fetched.
  size_t piece_bytes = 2048;
};

// Two ranks: see "Slots" in sync.h. My chunk j goes out in a slot that I read two chunks ago, and the peer's
// is read and refilled in one pass.
template <typename Consume>
int reduce_by_swap(NdGroup& g, const Bytes* in, size_t bytes, const Pieces& pieces, Consume consume) {
  const int peer = 1 - g.rank;
  const Chunks chunks{bytes, pieces.chunk_bytes};
  const size_t num_chunks = chunks.count();
  const uint64_t base = first_event(g), first_swap = g.num_swaps;
  const auto slot_to_write = [&](uint64_t j) { return g.parts[(g.rank + (j >> 1)) & 1].swap[j & 1]; };
  for (size_t k = 0; k < std::min<size_t>(2, num_chunks) && stage != Stage::kFinish; ++k) {
    copy(slot_to_write(first_swap + k), in + chunks.begin(k), chunks.size(k));
    publish(g);
  }
  if (stage == Stage::kBegin) return 0;
  for (size_t k = 0; k < num_chunks; ++k) {
    if (const int rc = k == 0 ? meet(g, peer, base + 1) : wait_event(g, peer, base + k + 1)) return rc;
    Bytes* slot = slot_to_write(first_swap + k + 2);  // the peer's chunk k is where my chunk k + 2 goes
    const size_t size = chunks.size(k), refill = chunks.size(k + 2);
    for (size_t at = 0; at < size; at += pieces.piece_bytes) {
      const size_t n = std::min(pieces.piece_bytes, size - at);
      const void* srcs[2];
      srcs[g.rank] = in + chunks.begin(k) + at;
      srcs[peer] = slot + at;
      consume(chunks.begin(k) + at, n, srcs);
      if (at < refill) copy(slot + at, in + chunks.begin(k + 2) + at, std::min(n, refill - at));
    }
    if (k + 2 < num_chunks) publish(g);
  }
  g.num_swaps += num_chunks;
  return 0;
}

// Every rank sends its whole vector and sums all of them: one wait, (world - 1) * bytes read by each rank.
template <typename Consume>
int reduce_by_one_shot(NdGroup& g, const Bytes* in, size_t bytes, const Pieces& pieces, Consume consume) {
  const Chunks chunks{bytes, pieces.chunk_bytes};
  const auto fill = [&](size_t k, Bytes* slot) { copy(slot, in + chunks.begin(k), chunks.size(k)); };
  const auto drain = [&](size_t k, uint64_t seq) {
    const void* srcs[ND_MAX_WORLD];
    for (int p = 0; p < g.world; ++p) srcs[p] = slot_of(g, p, seq);
    srcs[g.rank] = in + chunks.begin(k);
    consume(chunks.begin(k), chunks.size(k), srcs);
  };
  return run_rounds(g, chunks.count(), fill, drain);
}

// For large sums of more than two ranks, see collectives.cpp.
int reduce_by_two_shot(NdGroup& g, const Bytes* in, Bytes* out, size_t bytes, const Reduction& r);

}  // namespace nd

#endif
