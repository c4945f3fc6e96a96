// Segments and group handles.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#include "comm/sync.h"

using namespace nd;

size_t nd_segment_bytes(int world) {
  const size_t n = static_cast<size_t>(world);
  return sizeof(Header) + n * (sizeof(Part) + n * sizeof(Channel));
}

static Part* parts_of(Header* header) { return reinterpret_cast<Part*>(header + 1); }
static Channel* channels_of(Header* header, int world) {
  return reinterpret_cast<Channel*>(parts_of(header) + world);
}

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
    // The policy of a shared mapping belongs to the file: set once here, it holds for whichever rank faults a page.
    auto* header = static_cast<Header*>(addr);
    for (int r = 0; r < world && node_masks != nullptr && rc == 0; ++r) {
      const uint64_t* nodes = node_masks + r * ND_NODE_WORDS;
      rc = nd_bind(&parts_of(header)[r], sizeof(Part), nodes);
      if (rc == 0) rc = nd_bind(&channels_of(header, world)[r * world], world * sizeof(Channel), nodes);
    }
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

int nd_segment_map(int fd, int world, uint64_t nonce, void** out) {
  if (world < 1 || world > ND_MAX_WORLD) return -EINVAL;
  const size_t bytes = nd_segment_bytes(world);
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
  *out = addr;
  return rc;
}

// Handle, mutex and per-peer arrays in one mapping that reads as zeros in a fork.
static int map_handle(int world, NdGroup** out) {
  const size_t n = static_cast<size_t>(world);
  const size_t bytes = sizeof(NdGroup) + 2 * sizeof(std::mutex) + n * (sizeof(Process) + 1);
  void* addr = nullptr;
  if (const int rc = nd_map(bytes, &addr)) return rc;
  if (madvise(addr, bytes, MADV_WIPEONFORK) != 0) {
    const int rc = -errno;
    munmap(addr, bytes);
    return rc;
  }
  auto* g = static_cast<NdGroup*>(addr);
  g->mutex = new (g + 1) std::mutex;
  g->report_mutex = new (g->mutex + 1) std::mutex;
  g->processes = reinterpret_cast<Process*>(g->report_mutex + 1);
  g->peer_state = reinterpret_cast<int8_t*>(g->processes + world);
  g->magic = kMagic;
  *out = g;
  return 0;
}

static size_t handle_bytes(const NdGroup* g) {
  return sizeof(NdGroup) + 2 * sizeof(std::mutex) + static_cast<size_t>(g->world) * (sizeof(Process) + 1);
}

int nd_group_open(int fd, int rank, int world, uint64_t nonce, const NdOptions* options, NdGroup** out) {
  void* segment = nullptr;
  if (rank < 0 || rank >= world) return -EINVAL;
  if (const int rc = nd_segment_map(fd, world, nonce, &segment)) return rc;
  const int rc = nd_group_open_mapped(segment, rank, world, options, out);
  if (rc == 0)
    (*out)->owns_segment = true;
  else
    munmap(segment, nd_segment_bytes(world));
  return rc;
}

int nd_group_open_mapped(void* segment, int rank, int world, const NdOptions* options, NdGroup** out) {
  if (world < 1 || world > ND_MAX_WORLD || rank < 0 || rank >= world) return -EINVAL;
  auto* header = static_cast<Header*>(segment);
  const size_t bytes = nd_segment_bytes(world);
  NdGroup* g = nullptr;
  if (const int rc = map_handle(world, &g)) return rc;
  g->header = header;
  g->parts = parts_of(header);
  g->channels = channels_of(header, world);
  g->bytes = bytes;
  g->rank = rank;
  g->world = world;
  g->options = *options;
  Identity& me = g->parts[rank].control.identity;
  uint32_t expected = kEmpty;
  if (!me.state.compare_exchange_strong(expected, kOpening, std::memory_order_relaxed)) {
    g->is_rank = false;
    nd_group_close(g);
    return -EEXIST;
  }
  g->is_rank = true;
  me.pid = getpid();
  me.start_time = start_time_of(me.pid);
  sched_getaffinity(0, sizeof me.cpus, reinterpret_cast<cpu_set_t*>(me.cpus));
  // release: peers read pid, start time and affinity after they acquired the state.
  me.state.store(kOpened, std::memory_order_release);
  int rc = open_mail(*g);
  if (rc == 0) rc = open_queue(*g);
  if (rc != 0)
    nd_group_close(g);
  else
    *out = g;
  return rc;
}

