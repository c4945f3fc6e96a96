// Which instruction sets this process uses.
#include "isa.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "nd_core.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nd {
namespace {

// In the order of the enum.
#if defined(__x86_64__)
constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"};
#elif defined(__aarch64__)
constexpr const char* kNames[] = {"portable", "neon_dotprod"};
#else
constexpr const char* kNames[] = {"portable"};
#endif

#if defined(__x86_64__)
// The tiles are 8 KiB more to save for every thread: Linux gives them to processes that ask.
bool may_use_tiles() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // CPUID 7, EDX
  // asm/prctl.h has them since Linux 5.16.
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxBf16) && (edx & kAmxTile) &&
         syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

Isa find_isa() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")))
    return Isa::kPortable;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
    return Isa::kAvx2;
  if (!__builtin_cpu_supports("avx512vnni")) return Isa::kAvx512;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Vnni;
  return may_use_tiles() ? Isa::kAmxBf16 : Isa::kAvx512Bf16;
}
#elif defined(__aarch64__)
Isa find_isa() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? Isa::kNeonDotprod : Isa::kPortable; }
#else
Isa find_isa() { return Isa::kPortable; }
#endif

// Of the CPU; found once, so tiles are asked for once.
Isa cpu_isa() {
  static const Isa isa = find_isa();
  return isa;
}

constexpr int kUnknown = -1;
std::atomic<int> best{kUnknown};

}  // namespace

Isa best_isa() {
  // relaxed: the number is all there is, nothing else is published with it.
  int now = best.load(std::memory_order_relaxed);
  if (now == kUnknown) {
    const int found = static_cast<int>(cpu_isa());
    // Fails if another thread was faster, and then has what that one wrote, which may be a limit.
    if (best.compare_exchange_strong(now, found, std::memory_order_relaxed)) now = found;
  }
  return static_cast<Isa>(now);
}

bool isa_at(int i, Isa* out) {
  const int at = static_cast<int>(best_isa()) - i;
  if (i < 0 || at < 0) return false;
  *out = static_cast<Isa>(at);
  return true;
}

}  // namespace nd

const char* nd_isa_name(int i) {
  nd::Isa isa;
  return nd::isa_at(i, &isa) ? nd::kNames[static_cast<int>(isa)] : nullptr;
}

int nd_limit_isa(const char* name) {
  const auto same = [name](const char* known) { return strcmp(known, name) == 0; };
  const auto found = std::find_if(std::begin(nd::kNames), std::end(nd::kNames), same);
  if (found == std::end(nd::kNames)) return -EINVAL;
  const int limit = static_cast<int>(found - nd::kNames);
  nd::best.store(std::min(limit, static_cast<int>(nd::cpu_isa())), std::memory_order_relaxed);
  return 0;
}
