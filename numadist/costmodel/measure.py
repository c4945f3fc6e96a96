"""Measure a MachineProfile: every number is the best of interleaved rounds, because noise only ever adds time."""

import hashlib
import itertools
import os
import platform
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from numadist import binding
from numadist.costmodel.profile import VERSION, MachineProfile, Table, attention_kind
from numadist.errors import NumadistError
from numadist.kernels import attention as kernel
from numadist.kernels import half
from numadist.memory.tensors import empty
from numadist.topology.sysfs import read_machine

ROUNDS = 5
STREAM_BYTES = 256 << 20  # a node's buffer; far above any cache a node has to itself
CACHE_BYTES = 256 << 10
GEMM_ROWS = (1, 16, 128, 512, 1024)
GEMM_SIZE = (768, 3072)  # in, out features
ATTENTION_KEYS = (64, 128, 512, 1024)
HEADS, DEPTH = 12, 64
MASKS = ("", "causal", "dense")
DTYPES = ("float32", "bfloat16")
_MIN_BLOCK_S = 2e-3  # one timing spans at least so long

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def best_seconds(jobs: dict[Name, Call], rounds: int = ROUNDS) -> dict[Name, float]:
    """Smallest time of one call of each job, over interleaved rounds of blocks long enough for the clock."""
    calls = {}
    for name, job in jobs.items():
        job()
        begin = time.perf_counter()
        job()
        calls[name] = max(1, int(_MIN_BLOCK_S / max(time.perf_counter() - begin, 1e-7)))
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                job()
            best[name] = min(best[name], (time.perf_counter() - begin) / calls[name])
    return best


def measure(progress: Callable[[str], None], all_reduce_us: dict[int, Table]) -> MachineProfile:
    """The machine this process may use. all_reduce_us: measured by ranks of their own, see ranks.py.

    Changes this thread's affinity while it runs and restores it.
    """
    machine = read_machine()
    domains = [d for d in machine.domains if machine.memory_of(d.nodes)]
    cores = min(len(d.cores) for d in domains)
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    first = [core.cpus[0] for core in domains[0].cores[:cores]]
    try:
        progress("memory bandwidth")
        bandwidth = [
            [_stream_gbs([c.cpus[0] for c in d.cores], machine.memory_of(m.nodes)[0]) for m in domains]
            for d in domains
        ]
        core_gbs = _stream_gbs(first[:1], machine.memory_of(domains[0].nodes)[0])
        progress("linear layers and attention")
        with torch.no_grad():
            rates = _in_thread(first[:1], _rates)
            scaling = _speedup(first)
            cache_gbs, op_us = _in_thread(first[:1], _small_ops)
            region_us = _in_thread(first, _region_us) if len(first) > 1 else 0.0
    finally:
        binding.bind_cpus(affinity)
        torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    how = f"measured: best of {ROUNDS} interleaved rounds, load average {load:.1f}, torch {torch.__version__}"
    return MachineProfile(
        name=platform.node(),
        nodes=len(domains),
        cores_per_node=cores,
        bandwidth_gbs=tuple(map(tuple, bandwidth)),
        core_gbs=core_gbs,
        cache_gbs=cache_gbs,
        gemm_gflops=rates["linear"],
        attention_gflops=rates["attention"],
        own_attention_gflops=rates["own_attention"],
        speedup=scaling,
        all_reduce_us=all_reduce_us,
        region_us=region_us,
        op_us=op_us,
        clock_ghz=_clock_ghz(),
        l2_bytes=_l2_bytes(),
        remote_ns=100.0,
        sources={
            **dict.fromkeys(
                (
                    *("nodes", "cores_per_node", "bandwidth_gbs", "core_gbs", "cache_gbs", "gemm_gflops"),
                    *("attention_gflops", "own_attention_gflops", "speedup"),
                    *("all_reduce_us", "region_us", "op_us"),
                ),
                how,
            ),
            "clock_ghz": "/proc/cpuinfo",
            "l2_bytes": "sysfs",
            "remote_ns": "not measured: a usual value, used by no price of our own software",
        },
    )


