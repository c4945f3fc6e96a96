/* The timed loop of all_reduce.py: one source for our core and for every MPI, so that all are called and
 * timed alike.
 *
 * Built with -DWITH_MPI by an MPI's own mpicc, else against our core. bf16 has no MPI reduction, so the loop
 * brings one. */
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_MPI
#include <mpi.h>

static MPI_Op sum_bf16;

static float wide(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void add_bf16(void* in, void* inout, int* count, MPI_Datatype* type) {
  const uint16_t* a = in;
  uint16_t* b = inout;
  (void)type;
  for (int i = 0; i < *count; ++i) {
    float sum = wide(a[i]) + wide(b[i]);
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    b[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

/* The rank, or -1. */
int loop_open(void* unused) {
  int rank;
  (void)unused;
  if (MPI_Init(NULL, NULL) != MPI_SUCCESS || MPI_Comm_rank(MPI_COMM_WORLD, &rank) != MPI_SUCCESS) return -1;
  return MPI_Op_create(add_bf16, 1, &sum_bf16) == MPI_SUCCESS ? rank : -1;
}

void loop_close(void) { MPI_Finalize(); }

static int all_reduce(void* x, size_t bytes, int bf16) {
  return bf16 ? MPI_Allreduce(MPI_IN_PLACE, x, (int)(bytes / 2), MPI_UINT16_T, sum_bf16, MPI_COMM_WORLD)
              : MPI_Allreduce(MPI_IN_PLACE, x, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
#else
#include "nd_core.h"

static NdGroup* the_group;

int loop_open(void* group) {
  the_group = group;
  return 0;
}

static int all_reduce(void* x, size_t bytes, int bf16) {
  return bf16 ? nd_all_reduce(the_group, x, x, bytes / 2, ND_BF16, ND_SUM)
              : nd_all_reduce(the_group, x, x, bytes / 4, ND_F32, ND_SUM);
}
#endif

/* Ranks meet at this counter before each call. It is the loop's own: no system warms its caches by its
 * barrier. */
static _Atomic uint64_t* arrivals;
static uint64_t awaited;
static uint64_t num_ranks;

int loop_meet_in(const char* path, int ranks) {
  const int fd = open(path, O_RDWR);
  if (fd < 0) return -1;
  void* page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (page == MAP_FAILED) return -1;
  arrivals = page;
  num_ranks = (uint64_t)ranks;
  return 0;
}

static void meet(void) {
  awaited += num_ranks;
  atomic_fetch_add(arrivals, 1);
  for (int spins = 0; atomic_load(arrivals) < awaited; ++spins)
    if (spins > 10000) sched_yield();
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* seconds[i] of call i; the tensor is written before each, as a model would. only_copy: memcpy instead. 0, or
 * -1: a call failed or its sum is wrong. */
int loop_run(size_t bytes, int bf16, int only_copy, int calls, double* seconds) {
  const size_t count = bytes / (bf16 ? 2 : 4);
  char *x = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096),
       *y = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (x == NULL || y == NULL) return -1;
  int failed = 0; /* but go on: the other ranks meet this one */
  for (size_t k = 0; k < count; ++k) {
    const float one = 1.0f;
    if (bf16)
      memcpy(y + 2 * k, (const char*)&one + 2, 2);
    else
      memcpy(y + 4 * k, &one, 4);
  }
  for (int i = 0; i < calls; ++i) {
    memcpy(x, y, bytes);
    meet();
    const double begin = now();
    if (only_copy)
      memcpy(x, y, bytes);
    else
      failed |= all_reduce(x, bytes, bf16) != 0;
    seconds[i] = now() - begin;
  }
  if (!only_copy) {
    float sum = 0;
    memcpy((char*)&sum + (bf16 ? 2 : 0), x + (count - 1) * (bf16 ? 2 : 4), bf16 ? 2 : 4);
    failed |= sum != (float)num_ranks;
  }
  free(x);
  free(y);
  return failed ? -1 : 0;
}
