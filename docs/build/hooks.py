"""What mkdocs fills in when it builds the pages: the `--help` of each command; and a check that the API is whole."""

import os
import re
import subprocess
import sys
from typing import Any

from mkdocs.exceptions import PluginError

import numadist

HELP = re.compile(r"^<!-- help: (.+) -->$", re.M)
MODULES = {"numarun": "numadist.launch.cli", "numadist": "numadist.commands.main"}


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    if page.file.src_uri == "api.md":
        check_names(markdown)
    return HELP.sub(lambda found: help_of(found[1]), markdown)


def help_of(command: str) -> str:
    """What a command prints for --help, as a block of text."""
    program, *words = command.split()
    env = {**os.environ, "COLUMNS": "100"}
    call = [sys.executable, "-m", MODULES[program], *words, "--help"]
    run = subprocess.run(call, capture_output=True, text=True, env=env)
    if run.returncode:
        raise PluginError(f"`{command} --help` failed:\n{run.stderr}")
    return f"```text\n{run.stdout.rstrip()}\n```"


def check_names(markdown: str) -> None:
    """Raises: PluginError if a public name is not in the reference, or the reference has another one."""
    shown = set(re.findall(r"^::: numadist\.(\w+)$", markdown, re.M))
    public = set(numadist.__all__) - {"__version__"}
    if shown != public:
        raise PluginError(
            f"docs/api.md: missing {sorted(public - shown)}, not public {sorted(shown - public)}"
        )