def _in_thread(cpus: Iterable[int], job: Callable[[], object]):
    """job() in a fresh thread with an OpenMP team of its own on `cpus`."""
    cpus = list(cpus)

    def run() -> object:
        binding.bind_cpus(cpus)
        torch.set_num_threads(len(cpus))
        with torch.no_grad():
            return job()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _stream_gbs(cpus: list[int], node: int) -> float:
    """All `cpus` reading one node's memory."""

    def run() -> float:
        buffer = empty((STREAM_BYTES // 8,), torch.int64, numa_node=node)
        seconds = best_seconds({"read": lambda: buffer.sum()})["read"]
        return STREAM_BYTES / seconds / 1e9

    return _in_thread(cpus, run)


def _linear_job(rows: int, dtype: torch.dtype) -> Call:
    """A linear layer with packed weights, as frozen graphs run it."""
    k, n = GEMM_SIZE
    x, weight, bias = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    if half.pays(dtype):
        panels = half.pack(weight)
        return lambda: half.half_linear(x, panels, bias, n)
    if not torch.backends.mkldnn.is_available():
        return lambda: torch.nn.functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def attention_jobs(seq: int, dtype: torch.dtype, mask: str) -> dict[str, Call]:
    """The same attention by torch's kernel and, where ranks would use it on this machine, by ours."""
    q, k, v = (torch.randn(1, HEADS, seq, DEPTH).to(dtype) for _ in range(3))
    dense = torch.ones(seq, seq, dtype=torch.bool).tril()[None, None] if mask == "dense" else None
    is_causal = mask == "causal"
    sdpa = torch.nn.functional.scaled_dot_product_attention
    jobs: dict[str, Call] = {"attention": lambda: sdpa(q, k, v, dense, is_causal=is_causal)}
    if kernel.pays(DEPTH, dtype, None if dense is None else dense.dtype, is_causal):
        ours = torch.ops.numadist.attention.default
        jobs["own_attention"] = lambda: ours(q, k, v, dense, is_causal, DEPTH**-0.5)
    return jobs


def _rates() -> dict[str, dict[str, Table]]:
    """{linear | attention | own_attention: tables of GFLOP/s by dtype, or kind of attention}."""
    jobs: dict[tuple[str, str, int], Call] = {}
    flops: dict[tuple[str, str, int], float] = {}
    for dtype in DTYPES:
        for rows in GEMM_ROWS:
            jobs["linear", dtype, rows] = _linear_job(rows, getattr(torch, dtype))
            flops["linear", dtype, rows] = 2.0 * rows * GEMM_SIZE[0] * GEMM_SIZE[1]
        for mask, seq in itertools.product(MASKS, ATTENTION_KEYS):
            for what, job in attention_jobs(seq, getattr(torch, dtype), mask).items():
                key = what, attention_kind(dtype, mask), seq
                jobs[key], flops[key] = job, 4.0 * HEADS * seq * seq * DEPTH
    rates: dict[str, dict[str, Table]] = {"linear": {}, "attention": {}, "own_attention": {}}
    for (what, kind, size), seconds in best_seconds(jobs).items():
        rates[what].setdefault(kind, {})[size] = flops[what, kind, size] / seconds / 1e9
    return rates


def _speedup(cpus: list[int]) -> Table:
    """Of a linear layer on the first n cores of a node over one core, n in powers of two and all."""
    counts = sorted({1 << i for i in range(len(cpus).bit_length()) if 1 << i <= len(cpus)} | {len(cpus)})
    seconds = {
        n: _in_thread(cpus[:n], lambda: best_seconds({"x": _linear_job(512, torch.float32)})["x"])
        for n in counts
    }
    return {n: max(1.0, seconds[1] / seconds[n]) for n in counts}


def _small_ops() -> tuple[float, float]:
    """(GB/s of reading and writing within a core's cache, microseconds of an op on almost nothing)."""
    data, tiny = torch.ones(CACHE_BYTES // 8), torch.ones(8)
    out, tiny_out = torch.empty_like(data), torch.empty_like(tiny)
    seconds = best_seconds(
        {"copy": lambda: torch.mul(data, 2.0, out=out), "tiny": lambda: torch.mul(tiny, 2.0, out=tiny_out)}
    )
    moved = 2 * data.numel() * data.element_size()
    return moved / max(seconds["copy"] - seconds["tiny"], 1e-9) / 1e9, 1e6 * seconds["tiny"]


def _region_us() -> float:
    """An op split over the team beside the same op just too small to be split."""
    grain = 32768  # at::internal::GRAIN_SIZE: fewer elements stay on one thread
    small, large = torch.ones(grain), torch.ones(2 * grain)
    small_out, large_out = torch.empty_like(small), torch.empty_like(large)
    seconds = best_seconds(
        {
            "one": lambda: torch.mul(small, 2.0, out=small_out),
            "team": lambda: torch.mul(large, 2.0, out=large_out),
        }
    )
    return max(0.0, 1e6 * (seconds["team"] - seconds["one"]))


def _clock_ghz() -> float:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return float(line.partition(":")[2]) / 1e3
    return 1.0


def _l2_bytes() -> int:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.rstrip("KM")) * (1 << 20 if text.endswith("M") else 1 << 10)
    except (OSError, ValueError):
        return 1 << 20


def cache_file() -> Path:
    """Where this machine's profile is kept: a name for its topology, CPU model, kernel, torch and what is measured.

    A pinned rank finds the file that the whole machine wrote, so what this process may use is not in the name.
    """
    machine = read_machine()
    topology = [(n.id, n.online_cpus, sorted(n.distances.items())) for n in machine.nodes]
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line for line in info if line.startswith("model name")), platform.machine())
    words = repr((VERSION, machine.online_cpus, topology, model, platform.release(), torch.__version__))
    key = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
    return Path.home() / ".cache" / "numadist" / f"profile-{key}.json"


def kept_profile() -> MachineProfile:
    """The profile `numadist profile` kept for this machine. Raises: NumadistError if there is none."""
    path = cache_file()
    if not path.exists():
        raise NumadistError(
            f"no profile of this machine ({path}): run `numadist profile` once, or pass profile="
        )
    return MachineProfile.load(path)


def save_atomically(profile: MachineProfile, path: Path) -> None:
    """Ranks may read while another process writes. Raises: NumadistError if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(profile.to_json())
        Path(file.name).replace(path)
    except OSError as error:
        raise NumadistError(f"cannot keep the profile in {path.parent}: {error.strerror}") from error
