// Segments, group handles, waiting and failing.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#include "sync.h"

namespace nd {
namespace {

constexpr int kSpinsPerClock = 32;  // about 0.6 us of pause between two looks at the clock
constexpr uint64_t kYieldNs = 1000 * 1000;
// A waiter sleeps at most this long, so a publisher need not order its store before the look at `sleepers`
// (a full fence on every publication); a wake that is missed costs one such sleep.
constexpr long kSleepNs = 500 * 1000;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), 0 if it is gone.
uint64_t start_time_of(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  const char* p = strrchr(text, ')');  // the name before it may hold blanks
  for (int field = 2; p != nullptr && field < 22; ++field) p = strchr(p + 1, ' ');
  return p == nullptr ? 0 : strtoull(p, nullptr, 10);
}

bool is_dead(int pidfd) {
  pollfd p{pidfd, POLLIN, 0};
  return pidfd >= 0 && poll(&p, 1, 0) == 1;
}

// A rank that closed its handle will never publish again; as threads of one process ranks have no pidfd.
bool is_gone(NdGroup& g, int peer) {
  return g.parts[peer].control.identity.state.load(std::memory_order_acquire) == kClosed ||
         is_dead(g.pidfds[peer]);
}

bool has_arrived(NdGroup& g, int peer, uint64_t seq) {
  return g.parts[peer].control.flag.seq.load(std::memory_order_acquire) >= seq;
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

// The reasons to stop waiting, cheapest first. 0: go on.
int check_wait(NdGroup& g, int peer, uint64_t seq, uint64_t now) {
  if (g.header->abort.load(std::memory_order_acquire) != kRunning) return adopt_abort(g);
  if (now >= g.deadline_ns) return fail(g, -ETIMEDOUT, peer, NdCall{});
  for (int p = 0; p < g.world; ++p) {
    if (p == g.rank || !is_gone(g, p)) continue;
    // A peer may rightly leave once it finished this collective, which it cannot before the event we wait for
    // was published: so if that event is there now, its absence was old news.
    return has_arrived(g, peer, seq) ? 0 : fail(g, -EOWNERDEAD, p, NdCall{});
  }
  return 0;
}

void sleep_on(Control& control, uint64_t seq) {
  control.sleepers.count.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = control.flag.seq.load(std::memory_order_acquire);
  if (seen < seq) {
    const timespec limit{0, kSleepNs};
    // The futex is the low half of seq (little endian): it changes with every event.
    syscall(SYS_futex, &control.flag.seq, FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  }
  control.sleepers.count.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

int adopt_abort(NdGroup& g) {
  while (g.header->abort.load(std::memory_order_acquire) == kWriting) sched_yield();
  g.report = g.header->report;
  return g.failed = g.report.code;
}

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

void wake_sleepers(NdGroup& g) {
  syscall(SYS_futex, &g.parts[g.rank].control.flag.seq, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int wait_event_slow(NdGroup& g, int peer, uint64_t seq) {
  Control& control = g.parts[peer].control;
  const uint64_t begin = now_ns();
  uint64_t now = begin;
  int code = 0;
  g.awaited = seq;
  while (code == 0) {
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (has_arrived(g, peer, seq)) {
        g.stats.wait_ns += now_ns() - begin;
        return 0;
      }
      cpu_relax();
    }
    now = now_ns();
    if (now - begin < g.options.spin_ns) continue;
    code = check_wait(g, peer, seq, now);
    if (code == 0 && now - begin < g.options.spin_ns + kYieldNs)
      sched_yield();
    else if (code == 0)
      sleep_on(control, seq);
  }
  g.stats.wait_ns += now - begin;
  return code;
}

int meet(NdGroup& g, int peer, uint64_t seq) {
  if (const int rc = wait_event(g, peer, seq)) return rc;
  const NdCall theirs = call_of(g, peer);
  return memcmp(&theirs, &g.call, sizeof theirs) == 0 ? 0 : fail(g, -EPROTO, peer, theirs);
}

int fail(NdGroup& g, int code, int peer, const NdCall& theirs) {
  g.failed = code;
  const int pid = peer >= 0 ? g.parts[peer].control.identity.pid : 0;
  g.report = NdReport{code, g.rank, peer, pid, g.num_colls, g.call, theirs};
  for (int p = 0; p < g.world; ++p) {
    const bool joined = g.parts[p].control.identity.state.load(std::memory_order_acquire) != kEmpty;
    const bool here = p == g.rank || (joined && has_arrived(g, p, g.awaited));
    g.peer_state[p] = here ? 1 : (is_gone(g, p) ? -1 : 0);
  }
  uint32_t expected = kRunning;
  // acq_rel: the first reporter owns the report; release below makes it readable.
  if (g.header->abort.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) {
    g.header->report = g.report;
    g.header->abort.store(kAborted, std::memory_order_release);
  }
  return code;
}

}  // namespace nd

using namespace nd;

size_t nd_segment_bytes(int world) { return sizeof(Header) + sizeof(Part) * static_cast<size_t>(world); }

int nd_segment_create(int world, uint64_t nonce, const NdTuning* tuning, const uint64_t* node_masks,
                      int* out) {
  if (world < 1 || world > ND_MAX_WORLD) return -EINVAL;
  const size_t bytes = nd_segment_bytes(world);
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "numadist", 3u /* CLOEXEC | ALLOW_SEALING */));
  if (fd < 0) return -errno;
  int rc = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : -errno;
  // Nobody can pull the pages from under a rank: the size is final, and so are the seals.
  if (rc == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) rc = -errno;
  void* addr = MAP_FAILED;
  if (rc == 0) {
    addr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (addr == MAP_FAILED) rc = -errno;
  }
  if (rc == 0) {
    // The policy of a shared mapping belongs to the file: set once here, it holds for whichever rank faults a
    // page.
    Part* parts = reinterpret_cast<Part*>(static_cast<char*>(addr) + sizeof(Header));
    for (int r = 0; r < world && node_masks != nullptr && rc == 0; ++r)
      rc = nd_bind(&parts[r], sizeof(Part), node_masks + r * ND_NODE_WORDS);
    auto* header = static_cast<Header*>(addr);
    header->world = world;
    header->nonce = nonce;
    header->tuning = *tuning;
    header->abi_version = ND_ABI_VERSION;
    header->magic = kMagic;
    munmap(addr, bytes);
  }
  if (rc != 0)
    close(fd);
  else
    *out = fd;
  return rc;
}

// Check that fd is a segment made for exactly this group, and map it.
static int map_segment(int fd, int world, uint64_t nonce, size_t bytes, Header** out) {
  struct stat st;
  if (fstat(fd, &st) != 0) return -errno;
  if (static_cast<size_t>(st.st_size) != bytes) return -EPROTO;
  // Only a sealed segment cannot be truncated under us.
  if ((fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0) return -EPERM;
  void* addr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (addr == MAP_FAILED) return -errno;
  auto* header = static_cast<Header*>(addr);
  const bool ours = header->magic == kMagic && header->abi_version == ND_ABI_VERSION &&
                    header->world == world && header->nonce == nonce;
  // A forked child must not move this rank's flags; it has no use for the pages.
  const int rc = !ours ? -EPROTO : madvise(addr, bytes, MADV_DONTFORK) != 0 ? -errno : 0;
  if (rc != 0) munmap(addr, bytes);
  *out = header;
  return rc;
}

// Handle, mutex and per-peer arrays in one mapping that reads as zeros in a fork.
static int map_handle(int world, NdGroup** out) {
  const size_t n = static_cast<size_t>(world);
  const size_t bytes = sizeof(NdGroup) + sizeof(std::mutex) + n * (sizeof(int) + 1);
  void* addr = nullptr;
  if (const int rc = nd_map(bytes, &addr)) return rc;
  if (madvise(addr, bytes, MADV_WIPEONFORK) != 0) {
    const int rc = -errno;
    munmap(addr, bytes);
    return rc;
  }
  auto* g = static_cast<NdGroup*>(addr);
  g->mutex = new (g + 1) std::mutex;
  g->pidfds = reinterpret_cast<int*>(g->mutex + 1);
  g->peer_state = reinterpret_cast<int8_t*>(g->pidfds + world);
  for (int r = 0; r < world; ++r) g->pidfds[r] = -1;
  g->magic = kMagic;
  *out = g;
  return 0;
}

static size_t handle_bytes(const NdGroup* g) {
  return sizeof(NdGroup) + sizeof(std::mutex) + static_cast<size_t>(g->world) * (sizeof(int) + 1);
}

int nd_group_open(int fd, int rank, int world, uint64_t nonce, const NdOptions* options, NdGroup** out) {
  if (world < 1 || world > ND_MAX_WORLD || rank < 0 || rank >= world) return -EINVAL;
  Header* header = nullptr;
  const size_t bytes = nd_segment_bytes(world);
  if (const int rc = map_segment(fd, world, nonce, bytes, &header)) return rc;
  NdGroup* g = nullptr;
  if (const int rc = map_handle(world, &g)) {
    munmap(header, bytes);
    return rc;
  }
  g->header = header;
  g->parts = reinterpret_cast<Part*>(header + 1);
  g->bytes = bytes;
  g->rank = rank;
  g->world = world;
  g->options = *options;
  Identity& me = g->parts[rank].control.identity;
  uint32_t expected = kEmpty;
  me.pid = getpid();
  me.start_time = start_time_of(me.pid);
  sched_getaffinity(0, sizeof me.cpus, reinterpret_cast<cpu_set_t*>(me.cpus));
  // release: peers read pid, start time and affinity after they acquired the state.
  if (!me.state.compare_exchange_strong(expected, kOpened, std::memory_order_release)) {
    nd_group_close(g);
    return -EEXIST;
  }
  *out = g;
  return 0;
}

// Watch a peer process; -EOWNERDEAD when the pid is already gone or somebody else's.
static int watch_peer(NdGroup& g, int peer) {
  const Identity& id = g.parts[peer].control.identity;
  if (id.pid == getpid()) return 0;
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, id.pid, 0u));
  if (fd < 0) return errno == ESRCH ? -EOWNERDEAD : -errno;
  g.pidfds[peer] = fd;
  return start_time_of(id.pid) == id.start_time ? 0 : -EOWNERDEAD;
}

int nd_group_connect(NdGroup* group) {
  NdGroup& g = *group;
  g.call = NdCall{ND_CONNECT, 0, 0, 0, -1, 0};
  const uint64_t deadline = now_ns() + g.options.timeout_ns;
  uint64_t cpus[16] = {};
  for (int p = 0; p < g.world; ++p) {
    Identity& id = g.parts[p].control.identity;
    while (id.state.load(std::memory_order_acquire) == kEmpty) {
      if (g.header->abort.load(std::memory_order_acquire) != kRunning) return adopt_abort(g);
      if (now_ns() >= deadline) return fail(g, -ETIMEDOUT, p, NdCall{});
      // Processes may be seconds apart here, and must not starve the one that serves the store.
      const timespec pause{0, 100 * 1000};
      nanosleep(&pause, nullptr);
    }
    if (const int rc = watch_peer(g, p)) return rc == -EOWNERDEAD ? fail(g, rc, p, NdCall{}) : rc;
    for (int i = 0; i < 16; ++i) cpus[i] |= id.cpus[i];
  }
  int num_cpus = 0;
  for (const uint64_t word : cpus) num_cpus += __builtin_popcountll(word);
  // Spinning only pays while the awaited rank has a CPU of its own.
  if (g.world > num_cpus) g.options.spin_ns = 0;
  return 0;
}

int nd_group_close(NdGroup* g) {
  if (g == nullptr) return 0;
  if (g->magic != kMagic) return -ECHILD;
  Identity& me = g->parts[g->rank].control.identity;
  uint32_t opened = kOpened;
  if (me.pid == getpid()) me.state.compare_exchange_strong(opened, kClosed, std::memory_order_release);
  for (int r = 0; r < g->world; ++r)
    if (g->pidfds[r] >= 0) close(g->pidfds[r]);
  munmap(g->header, g->bytes);
  g->mutex->~mutex();
  munmap(g, handle_bytes(g));
  return 0;
}

int nd_group_set_timeout(NdGroup* g, uint64_t timeout_ns) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  g->options.timeout_ns = timeout_ns;
  return 0;
}

int nd_group_abort(NdGroup* g) {
  if (g->magic != kMagic) return -ECHILD;
  // Without the lock: a call that waits holds it, and this is what ends the wait.
  uint32_t expected = kRunning;
  if (g->header->abort.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) {
    g->header->report = NdReport{-ECANCELED, g->rank, g->rank, getpid(), 0, NdCall{}, NdCall{}};
    g->header->abort.store(kAborted, std::memory_order_release);
  }
  return 0;
}

int nd_group_report(NdGroup* g, NdReport* out) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  *out = g->report;
  return 0;
}

int nd_group_peers(NdGroup* g, int8_t* state) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  memcpy(state, g->peer_state, static_cast<size_t>(g->world));
  return 0;
}

int nd_group_stats(NdGroup* g, int reset, NdStats* out) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  *out = g->stats;
  if (reset) g->stats = NdStats{};
  return 0;
}
