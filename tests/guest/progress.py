"""An emulated machine is as slow as what else this one does: it may run as long as it gets on."""

import contextlib
import subprocess
from pathlib import Path

import psutil

# A guest that in STALL_S neither writes nor computes for STALL_CPU_S is hung: an idle one takes some percent of a CPU.
STALL_S, STALL_CPU_S = 240.0, 24.0


def ends(
    run: subprocess.Popen, share: Path, stall_s: float = STALL_S, stall_cpu_s: float = STALL_CPU_S
) -> bool:
    """Wait for the guest's end; False: it got stuck and was ended. share: the folder it writes to."""
    seen = progress(run, share)
    while True:
        try:
            run.wait(stall_s)
            return True
        except subprocess.TimeoutExpired:
            before, seen = seen, progress(run, share)
            if seen[0] == before[0] and seen[1] < before[1] + stall_cpu_s:
                # The shell first: it would go on when what it waits for ends.
                for process in [run, *psutil.Process(run.pid).children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                run.wait()
                return False


def progress(run: subprocess.Popen, share: Path) -> tuple[int, float]:
    """Bytes that the guest wrote, and seconds of CPU time that its emulation took."""
    written = sum(path.stat().st_size for path in share.iterdir())
    computed = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                computed += sum(process.cpu_times()[:2])
    return written, computed
