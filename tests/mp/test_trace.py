"""NUMADIST_TRACE: files that tell what every process's collectives were."""

import json

import pytest
from numarun_process import needs_two_cores, run

pytestmark = [pytest.mark.mp, needs_two_cores]

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("numa")
pair = dist.new_group([0, 1])
for _ in range(7):
    dist.all_reduce(torch.ones(1000))
dist.all_reduce(torch.ones(1000, dtype=torch.bfloat16), dist.ReduceOp.MAX)
dist.broadcast(torch.ones(3, dtype=torch.int64), 0, group=pair)
dist.all_reduce(torch.ones(5), async_op=True).wait()
peer = 1 - dist.get_rank()
(dist.send if dist.get_rank() == 0 else dist.recv)(torch.ones(3), peer)
dist.destroy_process_group(pair)
"""


def test_calls_are_counted_by_group_operation_and_size(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(script, "--quiet", "--nproc-per-node", "2", "--env", f"NUMADIST_TRACE={tmp_path}/trace")
    assert done.returncode == 0, done.stderr
    for rank, message in enumerate(("send", "recv")):
        (path,) = tmp_path.glob(f"trace.r{rank}.*.json")
        rows = json.loads(path.read_text())
        counted = {(r["operation"], r["dtype"], r["bytes"]): r["calls"] for r in rows}
        wanted = {
            ("all_reduce SUM", "float32", 4000): 7,
            ("all_reduce MAX", "bfloat16", 2000): 1,
            ("broadcast", "int64", 24): 1,
            ("all_reduce SUM", "float32", 20): 1,
            (message, "float32", 12): 1,
        }
        assert counted == {**counted, **wanted}
        assert {r["num_ranks"] for r in rows} == {2}
        assert len({r["group"] for r in rows if r["operation"] in ("broadcast", "all_reduce MAX")}) == 2
        assert all(0 <= r["wait_ms"] <= r["total_ms"] for r in rows)
        assert sum(r["total_ms"] for r in rows) > 0
        text = path.with_suffix(".txt").read_text()
        assert len(text.splitlines()) == len(rows) + 1


def test_without_the_variable_nothing_is_written(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(script, "--quiet", "--nproc-per-node", "2", cwd=tmp_path)
    assert (done.returncode, [p.name for p in tmp_path.iterdir()]) == (0, ["script.py"])
