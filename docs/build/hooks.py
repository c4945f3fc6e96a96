"""What mkdocs fills in when it builds the pages: `--help` of each command, tables of benchmarks/results, links.

Documents name each other by their paths in the repository, which a test checks; here those become links.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import numadist

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"
HELP = re.compile(r"^<!-- help: (.+) -->$", re.M)
BLOCK = re.compile(r"(^```.*?^```$)", re.M | re.S)
# A path of a page, in backticks or bare, or else code in backticks.
PATH = rf"(docs|{RESULTS})/([\w-]+\.md)"
CODE_OR_PATH = re.compile(rf"`{PATH}`|`[^`]+`|(?<![\w/]){PATH}(?![\w/])")
MODULES = {"numarun": "numadist.launch.cli", "numadist": "numadist.commands.main"}


def on_files(files: Files, *, config: Any) -> Files:
    """Results stand beside the benchmarks, and are pages too."""
    for path in sorted((ROOT / RESULTS).iterdir()):
        if path.suffix in {".md", ".png"}:
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    if page.file.src_uri == "api.md":
        check_names(markdown)
    pieces = BLOCK.split(markdown)  # every second one is a block of code
    pieces[::2] = [CODE_OR_PATH.sub(link, piece) for piece in pieces[::2]]
    return HELP.sub(lambda found: help_of(found[1]), "".join(pieces))


def link(found: re.Match[str]) -> str:
    """A link to the page that is named, in words as they were; other code as it is."""
    folder, name = found[1] or found[3], found[2] or found[4]
    if folder is None:
        return found[0].replace("\\|", "|")  # in tables GitHub needs what would show here
    return f"[`{folder}/{name}`](/{'results/' if folder == RESULTS else ''}{name})"


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
