"""Every machine looks alike to the tests; and in CI a skip that an installation would mend fails the run."""

import os
import tempfile

import pytest

from numadist.topology.sysfs import read_machine


def pytest_configure():
    """At most two cores, one CPU each, for the tests and all they start: what they expect is the same anywhere.

    A socket with hyperthreads, two sockets, a hundred cores: machines like these come as recordings and emulated.
    """
    cores = [core for core in read_machine().cores if core.node is not None][:2]
    if len(cores) == 2:
        os.sched_setaffinity(0, {core.cpus[0] for core in cores})
    # Inductor's cache does not ask for which instruction set its loops were made: 16 elements a step, of which AVX2
    # then computes 8. So each limit of torch's has a cache of its own.
    isa = os.environ.get("ATEN_CPU_CAPABILITY", "all")
    cache = os.path.join(tempfile.gettempdir(), f"numadist-tests-{os.getuid()}-{isa}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    # Every test captures for itself; those of the cache have folders of their own.
    os.environ["NUMADIST_CACHE_DIR"] = ""


def expected(report: pytest.TestReport) -> bool:
    """What no installation mends: an instruction set the CPU lacks, and what gloo cannot do in PyTorch's own suite.

    A skip of the whole file of that suite would be a missing package.
    """
    of_gloo = "conformance/" in report.nodeid and "::" in report.nodeid
    return of_gloo or "needs a CPU " in str(report.longrepr)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [r for r in reporter.stats.get("skipped", []) if not expected(r)] if reporter else []
    if os.environ.get("CI") and skipped:
        for report in skipped:
            reporter.write_line(f"skipped in CI: {report.nodeid}: {report.longrepr}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
