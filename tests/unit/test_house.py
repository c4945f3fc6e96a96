"""The house rules of docs/design.md and CONTRIBUTING.md, checked on the code as it stands.

`python tests/unit/test_house.py` writes the table of parts into docs/design.md.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = house.sources(ROOT)
ALL_PYTHON = sorted(
    [*SOURCES, *(p for d in ("tests", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py"))]
)
NATIVE = sorted(p for p in (ROOT / "numadist" / "csrc").rglob("*") if p.suffix in {".cpp", ".h"})
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DESIGN = ROOT / "docs" / "design.md"
TABLE = re.compile(r"(<!-- house:begin -->\n).*?(<!-- house:end -->)", re.S)

MAX_FILE_LINES = 500
MAX_CLASS_LINES = 300
MAX_FUNCTION_LINES = 60

# Part -> parts it may import. Parts are the names directly below `numadist`; `torch` stands for torch and numpy.
MAY_IMPORT = {
    "__init__": {"errors"},
    "__main__": {"commands"},
    "errors": set(),
    "log": set(),
    "config": {"errors"},
    "_native": {"config", "errors"},
    "_native_replay": {"_native", "torch"},
    "_native_kernels": {"_native", "_native_replay"},
    "_native_trace": {"_native"},
    "_syscalls": set(),
    "topology": {"errors"},
    "binding": {"_syscalls", "errors", "topology"},
    "memory": {"_native", "config", "errors", "log", "topology", "torch"},
    "comm": {
        *(
            "_native",
            "_native_replay",
            "_native_trace",
            "binding",
            "config",
            "errors",
            "log",
            "topology",
            "torch",
        )
    },
    "phases": {"_native", "comm", "config", "errors", "log", "topology", "torch"},
    "launch": {"_syscalls", "binding", "config", "errors", "phases", "progress", "topology"},
    "kernels": {"_native", "_native_kernels", "_native_replay", "errors", "torch"},
    "costmodel": {"binding", "errors", "kernels", "memory", "topology", "torch"},
    "cache": {"log"},
    "progress": {"config"},
    "graph": {"errors", "torch"},
    "sharding": {"costmodel", "errors", "graph", "kernels", "log", "torch"},
    "weights": {"errors", "graph", "kernels", "log", "progress", "sharding", "torch"},
    "lowering": {"_native_replay", "cache", "config", "graph", "kernels", "log", "progress", "torch"},
    "pipeline": {
        *("binding", "cache", "config", "errors", "log", "torch"),
        *("costmodel", "graph", "kernels", "lowering", "memory", "progress", "sharding", "weights"),
    },
    "models": {"errors", "torch", "weights"},
    "generation": {
        *("errors", "graph", "kernels", "log", "memory", "phases", "pipeline", "sharding", "torch", "weights")
    },
    "inprocess": {
        *("_native", "binding", "errors", "log", "topology", "torch"),
        *("graph", "memory", "pipeline", "sharding"),
    },
    "compare": {
        *("_syscalls", "binding", "comm", "errors", "topology", "torch"),
        *("inprocess", "models", "pipeline", "sharding"),
    },
    "tune": {"config", "generation", "graph", "models", "phases", "pipeline", "topology", "torch"},
    "simulate": {"costmodel", "errors", "graph", "models", "pipeline", "sharding", "torch", "weights"},
    "commands": {
        *("_native", "binding", "config", "errors", "log", "topology", "torch"),
        *(
            "compare",
            "costmodel",
            "generation",
            "kernels",
            "models",
            "phases",
            "pipeline",
            "simulate",
            "tune",
        ),
    },
}
MAY_PRINT = ("numadist/commands/", "launch/cli.py", "launch/report.py", "launch/vllm.py")
MAY_USE_CTYPES = {
    *(
        f"numadist/{n}.py"
        for n in ("_native", "_native_kernels", "_native_replay", "_native_trace", "_syscalls")
    )
}
# launch builds the environment of its children, so it copies os.environ as a whole.
MAY_READ_ENVIRON = {"numadist/config.py", "launch/cli.py", "launch/vllm.py"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_part_imports_only_the_parts_below_it():
    foreign = house.foreign_imports(ROOT, MAY_IMPORT)
    assert not foreign, f"imports without permission: {foreign}"


def test_every_permission_is_used():
    unused = house.unused_permissions(ROOT, MAY_IMPORT)
    assert not unused, f"take these out of MAY_IMPORT: {unused}"


def test_no_files_import_each_other():
    found = house.circles(ROOT)
    assert not found, f"circles of files: {found}"


def test_the_design_shows_the_house():
    shown = TABLE.search(DESIGN.read_text())
    assert shown is not None, "docs/design.md has lost its markers"
    assert shown[0] == _table(), "run python tests/unit/test_house.py"


def _table() -> str:
    return f"<!-- house:begin -->\n{house.table(MAY_IMPORT)}\n<!-- house:end -->"


@pytest.mark.parametrize("path", [*ALL_PYTHON, *NATIVE], ids=relative)
def test_file_is_short_and_ascii(path):
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines, limit {MAX_FILE_LINES}"
    bad = [f"{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if not line.isascii()]
    assert not bad, f"{relative(path)} is not ASCII: {bad[:3]}"


@pytest.mark.parametrize("path", ALL_PYTHON, ids=relative)
def test_functions_and_classes_are_short(path):
    functions = house.too_long(path, (ast.FunctionDef, ast.AsyncFunctionDef), MAX_FUNCTION_LINES)
    assert not functions, f"{relative(path)}: longer than {MAX_FUNCTION_LINES} lines: {functions}"
    classes = house.too_long(path, (ast.ClassDef,), MAX_CLASS_LINES)
    assert not classes, f"{relative(path)}: classes longer than {MAX_CLASS_LINES} lines: {classes}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_stray_print_environment_read_or_ctypes(path):
    name = relative(path)
    for node in ast.walk(ast.parse(path.read_text())):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert name.startswith(MAY_PRINT), f"{name}:{line}: print; use the logger"
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            assert name in MAY_READ_ENVIRON, f"{name}:{line}: reads the environment; add a row to config.py"
    if "ctypes" in house.imported_names(path):
        assert name in MAY_USE_CTYPES, f"{name}: imports ctypes; add the call to one of {MAY_USE_CTYPES}"


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_native_core_includes_no_torch_and_no_python_header(path):
    bad = re.findall(r'#include\s*[<"](?:torch|ATen|c10|Python)[^>"]*[>"]', path.read_text())
    assert not bad, f"{relative(path)} includes {bad}"


@pytest.mark.parametrize(
    "package",
    [
        "numadist",
        "numadist.launch.cli",
        "numadist.topology.sysfs",
        "numadist.binding",
        "numadist.commands.main",
    ],
)
def test_light_packages_do_not_import_torch_or_numpy(package):
    code = f"import sys, {package}; print([m for m in ('torch', 'numpy', 'psutil') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert out == "[]", f"import {package} loads {out}"


def named_paths(document: Path) -> set[str]:
    """Words in backticks or code blocks that look like a path of this repository."""
    words = re.findall(r"[\w./-]+", document.read_text())
    tops = {p.name for p in ROOT.iterdir() if p.is_dir()} - {".git"}
    return {w.rstrip(".") for w in words if "/" in w and w.split("/")[0] in tops}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_paths_named_in_documents_exist(document):
    missing = sorted(p for p in named_paths(document) if not (ROOT / p).exists())
    assert not missing, f"{relative(document)} names paths that do not exist: {missing}"


@pytest.mark.parametrize("path", [*SOURCES, *NATIVE], ids=relative)
def test_paths_named_in_sources_exist(path):
    words = re.findall(
        r"\b(?:docs|numadist|launch|benchmarks|tests)/[\w./-]+\.(?:py|md|cpp|h)\b", path.read_text()
    )
    missing = sorted({word for word in words if not (ROOT / word).exists()})
    assert not missing, f"{relative(path)} names paths that do not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_make_targets_and_variables_named_in_documents_exist(document):
    from numadist import config

    text = document.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    missing = {t for t in re.findall(r"`make ([\w-]+)`", text) if t not in targets}
    known = {name for name, *_ in config.rows()}
    unknown = {v for v in re.findall(r"NUMADIST_[A-Z_]+[A-Z]", text) if v not in known}
    assert not missing, f"{relative(document)} names make targets that do not exist: {missing}"
    assert not unknown, f"{relative(document)} names variables that do not exist: {unknown}"


def test_every_folder_of_sources_is_a_package():
    """setuptools takes what has an __init__.py; a folder without one would be missing in the wheel."""
    folders = {p.parent for p in SOURCES}
    missing = sorted(relative(f) for f in folders if not (f / "__init__.py").exists())
    assert not missing, f"no __init__.py in {missing}"


def test_test_modules_have_names_of_their_own():
    """pytest imports them by name, so two of one name cannot be collected in one run."""
    names: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name != "conftest.py" and "checks" not in path.parts:
            names.setdefault(path.name, []).append(relative(path))
    twice = [paths for paths in names.values() if len(paths) > 1]
    assert not twice, f"rename one of each: {twice}"


if __name__ == "__main__":
    DESIGN.write_text(TABLE.sub(lambda _: _table(), DESIGN.read_text()))
