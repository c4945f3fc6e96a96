"""run.py PROGRAM [ARGS]: call a program's main() in the default group and have rank 0 print what it returns.

Started by numarun or torchrun. The program asks for gloo, as its users do.
"""

import importlib
import json
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    name = sys.argv.pop(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = importlib.import_module(name).main()
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
