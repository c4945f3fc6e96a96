/* The native core of numadist: the whole interface, and its manual.
 *
 * Plain C: no torch, no Python. Every function returns 0 or a negative errno and never prints, throws or
 * aborts. Change a signature or a shared layout: bump ND_ABI_VERSION; numadist/_native.py checks it.
 *
 * A group is a memfd mapped by `world` ranks (processes, or threads in the tests). Life of one:
 *   1. nd_segment_create on rank 0
 *   2. nd_group_open(fd) and nd_group_connect on every rank; then the fd may be closed
 *   3. collectives and messages
 *   4. nd_group_close
 * Handles only: a process may hold many groups.
 *
 * Collectives are called by all ranks in the same order with the same arguments. A call that differs is
 * -EPROTO on every rank. A failed group stays failed: each later call returns the same code.
 *
 *   -ETIMEDOUT: a living peer did not come before the deadline
 *   -EOWNERDEAD: a peer process died
 *   -EPROTO: ranks called different operations, sizes, dtypes or roots
 *   -ECANCELED: the group was aborted by nd_group_abort
 *   -ECHILD: the handle was used in a fork of its process
 *   -EOPNOTSUPP: no kernel for this dtype and reduction; the group stays usable
 *   -EMSGSIZE: a received message has another size or dtype than the buffer; the group stays usable
 *
 * Calls on one group from several threads take turns.
 */
#ifndef ND_CORE_H
#define ND_CORE_H

#include <stddef.h>
#include <stdint.h>

#define ND_ABI_VERSION 17
#define ND_API __attribute__((visibility("default")))
#define ND_MAX_WORLD 512
#define ND_HISTORY 16
#define ND_NODE_WORDS 16 /* a set of memory nodes: 1024 bits */

