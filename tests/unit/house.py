"""How the house rules are checked: functions over a folder of sources, so that tests can give them made-up ones.

A part is a name directly below the package; a file's imports count wherever they stand, except those that only type
checkers read.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "numadist"
# Parts that are torch and numpy: a part without them starts in milliseconds.
HEAVY = {"torch": "torch", "numpy": "torch"}


def sources(root: Path) -> list[Path]:
    """Python files of the package; a folder that is a link (launch) is read where it lies."""
    package = root / PACKAGE
    folders = [package, *(p.resolve() for p in package.iterdir() if p.is_symlink() and p.is_dir())]
    return sorted({file for folder in folders for file in folder.rglob("*.py")})


def module_of(path: Path, root: Path) -> str:
    """Dotted name of a file: launch/ at the top level is numadist.launch."""
    relative = path.relative_to(root).with_suffix("")
    names = relative.parts if relative.parts[0] == PACKAGE else (PACKAGE, *relative.parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def part_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk(node: ast.AST) -> Iterable[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if _is_for_type_checkers(child):
            continue
        yield child
        yield from _walk(child)


def imported_names(path: Path) -> list[str]:
    """Absolute dotted names a file imports; of `from a import b` both `a` and `a.b`."""
    found: list[str] = []
    for node in _walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found.append(node.module or "")
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imported_parts(path: Path) -> set[str]:
    """Parts a file imports from; `torch` stands for torch and numpy."""
    parts = set()
    for name in imported_names(path):
        head, *rest = name.split(".")
        if head in HEAVY:
            parts.add(HEAVY[head])
        elif head == PACKAGE and rest:
            parts.add(rest[0])
    return parts


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> modules of the package it imports."""
    files = {module_of(path, root): path for path in sources(root)}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imported_names(path)
        deeper = {n for n in names if n in files and any(m.startswith(f"{n}.") and m in files for m in names)}
        # `from numadist.comm import connect` is an import of connect, not of the package's own file.
        graph[module] = {n for n in names if n in files and n not in deeper and n != module}
    return graph


def circles(root: Path) -> list[list[str]]:
    """Groups of files that import each other, late imports included."""
    graph = import_graph(root)
    reach = {module: _reachable(module, graph) for module in graph}
    found: list[list[str]] = []
    for module in sorted(graph):
        group = sorted(other for other in reach[module] if module in reach[other])
        if module in group and group not in found:
            found.append(group)
    return found


def _reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


def foreign_imports(root: Path, may_import: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """File -> parts it imports without permission; a part that the table lacks is foreign to itself."""
    found = {}
    for path in sources(root):
        part = part_of(module_of(path, root))
        allowed = may_import.get(part)
        foreign = {part} if allowed is None else imported_parts(path) - allowed - {part}
        if foreign:
            found[str(path.relative_to(root))] = sorted(foreign)
    return found


def unused_permissions(root: Path, may_import: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Part -> parts it may import and does not."""
    used: dict[str, set[str]] = {part: set() for part in may_import}
    for path in sources(root):
        used.setdefault(part_of(module_of(path, root)), set()).update(imported_parts(path))
    return {part: sorted(left) for part, allowed in may_import.items() if (left := allowed - used[part])}


def too_long(path: Path, kinds: tuple[type[ast.AST], ...], limit: int) -> dict[str, int]:
    """Name -> lines of every function or class above the limit."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    lines = {n.name: n.end_lineno - n.lineno + 1 for n in found}  # type: ignore[attr-defined]
    return {name: count for name, count in lines.items() if count > limit}


def table(may_import: Mapping[str, set[str]]) -> str:
    """The permissions as a table for docs/design.md, parts in an order in which each knows only those above it."""
    lines = ["| part | may import |", "|---|---|"]
    for part in in_layers(may_import):
        others = [p for p in in_layers(may_import) if p in may_import[part]]
        heavy = ["torch"] if "torch" in may_import[part] else []
        lines.append(f"| `{part}` | {', '.join(f'`{p}`' for p in [*others, *heavy]) or '-'} |")
    return "\n".join(lines)


def in_layers(may_import: Mapping[str, set[str]]) -> list[str]:
    """Parts from the bottom up, names in order where none needs the other. Raises: AssertionError for a circle."""
    done: list[str] = []
    while len(done) < len(may_import):
        ready = [p for p in may_import if p not in done and may_import[p] - {"torch"} <= set(done)]
        assert ready, f"parts that know each other: {sorted(set(may_import) - set(done))}"
        done += sorted(ready)
    return done
