#include "comm/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace nd {

uint64_t start_time_of(int pid) {
  char path[64], text[1024];
  // With the dot: of its own process qemu-user answers the plain path itself, with a start time of its own.
  snprintf(path, sizeof path, "/proc/./%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  // "PID (NAME) STATE ..."; the start time is field 22. The name may hold anything.
  const char* p = strrchr(text, ')');
  if (p == nullptr || p[1] == 0 || p[2] == 'Z' || p[2] == 'X') return 0;
  for (int field = 2; p != nullptr && field < 22; ++field) p = strchr(p + 1, ' ');
  return p == nullptr ? 0 : strtoull(p, nullptr, 10);
}

int watch(Process* process, int pid) {
  process->pid = pid;
  process->pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0u));
  // After the pidfd: if both are of one process, it is this one.
  process->start_time = start_time_of(pid);
  if (process->start_time != 0) return 0;
  forget(process);
  return -ESRCH;
}

bool has_ended(const Process& process) {
  if (process.pid == 0) return false;
  if (process.pidfd < 0) return start_time_of(process.pid) != process.start_time;
  pollfd p{process.pidfd, POLLIN, 0};
  return poll(&p, 1, 0) == 1;
}

void forget(Process* process) {
  if (process->pid != 0 && process->pidfd >= 0) close(process->pidfd);
  *process = Process{};
}

}  // namespace nd