#ifdef __cplusplus
extern "C" {
#endif

ND_API int nd_abi_version(void);

/* ==== memory ==== */

/* Private anonymous zero memory, page aligned; *out is unmapped with nd_unmap. */
ND_API int nd_map(size_t bytes, void** out);
ND_API int nd_unmap(void* addr, size_t bytes);

/* mbind(MPOL_BIND) the pages of [addr, addr+bytes) to a set of nodes, before they are touched. */
ND_API int nd_bind(void* addr, size_t bytes, const uint64_t nodes[ND_NODE_WORDS]);

/* The set the kernel keeps for the page of addr (it drops unusable nodes in silence); empty without a policy. */
ND_API int nd_bound_nodes(const void* addr, uint64_t nodes[ND_NODE_WORDS]);

/* Ask for huge pages; -EINVAL where the kernel has none. */
ND_API int nd_advise_huge(void* addr, size_t bytes);

/* Fault in every page of a writable range for writing, keeping its contents. */
ND_API int nd_touch(void* addr, size_t bytes);

/* nodes[i] = node of page i of a readable range (base pages), or a negative errno: there is none, it was not yet touched. */
ND_API int nd_page_nodes(const void* addr, size_t bytes, int32_t* nodes);

/* ==== reductions ==== */

typedef enum NdDtype {
  ND_F32 = 0,
  ND_F64,
  ND_F16,
  ND_BF16,
  ND_I8,
  ND_U8,
  ND_I16,
  ND_U16,
  ND_I32,
  ND_U32,
  ND_I64,
  ND_U64,
  ND_BOOL, /* one byte, 0 or 1: SUM and MAX are "or", PROD and MIN are "and" */
  ND_NUM_DTYPES
} NdDtype;

/* 16-bit floats are accumulated in f32 and rounded once. MIN and MAX carry a NaN on. AVG is for floats only. */
typedef enum NdOp { ND_SUM = 0, ND_AVG, ND_PROD, ND_MIN, ND_MAX, ND_BAND, ND_BOR, ND_BXOR, ND_NUM_OPS } NdOp;

/* Name of ISA variant i, best first, or NULL past the last one this CPU runs; the last is always "portable".
 * "amx_bf16" is there if Linux lets this process use the tiles, and differs in linear layers only. */
ND_API const char* nd_isa_name(int i);

/* From here on no kernel is better than `name`: portable, avx2, avx512, avx512_vnni, avx512_bf16 or amx_bf16, in this order; on Arm portable or neon_dotprod. Best
 * called first of all, since a number for nd_isa_name stands for another variant afterwards. What this CPU lacks is no
 * limit. -EINVAL: another name. */
ND_API int nd_limit_isa(const char* name);

/* dst[k] = srcs[0][k] op srcs[1][k] op ... in this order; dst may be one of srcs. isa: index for nd_isa_name. */
ND_API int nd_reduce_local(int isa, void* dst, const void* const* srcs, int num_srcs, size_t count, int dtype,
                           int op);

/* ==== groups ==== */

typedef struct NdGroup NdGroup;

/* Written to the segment by its creator, so ranks cannot disagree. */
typedef struct NdTuning {
  /* all_reduce of more than two ranks: up to here one-shot, above reduce-scatter and gather */
  uint64_t one_shot_bytes;
} NdTuning;

/* Own to each rank. */
typedef struct NdOptions {
  uint64_t timeout_ns; /* of one call */
  uint64_t spin_ns;    /* spin this long for a peer, then yield, then sleep on a futex */
} NdOptions;

/* One call, as it stands in the flag line of its rank and in reports. */
typedef struct NdCall {
  uint8_t coll; /* NdColl */
  uint8_t op;
  uint8_t dtype;
  uint8_t reserved;
  int32_t root;   /* of ND_SEND and ND_RECV the peer; -1: none */
  uint64_t bytes; /* of one rank's part; for all_to_all 0: its sizes are compared in the call itself */
} NdCall;

typedef enum NdColl {
  ND_BARRIER = 1,
  ND_ALL_REDUCE,
  ND_ALL_GATHER,
  ND_REDUCE_SCATTER,
  ND_BROADCAST,
  ND_SCATTER,
  ND_GATHER,
  ND_REDUCE,
  ND_ALL_TO_ALL,
  ND_CONNECT,
  ND_SEND,
  ND_RECV,
  ND_ALL_REDUCE_FUSED
} NdColl;

/* Why a group failed. */
typedef struct NdReport {
  int32_t code;     /* as returned */
  int32_t reporter; /* the rank that saw it first */
  int32_t peer;     /* the rank that was late, dead or different */
  int32_t peer_pid;
  uint64_t seq; /* number of the collective in its group, from 1 */
  NdCall mine;  /* the reporter's call */
  NdCall theirs;
} NdReport;

typedef struct NdStats {
  uint64_t num_calls;
  uint64_t total_ns;
  uint64_t wait_ns; /* of total_ns: waiting for peers */
} NdStats;

/* What calls of one kind cost this rank; of messages only their number. */
typedef struct NdTraced {
  NdCall call; /* without a root; bytes ND_OTHER_BYTES: all sizes beyond the first thousands */
  uint64_t num_calls;
  uint64_t total_ns;
  uint64_t wait_ns;
} NdTraced;
#define ND_OTHER_BYTES UINT64_MAX

/* A sealed memfd for `world` ranks. node_masks: world sets of nodes for each rank's part, or NULL for no
 * binding. nonce: any number both sides know; nd_group_open compares it. */
ND_API int nd_segment_create(int world, uint64_t nonce, const NdTuning* tuning, const uint64_t* node_masks,
                             int* fd);
ND_API size_t nd_segment_bytes(int world);

ND_API int nd_group_open(int fd, int rank, int world, uint64_t nonce, const NdOptions* options,
                         NdGroup** out);
/* The same in two steps, for ranks that are threads of one process and share a mapping (so that a thread sanitizer
 * sees who waits for whom). The segment is unmapped by nd_unmap(segment, nd_segment_bytes(world)). */
ND_API int nd_segment_map(int fd, int world, uint64_t nonce, void** segment);
ND_API int nd_group_open_mapped(void* segment, int rank, int world, const NdOptions* options, NdGroup** out);
/* Wait until every rank has opened; from here on peers are watched. pids: the processes that will open as
 * each rank, 0 where not known, or NULL; one of them that dies before is -EOWNERDEAD. */
ND_API int nd_group_connect(NdGroup* group, const int32_t* pids);
/* Release everything; NULL is allowed. Peers that still wait for this rank see -EOWNERDEAD. */
ND_API int nd_group_close(NdGroup* group);
ND_API int nd_group_set_timeout(NdGroup* group, uint64_t timeout_ns);
/* Make every rank's running and later calls return -ECANCELED; may be called from another thread. */
ND_API int nd_group_abort(NdGroup* group);
ND_API int nd_group_report(NdGroup* group, NdReport* out);
/* state[r]: 1 arrived at the collective of the report, 0 not arrived but alive, -1 dead or gone. */
ND_API int nd_group_peers(NdGroup* group, int8_t* state);
/* The last collectives this rank entered, oldest first; returns how many, at most ND_HISTORY. */
ND_API int nd_group_history(NdGroup* group, NdCall calls[ND_HISTORY]);
/* Calls are counted always, times from the first reset on. */
ND_API int nd_group_stats(NdGroup* group, int reset, NdStats* out);
/* From here on calls are counted by kind. To be called before any other. */
ND_API int nd_group_trace(NdGroup* group);
/* How many kinds there are; as many as fit are copied. */
ND_API int nd_group_traced(NdGroup* group, NdTraced* out, int capacity);

/* ==== collectives: what each rank passes and gets ==== */

/* in and out may be equal, not partly overlapping. Elements are aligned to their size. Sums are taken in rank
 * order on every rank, so all ranks get the same bits. */

ND_API int nd_barrier(NdGroup* group);
ND_API int nd_all_reduce(NdGroup* group, const void* in, void* out, size_t count, int dtype, int op);
/* Those that only move bytes take any number below 256 as dtype, just to compare it between ranks. */
/* outs[r] gets rank r's `bytes`. */
ND_API int nd_all_gather(NdGroup* group, const void* in, void* const* outs, size_t bytes, int dtype);
/* out = reduction over ranks of their ins[my rank]. */
ND_API int nd_reduce_scatter(NdGroup* group, const void* const* ins, void* out, size_t count, int dtype,
                             int op);
ND_API int nd_broadcast(NdGroup* group, void* buf, size_t bytes, int dtype, int root);
/* ins is read on the root only. */
ND_API int nd_scatter(NdGroup* group, const void* const* ins, void* out, size_t bytes, int dtype, int root);
/* outs is read on the root only. */
ND_API int nd_gather(NdGroup* group, const void* in, void* const* outs, size_t bytes, int dtype, int root);
/* out is written on the root only. */
ND_API int nd_reduce(NdGroup* group, const void* in, void* out, size_t count, int dtype, int op, int root);
/* Sizes in bytes, any of them 0. A size that its peer does not expect is -EPROTO. */
ND_API int nd_all_to_all(NdGroup* group, const void* const* ins, const size_t* in_bytes, void* const* outs,
                         const size_t* out_bytes, int dtype);

/* ==== all_reduce with what follows it in a transformer ==== */

/* On rows of `cols` elements, while each piece of the sum is in the cache:
 *   y = sum + bias + residual
 *   residual = y
 *   out = norm(y) * weight + norm_bias, or y without a norm
 * All in f32, rounded when stored; the norm reads the rounded y. What does not go row by row (rows above 64 KiB,
 * two-shot sums) has its sum rounded once more in between. f32, bf16 and f16; all pointers but out may be NULL. */

typedef enum NdNorm { ND_NO_NORM = 0, ND_RMS_NORM, ND_LAYER_NORM } NdNorm;

typedef struct NdEpilogue {
  size_t cols;
  const void* bias;      /* cols */
  void* residual;        /* rows x cols, read and written */
  const void* weight;    /* cols */
  const void* norm_bias; /* cols */
  int32_t norm;          /* NdNorm */
  float eps;
} NdEpilogue;

/* out may be in; without a norm also the residual. */
ND_API int nd_all_reduce_fused(NdGroup* group, const void* in, void* out, size_t rows, int dtype,
                               const NdEpilogue* epilogue);

/* ==== collectives as data, and in the background ==== */

/* Started calls run one after the other on a thread of the group, or on a thread that waits for them. A
 * direct call waits for those started before it. */

typedef struct NdTask NdTask;

/* What the direct call of `coll` takes; the rest is not read. Everything pointed to stays until the task is done. */
typedef struct NdArguments {
  int32_t coll;
  int32_t dtype;
  int32_t op;
  int32_t root;
  size_t count; /* elements of reductions, else bytes */
  const void* in;
  void* out; /* also the buffer of a broadcast */
  const void* const* ins;
  void* const* outs;
  const size_t* in_bytes;
  const size_t* out_bytes;
} NdArguments;

/* The direct call. */
ND_API int nd_run(NdGroup* group, const NdArguments* arguments);

#define ND_FOREVER UINT64_MAX
ND_API int nd_task_start(NdGroup* group, const NdArguments* arguments, NdTask** out);
/* 0: done, and *code is what the call returned. -ETIMEDOUT: still running; each call has its own deadline anyway. */
ND_API int nd_task_wait(NdGroup* group, NdTask* task, uint64_t timeout_ns, int* code);
/* -EBUSY while it runs. */
ND_API int nd_task_free(NdGroup* group, NdTask* task);

/* ==== messages between two ranks ==== */

/* Messages of one sender with one tag arrive in order. A message nobody waits for yet is kept in the receiver's heap,
 * so a send completes whenever the receiver makes any call on messages, or has one in the background. */

typedef struct NdRequest NdRequest;

/* The buffer must stay until the request is done. background: a thread moves it on without further calls. */
ND_API int nd_send_start(NdGroup* group, const void* buf, size_t bytes, int dtype, int peer, int tag,
                         int background, NdRequest** out);
/* peer -1: from any rank. */
ND_API int nd_recv_start(NdGroup* group, void* buf, size_t bytes, int dtype, int peer, int tag,
                         int background, NdRequest** out);
/* 0 when done; timeout_ns 0 is the group's. Late or lost peers fail the group. */
ND_API int nd_message_wait(NdGroup* group, NdRequest* request, uint64_t timeout_ns);
/* The same, but at the end of the time 1, and nobody has failed. */
ND_API int nd_message_poll(NdGroup* group, NdRequest* request, uint64_t timeout_ns);
/* 1 while it runs, else its code. */
ND_API int nd_message_test(NdGroup* group, NdRequest* request);
/* Of a finished receive: who sent it, how many bytes came, and of which dtype. */
ND_API int nd_message_source(NdRequest* request, uint64_t* bytes, int* dtype);
/* A receive that nothing has come for is withdrawn; -EBUSY for other running requests, unless the group failed. */
ND_API int nd_message_free(NdGroup* group, NdRequest* request);

/* ==== the program's OpenMP threads ==== */

/* The core links no OpenMP: it uses the runtime the program has loaded, so that its regions run on the
 * threads that torch's operators run on. Not thread-safe: once, before the first region. */
typedef struct NdTeam {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags); /* GOMP_parallel */
  int (*thread_index)(void); /* omp_get_thread_num */
  int (*num_threads)(void);  /* omp_get_num_threads */
} NdTeam;

