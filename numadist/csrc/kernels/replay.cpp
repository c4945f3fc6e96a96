// A list of native calls made again, without the interpreter between them.
#include <errno.h>

#include <utility>

#include "nd_core.h"

namespace nd {
namespace {

using Caller = int64_t (*)(void (*function)(), const int64_t* args);

// Every argument is a pointer or an integer. In the calling conventions of x86-64 and AArch64 those are
// passed alike, as 64 bits, of which a function reads as many as it declares.
template <size_t... I>
int64_t call_with(void (*function)(), const int64_t* args, std::index_sequence<I...>) {
  return reinterpret_cast<int64_t (*)(decltype(static_cast<int64_t>(I))...)>(function)(args[I]...);
}

template <size_t Count>
int64_t call(void (*function)(), const int64_t* args) {
  return call_with(function, args, std::make_index_sequence<Count>());
}

template <size_t... Count>
constexpr auto callers(std::index_sequence<Count...>) {
  struct {
    Caller by_count[sizeof...(Count)];
  } all = {{call<Count>...}};
  return all;
}

constexpr auto kCallers = callers(std::make_index_sequence<ND_REPLAY_ARGS + 1>());

}  // namespace
}  // namespace nd

int nd_replay(const NdReplayCall* calls, size_t count, size_t* failed) {
  for (size_t i = 0; i < count; ++i) {
    const NdReplayCall& c = calls[i];
    if (c.num_args < 0 || c.num_args > ND_REPLAY_ARGS) return -EINVAL;
    const auto code = static_cast<int>(nd::kCallers.by_count[c.num_args](c.function, c.args));
    if (c.returns_code && code != 0) {
      *failed = i;
      return code;
    }
  }
  *failed = count;
  return 0;
}
