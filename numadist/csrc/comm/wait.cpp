// Waiting for peers, and failing when there is no point in waiting.
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm/sync.h"

namespace nd {
namespace {

constexpr int kSpinsPerClock = 32;  // about 0.6 us of pause between two looks at the clock
constexpr uint64_t kYieldNs = 1000 * 1000;
constexpr int kYieldsPerCheck = 16;  // a look at all peers' processes costs as much as a yield
// A waiter sleeps at most this long, so a publisher need not order its store before the look at `sleepers`
// (a full fence on every publication); a wake that is missed costs one such sleep.
constexpr long kSleepNs = 500 * 1000;

// A reporter that died while it wrote its report must not hold up the others.
constexpr uint64_t kReportNs = 1000 * 1000 * 1000;

bool has_arrived(NdGroup& g, int peer, uint64_t seq) {
  return g.parts[peer].control.flag.seq.value.load(std::memory_order_acquire) >= seq;
}

NdCall unpack(uint64_t what, uint64_t bytes) {
  NdCall call;
  memcpy(&call, &what, sizeof what);
  call.bytes = bytes;
  return call;
}

NdCall call_of(NdGroup& g, int peer) {
  // relaxed: written before the event that we acquired.
  const CallWords& words = g.parts[peer].control.flag.call[g.num_colls & 1];
  return unpack(words.what.load(std::memory_order_relaxed), words.bytes.load(std::memory_order_relaxed));
}

bool any_gone(NdGroup& g, int* gone) {
  for (int p = 0; p < g.world; ++p)
    if (p != g.rank && is_gone(g, p)) {
      *gone = p;
      return true;
    }
  return false;
}

// The reasons to stop waiting, cheapest first. 0: go on.
int check_wait(NdGroup& g, int peer, uint64_t seq, uint64_t now) {
  if (const int code = g.failed.load(std::memory_order_acquire)) return code;
  const bool aborted = g.header->abort.load(std::memory_order_acquire) != kRunning;
  const bool late = now >= g.deadline_ns;
  int gone = -1;
  if (!aborted && !late && !any_gone(g, &gone)) return 0;
  // Peers that finished this collective may rightly leave, or fail in their next one; they cannot finish it before
  // the event we wait for was published. So if that event is there by now, what we saw does not concern us.
  if (has_arrived(g, peer, seq)) return 0;
  if (aborted) return adopt_abort(g);
  return gone >= 0 ? fail_call(g, -EOWNERDEAD, gone, NdCall{}) : fail_call(g, -ETIMEDOUT, peer, NdCall{});
}

// The ranks that a failed call waits for. In a collective: who lacks the event; else the one peer.
void note_peers(NdGroup& g, const NdReport& report) {
  const bool one_peer = report.mine.coll == ND_SEND || report.mine.coll == ND_RECV;
  for (int p = 0; p < g.world; ++p) {
    const bool joined = g.parts[p].control.identity.state.load(std::memory_order_acquire) >= kOpened;
    const bool here = one_peer ? p != report.peer : joined && has_arrived(g, p, g.awaited);
    g.peer_state[p] = p == g.rank || here ? 1 : (is_gone(g, p) ? -1 : 0);
  }
}

}  // namespace

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb");  // `yield` does nothing on cores without hardware threads
#endif
}

bool is_gone(NdGroup& g, int peer) {
  return g.parts[peer].control.identity.state.load(std::memory_order_acquire) == kClosed ||
         has_ended(g.processes[peer]);
}

