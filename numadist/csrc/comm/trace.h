// What the calls of a group cost, by what they are. A group has a Trace only where one was asked for.
#ifndef ND_COMM_TRACE_H
#define ND_COMM_TRACE_H

#include <map>
#include <mutex>
#include <tuple>

#include "nd_core.h"

namespace nd {

class Trace {
 public:
  void add(const NdCall& call, uint64_t total_ns, uint64_t wait_ns);
  // How many rows there are; as many as fit are copied.
  int rows(NdTraced* out, int capacity);

 private:
  using Key = std::tuple<int, int, int, uint64_t>;  // call, operation, dtype, bytes
  std::mutex mutex_;                                // collectives and messages have none in common
  std::map<Key, NdTraced> rows_;
};

}  // namespace nd

#endif