/* Without it regions run on the caller alone. */
ND_API int nd_team_use(const NdTeam* team);
/* An empty region of as many threads as the caller's setting: how many they were, and how many of them no
 * nd_team_form had seen before. */
ND_API int nd_team_form(int* threads, int* fresh);

/* ==== linear layers for few rows ==== */

#define ND_SKINNY_ROWS 16

/* y = x * W^T + bias in bf16, summed in f32, by the isa-th kernel. x [rows][k], y [rows][n], bias [n] or
 * NULL. blob: W as oneDNN packs it, [ceil(n / width)][k / 2][width][2]; width is 32 on machines with AMX, 64
 * on others with AVX-512 BF16. -EINVAL: more than ND_SKINNY_ROWS rows, an odd k, another width. */
ND_API int nd_skinny_linear(int isa, const void* x, const void* blob, const void* bias, void* y, size_t rows,
                            size_t n, size_t k, size_t width);

/* The same in f32. blob: [ceil(n / width)][k][width], as oneDNN packs it; width: a multiple of 16 up to 64. */
ND_API int nd_skinny_linear_f32(int isa, const float* x, const float* blob, const float* bias, float* y,
                                size_t rows, size_t n, size_t k, size_t width);

/* The same for any number of rows on weights of 16 bits in a layout of ours, [ceil(n / width)][k][width]: x, blob,
 * bias and y of `dtype`, ND_BF16 or ND_F16; all is widened to f32 in registers or in pieces, summed, and rounded
 * once. width as above. scratch: nd_half_linear_scratch bytes. */
