"""In CI every test that its CPU can run must run: another skip hides a missing install step, so it fails the run."""

import os

import pytest


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
