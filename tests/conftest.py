"""Which tests share a process; and in CI every test must run: a skip hides a missing install step, so it fails."""

import os

import pytest


def expected(nodeid: str) -> bool:
    """PyTorch's own backend suite skips what gloo cannot do; a skip of the whole file would be a missing package."""
    return "conformance/" in nodeid and "::" in nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Two at a time, the tests of a file share a process; so do all of emulated machines, each of which boots once.

    Two of those at a time would be slower than one after the other: each has more CPUs than there are.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group("guest" if "guest" in item.path.parts else item.path.name))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [r for r in reporter.stats.get("skipped", []) if not expected(r.nodeid)] if reporter else []
    if os.environ.get("CI") and skipped:
        for report in skipped:
            reporter.write_line(f"skipped in CI: {report.nodeid}: {report.longrepr}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