ND_API size_t nd_half_linear_scratch(size_t rows, size_t k);
ND_API int nd_half_linear(int isa, int dtype, const void* x, const void* blob, const void* bias, void* y,
                          void* scratch, size_t rows, size_t n, size_t k, size_t width);

/* ==== linear layers and tables of quantized weights ==== */

/* Scales of groups of 32 inputs, of every output:
 *   F16      w = scale * (code - 2^(bits - 1)), scale in f16
 *   F16_MIN  w = scale * code + minimum, both in f16
 *   I8_HALF  w = scale * factor * (code - 2^(bits - 1)): factor an int8 of 16 inputs, scale in f16 of 2^shared groups
 *   U8_MIN   w = scale * factor * code - minimum * other: factors uint8 of a group, both f16 of 2^shared groups */
typedef enum NdScales {
  ND_SCALES_F16 = 0,
  ND_SCALES_F16_MIN,
  ND_SCALES_I8_HALF,
  ND_SCALES_U8_MIN,
  ND_NUM_SCALES
} NdScales;

/* n outputs of k inputs in panels of 16 outputs; what is past n has scales of zero. A group's codes in 8 steps of 4
 * inputs: byte 4 * output + i of a step is input 4 * step + i. Of 8 bits: [panels][groups][8][64]. Of 4: [..][4][64],
 * step 2 s in the low half of the byte, 2 s + 1 in the high one. Of 5: so, and then [64] with the fifth bit of step s
 * in bit s. Scales: [panels][panel_scale_bytes], that is f16 [groups >> shared, rounded up][scale, minimum][16] and
 * factors [groups][2][16]. order: which input each of the 32 * groups places takes, -1 for none; NULL: in order, and
 * places past k take none. 4 bits go with all kinds but I8_HALF, so do 5; 8 with F16 and I8_HALF. */
