"""Time of an all-reduce, measured by the ranks that do it: `numarun ... -m numadist.costmodel.ranks FILE`."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from numadist.costmodel.profile import Table
from numadist.errors import NumadistError

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 5
_CALLS = {1 << 10: 200, 1 << 14: 200, 1 << 17: 50, 1 << 20: 20, 1 << 22: 5, 1 << 24: 2}
_TIMEOUT_S = 300


def all_reduce_us(options: list[str]) -> Table:
    """{bytes: microseconds} over the ranks that `numarun OPTIONS` starts. Raises: NumadistError."""
    with tempfile.TemporaryDirectory(prefix="numadist-") as folder:
        file = Path(folder) / "times.json"
        command = [sys.executable, "-m", "numadist.launch.cli", "--quiet", *options]
        command += ["-m", "numadist.costmodel.ranks", str(file)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if run.returncode:
            raise NumadistError(f"ranks that measure all_reduce failed:\n{run.stderr}")
        return {int(size): us for size, us in json.loads(file.read_text()).items()}


def main() -> None:
    """One rank. Rank 0 writes {bytes: best microseconds of one call}, as called from Python."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("numa")
    best = dict.fromkeys(SIZES, float("inf"))
    for _ in range(ROUNDS):
        for size in SIZES:
            x = torch.zeros(size // 4)
            dist.all_reduce(x)
            begin = time.perf_counter()
            for _ in range(_CALLS[size]):
                dist.all_reduce(x)
            best[size] = min(best[size], 1e6 * (time.perf_counter() - begin) / _CALLS[size])
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(best))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
