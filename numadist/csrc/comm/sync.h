// The shared segment and how ranks wait for each other in it.
#ifndef ND_SYNC_H
#define ND_SYNC_H

#include <atomic>
#include <mutex>

#include "comm/process.h"
#include "comm/trace.h"
#include "nd_core.h"

namespace nd {

constexpr uint64_t kMagic = 0x6e756d6164697374;  // "numadist"
// What is bound to a node lies in whole pages of the largest size that kernels use: Arm's have 4, 16 or 64 KiB.
#if defined(__aarch64__)
constexpr size_t kPage = 64 * 1024;
#else
constexpr size_t kPage = 4096;
#endif
// One flag a line; 128 B because x86 prefetches lines in pairs and some Arm lines are 128 B.
constexpr size_t kLine = 128;
constexpr size_t kSlotBytes = 64 * 1024;
// Events of a rank use its slots in turn. 8 is the next power of two above 6, see "Slots" below.
constexpr size_t kNumSlots = 8;

// Slots. An event is one publication of a rank: "my slot (seq % kNumSlots) is ready". No rank writes event e
// while a peer may still read event e - kNumSlots of it, without any acknowledgement:
//  - a rank enters a collective only after it finished the one before, and it cannot finish a collective before every
//    peer has entered it. So on entry, peers may still read at most my last two events.
//  - inside a collective at most two events are published ahead of the oldest event some peer may still read, in the
//    reduce-scatter + gather pipeline five (its comment in collectives.cpp counts them).
// Swap slots (two ranks only): slot [pair][i] lies in the part of rank i. Who reads a slot is the next to write it,
// so it needs no acknowledgement either, and each line crosses between the caches once per operation.

struct CallWords {
  std::atomic<uint64_t> what;
  std::atomic<uint64_t> bytes;
};

// A number that others wait for. In the flag it counts events, elsewhere it only changes.
struct Bell {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
};

// Written by its rank alone (but sleepers). seq counts the rank's events since the group began and is never reset;
// call[n & 1] is the rank's n-th collective. Two entries do: a rank can be at most one collective ahead of a peer.
struct alignas(kLine) Flag {
  Bell seq;
  CallWords call[2];
};

enum State : uint32_t { kEmpty = 0, kOpening = 1, kOpened = 2, kClosed = 3 };

struct alignas(kLine) Identity {
  std::atomic<uint32_t> state;
  int32_t pid;
  uint64_t start_time;  // of the process, so that a reused pid is not taken for the peer
  uint64_t cpus[16];    // affinity mask
};

struct Control {
  Flag flag;
  Identity identity;
  alignas(kLine) Bell mail;  // rings when a channel to or from this rank moved
};
static_assert(sizeof(Control) <= kPage, "control must fit its page");

struct Part {
  alignas(kPage) Control control;
  alignas(kPage) char slots[kNumSlots][kSlotBytes];
  char swap[2][kSlotBytes];  // [pair]
};

// A stream of bytes from one rank to another: messages, each a MessageHead and its data, padded to kMessageUnit.
constexpr size_t kChannelBytes = 64 * 1024;
constexpr size_t kMessageUnit = 64;

struct alignas(kPage) Channel {
  alignas(kLine) std::atomic<uint64_t> written;  // bytes so far, by the sender
  alignas(kLine) std::atomic<uint64_t> read;     // bytes so far, by the receiver
  alignas(kLine) char data[kChannelBytes];
};

struct Mail;   // p2p.cpp
struct Queue;  // async.cpp

enum Abort : uint32_t { kRunning = 0, kWriting = 1, kAborted = 2 };

struct alignas(kPage) Header {
  uint64_t magic;
  uint32_t abi_version;
  int32_t world;
  uint64_t nonce;
  NdTuning tuning;
  alignas(kLine) std::atomic<uint32_t> abort;  // Abort; report is valid once it is kAborted
  NdReport report;
};

}  // namespace nd

// One rank's handle. Lives in its own mapping that a fork sees as zeros, so `magic` tells a forked copy.
struct NdGroup {
  uint64_t magic;
  nd::Header* header;
  nd::Part* parts;
  size_t bytes;
  bool owns_segment;
  bool is_rank;  // not so when another handle was this rank already
  int rank;
  int world;
  NdOptions options;
  std::mutex* mutex;         // of the collectives
  std::mutex* report_mutex;  // of failed, report and peer_state
  nd::Channel* channels;     // [to][from]
  nd::Mail* mail;
  nd::Queue* queue;
  nd::Process* processes;      // of the peers; none for this very process
  uint64_t seq;                // events I published
  uint64_t num_swaps;          // chunks that went through swap slots
  uint64_t num_colls;          // collectives entered; names the collective in reports
  uint64_t deadline_ns;        // of the running collective; 0: it has not waited for long yet
  uint64_t awaited;            // the event waited for last; peers that lack it are named in a report
  NdCall call;                 // the running collective
  bool begun;                  // it is one in two parts, and the second has not been made
  NdCall history[ND_HISTORY];  // collective n at [n % ND_HISTORY]
  std::atomic<int> failed;     // sticky code
  NdReport report;
  int8_t* peer_state;  // of the report
  NdStats stats;
  bool timed;        // stats has times too
  nd::Trace* trace;  // nullptr: not asked for
};

namespace nd {

uint64_t now_ns();

// Publish this rank's next event; everything written before it is visible to who sees it.
void wake_sleepers(Bell& bell);
inline void publish(NdGroup& g) {
  Bell& mine = g.parts[g.rank].control.flag.seq;
  // release: peers that acquire this value see the slot and the call words.
  mine.value.store(++g.seq, std::memory_order_release);
  // relaxed, and not ordered after the store: a sleeper missed here wakes by its own time limit.
  if (mine.sleepers.load(std::memory_order_relaxed) != 0) wake_sleepers(mine);
}

// Sleep until the bell rings, if it still shows `seen`; at most half a millisecond.
void sleep_on(Bell& bell, uint64_t seen);

void cpu_relax();

// A rank that closed its handle will never publish again; ranks that are threads have no process of their own.
bool is_gone(NdGroup& g, int peer);

int wait_event_slow(NdGroup& g, int peer, uint64_t seq);
inline int wait_event(NdGroup& g, int peer, uint64_t seq) {
  // acquire: pairs with the release in publish.
  if (g.parts[peer].control.flag.seq.value.load(std::memory_order_acquire) >= seq) return 0;
  return wait_event_slow(g, peer, seq);
}

// Wait for the first event of the running collective of a peer and compare its call with ours.
int meet(NdGroup& g, int peer, uint64_t seq);

// Another rank failed first: take over its report; returns its code.
int adopt_abort(NdGroup& g);

// Make the group fail on every rank; returns the code it failed with, which may be an earlier one.
int fail(NdGroup& g, const NdReport& report);
// The same for the running collective.
int fail_call(NdGroup& g, int code, int peer, const NdCall& theirs);

// The channel that `from` writes and `to` reads; it lies in the memory of `to`.
inline Channel& channel(NdGroup& g, int from, int to) { return g.channels[to * g.world + from]; }

// Handles' own parts, made with the handle. close_mail stops the progress thread, close_queue the worker.
int open_mail(NdGroup& g);
void close_mail(NdGroup& g);
int open_queue(NdGroup& g);
void close_queue(NdGroup& g);
// Wait until calls queued before are done; the worker itself passes.
void wait_for_queue(NdGroup& g);

// The slot of the event that makes a rank's counter `seq`.
inline char* slot_of(NdGroup& g, int rank, uint64_t seq) { return g.parts[rank].slots[seq % kNumSlots]; }

}  // namespace nd

#endif