typedef struct NdQuantized {
  const uint8_t* codes;
  const uint8_t* scales;
  const int32_t* order;
  size_t n, k, groups, panel_scale_bytes;
  int32_t bits, kind, shared;
} NdQuantized;

/* y = x * W^T + bias by the isa-th kernel; x [rows][k], y [rows][n], bias [n] or NULL, of `dtype`: ND_F32, ND_BF16 or
 * ND_F16. x is rounded to 8 bits by groups of 32, sums are f32. scratch: nd_quantized_linear_scratch bytes. -EINVAL for
 * a layout that is none. */
ND_API size_t nd_quantized_linear_scratch(size_t rows, size_t groups);
ND_API int nd_quantized_linear(int isa, int dtype, const void* x, const NdQuantized* weights,
                               const void* bias, void* y, void* scratch, size_t rows);
/* The same of a mixture: weights of `experts` that lie behind each other, n outputs each; rows up to ends[0] are for the
 * first, those up to ends[1] for the second and so on. -ERANGE: ends that go down, or not up to rows. */
ND_API int nd_quantized_experts(int isa, int dtype, const void* x, const NdQuantized* weights,
                                const int32_t* ends, size_t experts, void* y, void* scratch, size_t rows);
/* Outputs by their numbers, as rows of a table: out [count][k] of `dtype`. -ERANGE for a number that is none. */
ND_API int nd_quantized_lookup(int dtype, const NdQuantized* weights, const int64_t* outputs, size_t count,
                               void* out);

/* ==== the next token ==== */

/* For every row of logits, f32 or bf16: the bits of its highest value as f32, and first + its index; of equals the
 * first, and a NaN before all. out [rows][2]; row_stride in elements. -EINVAL: another dtype, no columns. */
ND_API int nd_argmax(const void* logits, int dtype, size_t rows, size_t cols, size_t row_stride,
                     int32_t first, int32_t* out);

/* ==== calls made again ==== */

#define ND_REPLAY_ARGS 48
typedef struct NdReplayCall {
  void (*function)(void); /* of any signature made of pointers and integers */
  const int64_t* args;
  int32_t num_args;     /* at most ND_REPLAY_ARGS */
  int32_t returns_code; /* its int result is 0 or -errno; otherwise the result does not count */
} NdReplayCall;

/* Calls in order. Stops at the first code, and returns it; *failed is the index of that call, count if all
 * are done. */
ND_API int nd_replay(const NdReplayCall* calls, size_t count, size_t* failed);

/* ==== attention ==== */

typedef enum NdMask { ND_MASK_NONE = 0, ND_MASK_BOOL, ND_MASK_BF16, ND_MASK_F32 } NdMask;

/* Sizes of a call. Strides are in elements, of batch, head and row; a row's elements lie side by side. Query
 * head h reads KV head h / (heads / kv_heads). */
typedef struct NdAttention {
  ptrdiff_t q_stride[3], k_stride[3], v_stride[3], mask_stride[3], out_stride[3];
  int32_t batch, heads, kv_heads, queries, keys;
  int32_t head_dim;  /* a multiple of 16, at most 256 */
  int32_t mask_kind; /* NdMask */
  int32_t causal;    /* query i sees keys 0 to i */
  float scale;
} NdAttention;

/* Of the isa-th kernel for a dtype, ND_F32, ND_BF16 or ND_F16; 0 for what it does not take. */
ND_API size_t nd_attention_scratch(int isa, int dtype, const NdAttention* sizes);
/* out = softmax(scale * q k^T + mask) v; products and softmax in f32, but the products of bf16 from AVX512-BF16 on,
 * where weights of more than one query are rounded to bf16. q, out: [batch, heads, queries, head_dim]. k, v: [batch,
 * kv_heads, keys, head_dim]. mask: [batch, heads, queries, keys], true where a query may look, or what is added. A
 * query that sees no key gives zeros. scratch: nd_attention_scratch bytes. -EINVAL for what it does not take. */
ND_API int nd_attention(int isa, int dtype, const NdAttention* sizes, const void* q, const void* k,
                        const void* v, const void* mask, void* out, void* scratch);

#ifdef __cplusplus
}
#endif
#endif
