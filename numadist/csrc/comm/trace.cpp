#include "comm/trace.h"

#include <errno.h>

#include <algorithm>
#include <new>

#include "comm/sync.h"

namespace nd {
namespace {

// A program whose sizes never repeat must not fill the memory: from here on they share a row for each call.
constexpr size_t kMaxRows = 4096;

}  // namespace

void Trace::add(const NdCall& call, uint64_t total_ns, uint64_t wait_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Key key{call.coll, call.op, call.dtype, call.bytes};
  if (rows_.size() >= kMaxRows && rows_.find(key) == rows_.end()) std::get<3>(key) = ND_OTHER_BYTES;
  NdTraced& row = rows_[key];
  row.call = NdCall{call.coll, call.op, call.dtype, 0, -1, std::get<3>(key)};
  ++row.num_calls;
  row.total_ns += total_ns;
  row.wait_ns += wait_ns;
}

int Trace::rows(NdTraced* out, int capacity) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int n = 0;
  for (const auto& entry : rows_) {
    if (n < capacity) out[n] = entry.second;
    ++n;
  }
  return n;
}

}  // namespace nd

using namespace nd;

int nd_group_trace(NdGroup* g) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(*g->mutex);
  if (g->trace == nullptr) g->trace = new (std::nothrow) Trace;
  g->timed = true;
  return g->trace == nullptr ? -ENOMEM : 0;
}

int nd_group_traced(NdGroup* g, NdTraced* out, int capacity) {
  if (g->magic != kMagic) return -ECHILD;
  return g->trace == nullptr ? 0 : g->trace->rows(out, capacity);
}
