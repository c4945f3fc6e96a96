"""torchrun's restarts: FOLDER; in the first life rank 1 fails while rank 0 waits for it, the second one sums."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    x = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    if life == 0:
        if dist.get_rank() == 1:
            os._exit(3)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            (Path(sys.argv[1]) / "seen").write_text(f"{type(error).__name__}: {error}")
            raise
    if dist.get_rank() == 0:
        print("RESULT", json.dumps({"life": life, "sum": x[0].item()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
