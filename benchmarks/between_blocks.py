"""Between two blocks: all-reduce, then residual and norm as Inductor writes them, against `all_reduce_add_norm`.

    numarun --nproc-per-socket 2 benchmarks/between_blocks.py --rows 128 --cols 576 768 1024

Both in compiled graphs of many such places, in turn, on one pair of processes: microseconds a place, the lower quartile
of the rounds, and the ratio inside a round. This is why compiled models do not have the operator at short prompts:
Inductor's norm is as fast, and the operator's call takes longer.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from numadist.compare.statistics import Timing, ratio

PLACES = 16
EPS = 1e-5
Places = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def main() -> None:
    options = parse_options()
    dist.init_process_group("numa")
    torch.set_grad_enabled(False)
    for dtype in options.dtype:
        for cols in options.cols:
            for norm in ("rms", "layer"):
                measure(options, getattr(torch, dtype), cols, norm)
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cols", type=int, nargs="+", default=[576, 768, 1024])
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--rounds", type=int, default=200)
    return parser.parse_args()


def measure(options: argparse.Namespace, dtype: torch.dtype, cols: int, norm: str) -> None:
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(dist.get_rank())
    x, residual = (torch.randn(1, options.rows, cols, generator=draw).to(dtype) for _ in range(2))
    weight, bias = torch.ones(cols, dtype=dtype), torch.zeros(cols, dtype=dtype)
    dist.broadcast(residual, 0)
    systems = {"apart": torch.compile(apart(norm)), "joined": torch.compile(joined(norm))}
    results = [run(x.clone(), residual.clone(), weight, bias)[0] for run in systems.values()]
    torch.testing.assert_close(*results, rtol=0.1, atol=0.1)
    us: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(options.rounds):
        for name, run in systems.items():
            inputs = x.clone(), residual.clone(), weight, bias
            dist.barrier()
            begin = time.perf_counter()
            run(*inputs)
            us[name].append(1e6 * (time.perf_counter() - begin) / PLACES)
    if dist.get_rank() == 0:
        shown = ", ".join(f"{name} {statistics.quantiles(times)[0]:.1f} us" for name, times in us.items())
        speed = ratio(Timing(us["apart"]), Timing(us["joined"]))
        print(
            f"{dtype} {options.rows} x {cols} {norm:<5} {shown}, "
            f"apart / joined {speed.median:.2f} [{speed.low:.2f}-{speed.high:.2f}]",
            flush=True,
        )


def apart(norm: str) -> Places:
    """As compiled models have it."""
    group = dist.group.WORLD.group_name

    def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(PLACES):
            x = x.contiguous()
            torch.ops.numadist.all_reduce_(x, group)
            residual = x + residual
            if norm == "rms":  # as models spell it
                wide = residual.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
                x = weight * wide.to(x.dtype)
            else:
                x = F.layer_norm(residual, weight.shape, weight, bias, EPS)
        return x, residual

    return run


def joined(norm: str) -> Places:
    group = dist.group.WORLD.group_name

    def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        norm_bias = bias if norm == "layer" else None
        for _ in range(PLACES):
            x = torch.ops.numadist.all_reduce_add_norm(
                x, residual, None, weight, norm_bias, EPS, norm == "rms", group
            )
        return x, residual

    return run


if __name__ == "__main__":
    main()
