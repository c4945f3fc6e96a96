// Sums of tensors that all ranks have mapped: no copy into slots.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "comm/scope.h"

namespace nd {
namespace {

// Small enough for the first-level cache of all sources, large enough to keep a stream going.
constexpr size_t kStripeBytes = 4096;

// Whole lines for each rank, the last may have fewer.
struct Slices {
  size_t bytes;
  size_t slice;
  Slices(size_t total, int world)
      : bytes(total),
        slice(round_up((total + static_cast<size_t>(world) - 1) / static_cast<size_t>(world), kLine)) {}
  size_t begin(int rank) const { return std::min(bytes, slice * static_cast<size_t>(rank)); }
  size_t end(int rank) const { return begin(rank + 1); }
};

}  // namespace
}  // namespace nd

using namespace nd;

int nd_region_create(int world, size_t stride, const uint64_t* node_masks, int* out) {
  if (world < 1 || stride == 0 || stride % static_cast<size_t>(sysconf(_SC_PAGESIZE)) != 0) return -EINVAL;
  const size_t bytes = stride * static_cast<size_t>(world);
  const int fd =
      static_cast<int>(syscall(SYS_memfd_create, "numadist-region", 3u /* CLOEXEC | ALLOW_SEALING */));
  if (fd < 0) return -errno;
  int rc = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : -errno;
  if (rc == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) rc = -errno;
  void* addr = nullptr;
  if (rc == 0 && node_masks != nullptr) {
    rc = nd_region_map(fd, bytes, &addr);
    for (int r = 0; rc == 0 && r < world; ++r)
      rc = nd_bind(static_cast<Bytes*>(addr) + stride * static_cast<size_t>(r), stride,
                   node_masks + r * ND_NODE_WORDS);
    if (addr != nullptr) munmap(addr, bytes);
  }
  if (rc != 0)
    close(fd);
  else
    *out = fd;
  return rc;
}

int nd_region_map(int fd, size_t bytes, void** out) {
  struct stat st;
  if (fstat(fd, &st) != 0) return -errno;
  if (static_cast<size_t>(st.st_size) != bytes || (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0)
    return -EPROTO;
  void* addr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (addr == MAP_FAILED) return -errno;
  madvise(addr, bytes,
          MADV_HUGEPAGE);  // taken where shmem_enabled is `advise`; else there are none to be had
  *out = addr;
  return 0;
}

int nd_all_reduce_shared(NdGroup* g, void* const* bufs, size_t count, int dtype, int op, int32_t id) {
  Reduction r;
  if (const int rc = find_reduction(dtype, op, &r)) return rc;
  const size_t bytes = count * r.elem_bytes;
  Scope scope(g, ND_ALL_REDUCE_SHARED, bytes, id, dtype, op);
  if (scope.code != 0) return scope.code;
  publish(*g);  // my tensor may be read
  if (const int rc = wait_all(*g, g->seq, true)) return rc;
  const Slices slices(bytes, g->world);
  // Only this rank reads or writes its slice of any tensor until all are done, so the result may go where the
  // inputs are.
  for (size_t at = slices.begin(g->rank); at < slices.end(g->rank); at += kStripeBytes) {
    const size_t n = std::min(kStripeBytes, slices.end(g->rank) - at);
    const void* srcs[ND_MAX_WORLD];
    for (int p = 0; p < g->world; ++p) srcs[p] = static_cast<Bytes*>(bufs[p]) + at;
    auto* mine = static_cast<Bytes*>(bufs[g->rank]) + at;
    r.kernel(mine, srcs, g->world, n / r.elem_bytes);
    for (int s = 1; s < g->world; ++s) copy(static_cast<Bytes*>(bufs[peer_at(*g, s)]) + at, mine, n);
  }
  publish(*g);  // my slice is everywhere
  return wait_all(*g, g->seq, false);
}
