"""In CI every test must run: a skip there hides a missing install step, so it fails the run."""

import os

import pytest


def expected(nodeid: str) -> bool:
    """PyTorch's own backend suite skips what gloo cannot do; a skip of the whole file would be a missing package."""
    return "conformance/" in nodeid and "::" in nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [r for r in reporter.stats.get("skipped", []) if not expected(r.nodeid)] if reporter else []
    if os.environ.get("CI") and skipped:
        for report in skipped:
            reporter.write_line(f"skipped in CI: {report.nodeid}: {report.longrepr}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