// Watch a peer process from here on. -EOWNERDEAD: it is gone, or its pid is somebody else's.
static int watch_peer(NdGroup& g, int peer) {
  const Identity& id = g.parts[peer].control.identity;
  Process& process = g.processes[peer];
  if (id.pid == getpid()) {  // ranks are threads
    forget(&process);
    return 0;
  }
  if (process.pid != id.pid) {
    forget(&process);
    watch(&process, id.pid);
  }
  if (process.start_time == id.start_time) return 0;
  // Who closed its handle may rightly be gone already: it had nothing to do in this group.
  return id.state.load(std::memory_order_acquire) == kClosed ? 0 : -EOWNERDEAD;
}

// The first rank that has not opened yet, world if there is none. -EOWNERDEAD: one never will, its process is gone.
static int first_missing(NdGroup& g, const int32_t* pids) {
  int first = g.world;
  for (int p = 0; p < g.world; ++p) {
    const Identity& id = g.parts[p].control.identity;
    if (id.state.load(std::memory_order_acquire) >= kOpened) continue;
    first = first < p ? first : p;
    if (pids == nullptr || pids[p] <= 0) continue;
    Process& process = g.processes[p];
    if (process.pid == 0 ? watch(&process, pids[p]) == 0 : !has_ended(process)) continue;
    // It may have opened, had nothing to do and left since we looked.
    if (id.state.load(std::memory_order_acquire) < kOpened)
      return fail(g, NdReport{-EOWNERDEAD, 0, p, pids[p], 0, g.call, NdCall{}});
  }
  return first;
}

int nd_group_connect(NdGroup* group, const int32_t* pids) {
  NdGroup& g = *group;
  g.call = NdCall{ND_CONNECT, 0, 0, 0, -1, 0};
  const uint64_t deadline = now_ns() + g.options.timeout_ns;
  for (;;) {
    const int missing = first_missing(g, pids);
    if (missing < 0) return missing;
    if (missing == g.world) break;
    if (g.header->abort.load(std::memory_order_acquire) != kRunning) return adopt_abort(g);
    if (now_ns() >= deadline) return fail_call(g, -ETIMEDOUT, missing, NdCall{});
    // Processes may be seconds apart here, and must not starve the one that serves the store.
    const timespec pause{0, 100 * 1000};
    nanosleep(&pause, nullptr);
  }
  uint64_t cpus[16] = {};
  for (int p = 0; p < g.world; ++p) {
    if (const int rc = watch_peer(g, p)) return fail_call(g, rc, p, NdCall{});
    for (int i = 0; i < 16; ++i) cpus[i] |= g.parts[p].control.identity.cpus[i];
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
  close_queue(*g);
  close_mail(*g);
  Identity& me = g->parts[g->rank].control.identity;
  if (g->is_rank) me.state.store(kClosed, std::memory_order_release);
  for (int r = 0; r < g->world; ++r) forget(&g->processes[r]);
  if (g->owns_segment) munmap(g->header, g->bytes);
  delete g->trace;
  g->mutex->~mutex();
  g->report_mutex->~mutex();
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
  const std::lock_guard<std::mutex> lock(*g->report_mutex);
  *out = g->report;
  return 0;
}

int nd_group_peers(NdGroup* g, int8_t* state) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->report_mutex);
  memcpy(state, g->peer_state, static_cast<size_t>(g->world));
  return 0;
}

int nd_group_history(NdGroup* g, NdCall calls[ND_HISTORY]) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  const uint64_t last = g->num_colls, count = last < ND_HISTORY ? last : ND_HISTORY;
  for (uint64_t i = 0; i < count; ++i) calls[i] = g->history[(last - count + 1 + i) % ND_HISTORY];
  return static_cast<int>(count);
}

int nd_group_stats(NdGroup* g, int reset, NdStats* out) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  *out = g->stats;
  if (reset) {
    g->stats = NdStats{};
    g->timed = true;
  }
  return 0;
}
