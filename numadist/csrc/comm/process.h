// Whether another process lives.
#ifndef ND_PROCESS_H
#define ND_PROCESS_H

#include <stdint.h>

namespace nd {

// Its death shows at the pidfd, or where the kernel or a container refuses those, in /proc.
struct Process {
  int32_t pid;  // 0: none
  int pidfd;
  uint64_t start_time;  // so that a pid used again is not taken for it
};

// In clock ticks since boot; 0 if there is no such process or only its remains.
uint64_t start_time_of(int pid);

// -ESRCH: it has ended.
int watch(Process* process, int pid);
bool has_ended(const Process& process);
void forget(Process* process);

}  // namespace nd

#endif
