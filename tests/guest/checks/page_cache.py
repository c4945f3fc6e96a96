# guest two_nodes: numarun --numa-nodes 0
"""A weights file whose page cache is on node 1, read by a rank on node 0: mapped, and through the loader."""

import json
import subprocess
import sys
from pathlib import Path

import torch

import numadist
from numadist.memory.local import local_empty
from numadist.sharding.placement import Shard
from numadist.weights.safetensors import SafetensorsCheckpoint

ROWS, COLUMNS = 1024, 1024
PATH = Path(
    "/tmp/weights.safetensors"
)  # the guest's /tmp is memory: its pages are where the writer's policy says

WRITE = f"""
import json, struct
from numadist.binding import bind_memory
assert bind_memory("bind", [1]) == (1,)
num_bytes = 4 * {ROWS} * {COLUMNS}
entry = {{"dtype": "F32", "shape": [{ROWS}, {COLUMNS}], "data_offsets": [0, num_bytes]}}
header = json.dumps({{"weight": entry}}).encode()
header += b" " * (-len(header) % 8)
with open("{PATH}", "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.5) * (num_bytes // 4))
"""

subprocess.run([sys.executable, "-c", WRITE], check=True)
mapped = torch.from_file(str(PATH), shared=True, size=PATH.stat().st_size, dtype=torch.uint8)
mapped.sum()
loaded = local_empty((ROWS, COLUMNS), torch.float32)
SafetensorsCheckpoint(PATH).read_into(loaded, "weight", Shard({}), 0)
result = {
    "mapped": numadist.page_nodes(mapped),
    "loaded": numadist.page_nodes(loaded),
    "right": bool((loaded == 1.5).all()),
}
print(json.dumps(result), flush=True)
