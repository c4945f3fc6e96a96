"""The house rules of docs/design.md and CONVENTIONS, checked on the code as it stands."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIRS = {"numadist": ROOT / "numadist", "numadist.launch": ROOT / "launch"}
SOURCES = sorted(p for folder in PACKAGE_DIRS.values() for p in folder.rglob("*.py"))
ALL_PYTHON = sorted(
    [*SOURCES, *(p for d in ("tests", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py"))]
)
NATIVE = sorted(p for p in (ROOT / "numadist" / "csrc").rglob("*") if p.suffix in {".cpp", ".h"})

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# Part -> parts it may import. Parts are the names directly below `numadist`; `torch` stands for torch and numpy.
BASE = {"errors", "log", "config"}
MAY_IMPORT = {
    "__init__": set(),
    "errors": set(),
    "log": {"errors"},
    "config": {"errors", "log"},
    "_native": BASE,
    "_native_kernels": BASE | {"_native", "_native_replay"},
    "_native_replay": BASE | {"_native", "torch"},
    "_syscalls": BASE,
    "topology": BASE,
    "binding": BASE | {"_syscalls", "_native", "topology"},
    "launch": BASE | {"_syscalls", "topology", "binding", "plan"},
    "memory": BASE | {"_native", "topology", "torch"},
    "comm": BASE | {"_native", "_native_replay", "topology", "binding", "memory", "torch"},
    "kernels": BASE | {"_native", "_native_kernels", "_native_replay", "torch"},
    "costmodel": BASE | {"_native", "_syscalls", "topology", "binding", "memory", "kernels", "torch"},
    "shard": BASE | {"_native", "topology", "binding", "memory", "costmodel", "kernels", "torch"},
    "plan": BASE | {"_native", "topology", "comm", "torch"},
    "generate": BASE
    | {"_native", "_native_replay", "topology", "memory", "kernels", "shard", "plan", "models", "torch"},
    "models": BASE | {"torch"},
    "tune": BASE | {"topology", "generate", "plan", "models", "torch"},
    "simulate": BASE | {"costmodel", "shard", "models", "torch"},
    "inprocess": BASE | {"_native", "topology", "binding", "memory", "shard", "torch"},
    "compare": BASE
    | {
        "_native",
        "_syscalls",
        "topology",
        "binding",
        "memory",
        "comm",
        "shard",
        "inprocess",
        "models",
        "torch",
    },
    "explain_command": BASE | {"costmodel", "shard", "models", "torch"},
    "info": BASE | {"_native", "topology", "binding", "torch"},
    "cli": BASE | {"_native", "topology", "binding", "info", "shard", "torch"},
}
MAY_PRINT = {"cli.py", "command.py", "report.py", "info.py", "explain_command.py"}
MAY_USE_CTYPES = {
    f"numadist/{name}.py" for name in ("_native", "_native_kernels", "_native_replay", "_syscalls")
}
# launch builds the environment of its children, so it copies os.environ as a whole.
MAY_READ_ENVIRON = {"numadist/config.py", "launch/cli.py"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    if path.is_relative_to(ROOT / "launch"):
        return "launch"
    parts = path.relative_to(ROOT / "numadist").with_suffix("").parts
    return parts[0]


def imported_modules(tree: ast.AST, path: Path) -> set[str]:
    """Absolute names of all modules a file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import; write the full name"
            found.add(node.module or "")
            if node.module == "numadist":
                found |= {f"numadist.{alias.name}" for alias in node.names}
    return found


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for module in imported_modules(ast.parse(path.read_text()), path):
        head, *rest = module.split(".")
        if head in {"torch", "numpy"}:
            parts.add("torch")
        elif head == "numadist" and rest:
            parts.add(rest[0])
    return parts


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_part_imports_only_the_parts_below_it(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"{relative(path)}: part {part!r} is not in MAY_IMPORT of this test"
    foreign = imported_parts(path) - MAY_IMPORT[part] - {part}
    assert not foreign, (
        f"{relative(path)} ({part}) imports {sorted(foreign)}; allowed: {sorted(MAY_IMPORT[part])}"
    )


@pytest.mark.parametrize("path", [*ALL_PYTHON, *NATIVE], ids=relative)
def test_file_is_short_and_ascii(path):
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines, limit {MAX_FILE_LINES}"
    bad = [f"{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if not line.isascii()]
    assert not bad, f"{relative(path)} is not ASCII: {bad[:3]}"


@pytest.mark.parametrize("path", ALL_PYTHON, ids=relative)
def test_functions_are_short(path):
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions}
    long = {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES}
    assert not long, f"{relative(path)}: longer than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_stray_print_environment_read_or_ctypes(path):
    name = relative(path)
    for node in ast.walk(ast.parse(path.read_text())):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert path.name in MAY_PRINT, f"{name}:{line}: print; use the logger"
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            assert name in MAY_READ_ENVIRON, f"{name}:{line}: reads the environment; add a row to config.py"
    if "ctypes" in imported_modules(ast.parse(path.read_text()), path):
        assert name in MAY_USE_CTYPES, f"{name}: imports ctypes; add the call to one of {MAY_USE_CTYPES}"


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_native_core_includes_no_torch_and_no_python_header(path):
    bad = re.findall(r'#include\s*[<"](?:torch|ATen|c10|Python)[^>"]*[>"]', path.read_text())
    assert not bad, f"{relative(path)} includes {bad}"


@pytest.mark.parametrize(
    "package", ["numadist", "numadist.launch.cli", "numadist.topology.sysfs", "numadist.binding"]
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


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=relative
)
def test_paths_named_in_documents_exist(document):
    missing = sorted(p for p in named_paths(document) if not (ROOT / p).exists())
    assert not missing, f"{relative(document)} names paths that do not exist: {missing}"


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=relative
)
def test_make_targets_and_variables_named_in_documents_exist(document):
    from numadist import config

    text = document.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    missing = {t for t in re.findall(r"`make ([\w-]+)`", text) if t not in targets}
    known = {name for name, *_ in config.rows()}
    unknown = {v for v in re.findall(r"NUMADIST_[A-Z_]+[A-Z]", text) if v not in known}
    assert not missing, f"{relative(document)} names make targets that do not exist: {missing}"
    assert not unknown, f"{relative(document)} names variables that do not exist: {unknown}"


def test_every_package_folder_is_in_pyproject():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"numadist.launch"} | {
        ".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "numadist").rglob("__init__.py")
    }
    assert listed == found, f"pyproject lists {sorted(listed)}, folders are {sorted(found)}"


def test_test_modules_have_names_of_their_own():
    """pytest imports them by name, so two of one name cannot be collected in one run."""
    names: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name != "conftest.py" and "checks" not in path.parts:
            names.setdefault(path.name, []).append(relative(path))
    twice = [paths for paths in names.values() if len(paths) > 1]
    assert not twice, f"rename one of each: {twice}"
