"""C++ text of the matrix products that benchmarks/gemm_search.py searches among: micro-kernels and one driver.

A micro-kernel computes C[R x 16V] (+)= A[R x k] B[k x 16V] in R * V registers of sums; B is a packed panel. bf16 goes
by pairs of k, as the instruction takes it. The driver interprets a program: which kernel, slices, threads.
"""

REGISTERS = 32
ROWS = (*range(1, 11), 12, 14, 16, 20, 24, 28)
VECTORS = (1, 2, 3, 4, 6, 8)
LANES = 16

_TYPES = {
    "float32": {
        "elem": "float",
        "step": 1,
        "load": "_mm512_loadu_ps(b + 16 * v)",
        "vector": "__m512",
        "spread": "_mm512_set1_ps(a[r * lda + k])",
        "add": "_mm512_fmadd_ps(x, w[v], {sum})",
        "target": "avx512f",
    },
    "bfloat16": {
        "elem": "uint16_t",
        "step": 2,
        "load": "(__m512bh)_mm512_loadu_si512(b + 32 * v)",
        "vector": "__m512bh",
        "spread": "(__m512bh)_mm512_set1_epi32(pair_at(a + r * lda + k))",
        "add": "_mm512_dpbf16_ps({sum}, x, w[v])",
        "target": "avx512f,avx512bf16",
    },
}


def feasible(rows: int, vectors: int) -> bool:
    """Whether sums, a row of weights and one spread element fit the registers."""
    return rows * vectors + vectors + 1 <= REGISTERS


def candidates(num_columns: int) -> list[tuple[int, int]]:
    """(rows, vectors) of the kernels whose panels cut that many columns evenly."""
    return [(r, v) for v in VECTORS for r in ROWS if feasible(r, v) and num_columns % (LANES * v) == 0]


def source(dtype: str) -> str:
    """One C++ file: a kernel for every feasible number of rows and vectors, what is left over at an edge included."""
    most = {v: max(r for r in ROWS if feasible(r, v)) for v in VECTORS}
    names = {(r, v): f"kernel_{r}_{v}" for v in VECTORS for r in range(1, most[v] + 1)}
    table = ",\n".join(f"  {{{r}, {v}, {name}}}" for (r, v), name in names.items())
    return "\n".join(
        [
            _HEAD.format(**_TYPES[dtype]),
            *(_kernel(dtype, r, v, name) for (r, v), name in names.items()),
            f"static const Entry entries[] = {{\n{table}\n}};",
            _DRIVER,
        ]
    )


def _kernel(dtype: str, rows: int, vectors: int, name: str) -> str:
    """Few sums wait for the latency of the multiplier: then several sets of them take turns over k."""
    kind = _TYPES[dtype]
    sets = 1
    while rows * vectors * sets < 8 and rows * vectors * sets * 2 <= REGISTERS - vectors - 1:
        sets *= 2
    advance = kind["step"] * sets
    body = []
    for s in range(sets):
        add = kind["add"].format(sum=f"sum[{s}][r][v]")
        body.append(
            f"""    {{
      const Elem* b = panel + (k0 + {kind["step"] * s}) * {LANES * vectors};
      const long k = k0 + {kind["step"] * s};
      {kind["vector"]} w[{vectors}];
      for (int v = 0; v < {vectors}; ++v) w[v] = {kind["load"]};
      for (int r = 0; r < {rows}; ++r) {{
        const {kind["vector"]} x = {kind["spread"]};
        for (int v = 0; v < {vectors}; ++v) sum[{s}][r][v] = {add};
      }}
    }}"""
        )
    loops = "\n".join(body)
    return f"""
static void {name}(const Elem* a, long lda, const Elem* panel, float* c, long ldc, long kc, bool first) {{
  __m512 sum[{sets}][{rows}][{vectors}];
  for (auto& set : sum) for (auto& row : set) for (auto& v : row) v = _mm512_setzero_ps();
  for (long k0 = 0; k0 < kc; k0 += {advance}) {{
{loops}
  }}
  for (int r = 0; r < {rows}; ++r)
    for (int v = 0; v < {vectors}; ++v) {{
      __m512 total = sum[0][r][v];
      for (int s = 1; s < {sets}; ++s) total = _mm512_add_ps(total, sum[s][r][v]);
      float* at = c + r * ldc + 16 * v;
      _mm512_storeu_ps(at, first ? total : _mm512_add_ps(total, _mm512_loadu_ps(at)));
    }}
}}"""


_HEAD = """#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#pragma GCC target("{target}")
using Elem = {elem};

static inline int pair_at(const uint16_t* p) {{
  int pair;
  memcpy(&pair, p, 4);
  return pair;
}}

using Kernel = void (*)(const Elem*, long, const Elem*, float*, long, long, bool);
struct Entry {{ int rows, vectors; Kernel kernel; }};
"""

_DRIVER = """
struct Program { long rows, vectors, mc, nc, kc, tm, tn; };
struct Call {
  Program p;
  const Elem* a;   // [m][k]
  const Elem* b;   // [n / width][k][width]
  float* c;        // [m][n]
  long m, n, k;
  int (*thread_index)();
};

static Kernel find(long rows, long vectors) {
  for (const Entry& e : entries)
    if (e.rows == rows && e.vectors == vectors) return e.kernel;
  return nullptr;
}

static void run_block(const Call& q, long m0, long m1, long n0, long n1) {
  const Program& p = q.p;
  const long width = 16 * p.vectors;
  const Kernel whole = find(p.rows, p.vectors);
  for (long n = n0; n < n1; n += p.nc)
    for (long k = 0; k < q.k; k += p.kc)
      for (long m = m0; m < m1; m += p.mc)
        for (long column = n; column < std::min(n + p.nc, n1); column += width)
          for (long row = m; row < std::min(m + p.mc, m1); row += p.rows) {
            const long rows = std::min(p.rows, std::min(m + p.mc, m1) - row);
            const Kernel kernel = rows == p.rows ? whole : find(rows, p.vectors);
            kernel(q.a + row * q.k + k, q.k, q.b + column * q.k + k * width, q.c + row * q.n + column, q.n,
                   std::min(p.kc, q.k - k), k == 0);
          }
}

// Thread (i, j) of tm x tn has a block of whole slices; neighbours share rows.
static void my_block(void* data) {
  const Call& q = *static_cast<const Call*>(data);
  const Program& p = q.p;
  const long thread = q.thread_index(), i = thread / p.tn, j = thread % p.tn;
  if (i >= p.tm) return;
  const long ms = (q.m + p.mc - 1) / p.mc, ns = (q.n + p.nc - 1) / p.nc;
  run_block(q, ms * i / p.tm * p.mc, std::min(q.m, ms * (i + 1) / p.tm * p.mc), ns * j / p.tn * p.nc,
            std::min(q.n, ns * (j + 1) / p.tn * p.nc));
}

extern "C" void run(const Call* call, void (*parallel)(void (*)(void*), void*, unsigned, unsigned)) {
  if (call->p.tm * call->p.tn == 1)
    run_block(*call, 0, call->m, 0, call->n);
  else
    parallel(my_block, const_cast<Call*>(call), static_cast<unsigned>(call->p.tm * call->p.tn), 0);
}
"""
