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

/* What the loop's ranks share. No system warms its caches by a barrier of its own. */
typedef struct {
  _Alignas(128) _Atomic uint64_t value;
} Line;

static struct {
  Line arrivals;
  Line rounds[31]; /* one a rank */
}* shared;
static uint64_t arrivals, rounds;
static int this_rank, num_ranks, patience;

int loop_meet_in(const char* path, int rank, int ranks) {
  const int fd = open(path, O_RDWR);
  if (fd < 0 || ranks > 31) return -1;
  void* page = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (page == MAP_FAILED) return -1;
  shared = page;
  this_rank = rank;
  num_ranks = ranks;
  patience = ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 1000 : 1; /* else the awaited rank needs this CPU */
  return 0;
}

static void wait_for(Line* line, uint64_t value) {
  for (int spins = 0; atomic_load_explicit(&line->value, memory_order_acquire) < value; ++spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause(); /* looking all the time would hold up the write that is waited for */
#endif
    if (spins >= patience) sched_yield();
  }
}

static void meet(void) {
  arrivals += (uint64_t)num_ranks;
  atomic_fetch_add(&shared->arrivals.value, 1);
  wait_for(&shared->arrivals, arrivals);
}

/* The least that any exchange takes: each rank writes a line of its own and reads everybody's. */
static void exchange_lines(void) {
  atomic_store_explicit(&shared->rounds[this_rank].value, ++rounds, memory_order_release);
  for (int p = 0; p < num_ranks; ++p) wait_for(&shared->rounds[p], rounds);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef enum { ALL_REDUCE, COPY, LINES } What;

/* seconds[i] of call i; the tensor is written before each, as a model would. 0, or -1: a call failed or its
 * sum is wrong. */
int loop_run(int what, size_t bytes, int bf16, int calls, double* seconds) {
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
    if (what == COPY)
      memcpy(x, y, bytes);
    else if (what == LINES)
      exchange_lines();
    else
      failed |= all_reduce(x, bytes, bf16) != 0;
    seconds[i] = now() - begin;
  }
  if (what == ALL_REDUCE) {
    float sum = 0;
    memcpy((char*)&sum + (bf16 ? 2 : 0), x + (count - 1) * (bf16 ? 2 : 4), bf16 ? 2 : 4);
    failed |= sum != (float)num_ranks;
  }
  free(x);
  free(y);
  return failed ? -1 : 0;
}