void sleep_on(Bell& bell, uint64_t seen) {
  // seq_cst here and in ring: of a sleeper and a ringer one sees the other.
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (bell.value.load(std::memory_order_seq_cst) == seen) {
    const timespec limit{0, kSleepNs};
    // The futex is the low half of the value (little endian), which every ring changes.
    syscall(SYS_futex, &bell.value, FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  }
  bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void wake_sleepers(Bell& bell) { syscall(SYS_futex, &bell.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

int adopt_abort(NdGroup& g) {
  const uint64_t deadline = now_ns() + kReportNs;
  while (g.header->abort.load(std::memory_order_acquire) == kWriting && now_ns() < deadline) sched_yield();
  const std::lock_guard<std::mutex> lock(*g.report_mutex);
  const int known = g.failed.load(std::memory_order_relaxed);
  if (known != 0) return known;
  if (g.header->abort.load(std::memory_order_acquire) == kAborted)
    g.report = g.header->report;
  else
    g.report = NdReport{-EOWNERDEAD, -1, -1, 0, g.num_colls, g.call, NdCall{}};
  g.failed.store(g.report.code, std::memory_order_release);
  return g.report.code;
}

int fail(NdGroup& g, const NdReport& report) {
  const std::lock_guard<std::mutex> lock(*g.report_mutex);
  const int known = g.failed.load(std::memory_order_relaxed);
  if (known != 0) return known;  // another thread of this rank was first
  g.report = report;
  g.report.reporter = g.rank;
  if (report.peer >= 0) {
    const Identity& peer = g.parts[report.peer].control.identity;
    if (peer.state.load(std::memory_order_acquire) >= kOpened) g.report.peer_pid = peer.pid;
  }
  note_peers(g, g.report);
  uint32_t expected = kRunning;
  // acq_rel: the first reporter owns the report; release below makes it readable.
  if (g.header->abort.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) {
    g.header->report = g.report;
    g.header->abort.store(kAborted, std::memory_order_release);
  }
  g.failed.store(report.code, std::memory_order_release);
  return report.code;
}

int fail_call(NdGroup& g, int code, int peer, const NdCall& theirs) {
  return fail(g, NdReport{code, g.rank, peer, 0, g.num_colls, g.call, theirs});
}

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// Where ranks share CPUs, spinning only keeps the awaited one from running.
static int spins_of(const NdGroup& g) { return g.options.spin_ns == 0 ? 1 : kSpinsPerClock; }

// Spin until the event is there; false after `rounds` looks.
static bool spin(NdGroup& g, int peer, uint64_t seq, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (has_arrived(g, peer, seq)) return true;
    cpu_relax();
  }
  return false;
}

// Spin, then yield, then sleep.
static int wait_for_long(NdGroup& g, int peer, uint64_t seq) {
  Bell& bell = g.parts[peer].control.flag.seq;
  const uint64_t begin = now_ns();
  if (g.deadline_ns == 0) g.deadline_ns = begin + g.options.timeout_ns;
  for (uint64_t yields = 0; !spin(g, peer, seq, spins_of(g));) {
    const uint64_t now = now_ns();
    if (now - begin < g.options.spin_ns) continue;
    const bool yield = now - begin < g.options.spin_ns + kYieldNs;
    if (!yield || ++yields % kYieldsPerCheck == 0)
      if (const int code = check_wait(g, peer, seq, now)) return code;
    if (yield)
      sched_yield();
    else if (const uint64_t seen = bell.value.load(std::memory_order_acquire); seen < seq)
      sleep_on(bell, seen);
  }
  return 0;
}

int wait_event_slow(NdGroup& g, int peer, uint64_t seq) {
  const uint64_t begin = g.timed ? now_ns() : 0;
  g.awaited = seq;
  // The usual wait is over before the clock is worth a look.
  const int code = spin(g, peer, seq, spins_of(g)) ? 0 : wait_for_long(g, peer, seq);
  if (begin != 0) g.stats.wait_ns += now_ns() - begin;
  return code;
}

int meet(NdGroup& g, int peer, uint64_t seq) {
  if (const int rc = wait_event(g, peer, seq)) return rc;
  const NdCall theirs = call_of(g, peer);
  return memcmp(&theirs, &g.call, sizeof theirs) == 0 ? 0 : fail_call(g, -EPROTO, peer, theirs);
}

}  // namespace nd
