// Memory on chosen nodes: raw system calls, so that libnuma is not needed.
#include <errno.h>
#include <linux/mempolicy.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nd_core.h"

namespace {

// The kernel counts one bit less than it is told (get_nodes in mm/mempolicy.c), hence the + 1.
constexpr unsigned long kMaxNode = ND_NODE_WORDS * 64 + 1;

size_t page_size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Whole pages covering a range; tensors need not start on a page.
struct Pages {
  char* first;
  size_t count;
  Pages(const void* addr, size_t bytes) {
    const size_t page = page_size();
    const auto begin = reinterpret_cast<uintptr_t>(addr);
    first = reinterpret_cast<char*>(begin / page * page);
    count = bytes == 0 ? 0 : (begin + bytes - 1) / page - begin / page + 1;
  }
};

}  // namespace

int nd_abi_version(void) { return ND_ABI_VERSION; }

int nd_map(size_t bytes, void** out) {
  void* addr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (addr == MAP_FAILED) return -errno;
  *out = addr;
  return 0;
}

int nd_unmap(void* addr, size_t bytes) { return munmap(addr, bytes) == 0 ? 0 : -errno; }

int nd_bind(void* addr, size_t bytes, const uint64_t nodes[ND_NODE_WORDS]) {
  // The kernel accepts an empty set here as "no policy", which is not what a caller who binds wants.
  bool any = false;
  for (int i = 0; i < ND_NODE_WORDS; ++i) any |= nodes[i] != 0;
  if (!any) return -EINVAL;
  return syscall(SYS_mbind, addr, bytes, MPOL_BIND, nodes, kMaxNode, 0) == 0 ? 0 : -errno;
}

int nd_bound_nodes(const void* addr, uint64_t nodes[ND_NODE_WORDS]) {
  int mode = 0;
  memset(nodes, 0, ND_NODE_WORDS * sizeof(uint64_t));
  if (syscall(SYS_get_mempolicy, &mode, nodes, kMaxNode, addr, MPOL_F_ADDR) != 0) return -errno;
  return 0;
}

int nd_advise_huge(void* addr, size_t bytes) { return madvise(addr, bytes, MADV_HUGEPAGE) == 0 ? 0 : -errno; }

int nd_touch(void* addr, size_t bytes) {
  const Pages pages(addr, bytes);
  const size_t page = page_size();
  if (pages.count == 0) return 0;
#ifdef MADV_POPULATE_WRITE
  // Reports a failed fault as an errno, where touching by hand would be a signal. Kernels before 5.14: EINVAL.
  if (madvise(pages.first, pages.count * page, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return -errno;
#endif
  auto* p = static_cast<volatile char*>(addr);
  for (size_t i = 0; i < bytes; i += page) p[i] = p[i];
  if (bytes > 0) p[bytes - 1] = p[bytes - 1];
  return 0;
}

// move_pages knows no node (ENOENT, of a huge page EFAULT) of what the kernel moves just now, to make room for huge pages,
// or has marked to see who uses it (automatic NUMA balancing). Such a page is resident, which one never touched is not, and
// reading it waits for the end of the move and takes the mark away.
static bool read_if_hidden(void* page, int32_t node) {
  unsigned char resident = 0;
  if (node >= 0 || mincore(page, page_size(), &resident) != 0 || !(resident & 1)) return false;
  static_cast<void>(*static_cast<volatile char*>(page));
  return true;
}

constexpr size_t kBatch = 1024;

// The nodes of n pages, at most kBatch; 0 or -errno. *tries: how often those that were hidden may still be asked for again.
static int batch_nodes(char* first, size_t n, int* tries, int32_t* nodes) {
  void* asked[kBatch];
  size_t index[kBatch];
  int32_t seen[kBatch];
  const size_t page = page_size();
  for (size_t i = 0; i < n; ++i) {
    asked[i] = first + i * page;
    index[i] = i;
  }
  for (;;) {
    // Without target nodes move_pages moves nothing and reports where each page is.
    if (syscall(SYS_move_pages, 0, n, asked, nullptr, seen, 0) != 0) return -errno;
    size_t again = 0;
    for (size_t i = 0; i < n; ++i) {
      nodes[index[i]] = seen[i];
      if (!read_if_hidden(asked[i], seen[i])) continue;
      index[again] = index[i];
      asked[again++] = asked[i];
    }
    n = again;
    if (n == 0 || *tries == 0) return 0;
    --*tries;
  }
}

int nd_page_nodes(const void* addr, size_t bytes, int32_t* nodes) {
  const Pages pages(addr, bytes);
  int tries = 200;  // of the whole range: the zero page is resident, yet on no node
  for (size_t done = 0; done < pages.count; done += kBatch) {
    const size_t n = pages.count - done < kBatch ? pages.count - done : kBatch;
    const int failed = batch_nodes(pages.first + done * page_size(), n, &tries, nodes + done);
    if (failed != 0) return failed;
  }
  return 0;
}
