"""A process that ends while a future of a collective completes: its callbacks run to their end, nothing aborts."""

import pytest
from numarun_process import needs_two_cores, run

pytestmark = [pytest.mark.mp, needs_two_cores]

SCRIPT = """
import threading, time
import torch, torch.distributed as dist
from numadist.comm import works
works.END_S = {limit_s}
dist.init_process_group("numa")
never = torch.futures.Future()
began = threading.Event()

def slow(future):
    began.set()
    time.sleep(0.3)
    torch.ones(3).sum()
    print("result", float(future.value()[0][0]), flush=True)

def stuck(future):
    began.set()
    never.wait()

dist.all_reduce(torch.ones(4), async_op=True).get_future().then({callback})
began.wait()
{last}
"""


def end(tmp_path, callback, last="", limit_s=600.0):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(callback=callback, last=last, limit_s=limit_s))
    return run(path, "--quiet", "--nproc-per-node", "2")


def test_callbacks_of_a_future_run_before_the_process_ends(tmp_path):
    done = end(tmp_path, "slow")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result 2.0") == 2


def test_a_script_that_fails_meanwhile_ends_with_its_own_error(tmp_path):
    done = end(tmp_path, "slow", "raise SystemExit(3)")
    assert done.returncode == 3, done.stderr


def test_a_callback_that_waits_for_ever_does_not_keep_the_process(tmp_path):
    done = end(tmp_path, "stuck", limit_s=1.0)
    assert done.returncode == 0, done.stderr
