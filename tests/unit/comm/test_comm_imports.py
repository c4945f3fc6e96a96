"""The files of numadist/comm import each other in one direction only, late imports included."""

import ast
import graphlib
from pathlib import Path

import numadist.comm

FOLDER = Path(numadist.comm.__file__).parent
MODULES = {path.stem: path for path in FOLDER.glob("*.py")}


def imported(path):
    """Files of the folder that a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name.removeprefix("numadist.comm.") for name in names if name.startswith("numadist.comm.")}
    return {name.split(".")[0] for name in ours} & MODULES.keys()


def test_files_of_comm_import_each_other_without_a_circle():
    graph = {name: imported(path) for name, path in MODULES.items()}
    assert "shm_group" in graph["connect"], f"this test sees no imports: {graph}"
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(f"a circle: {' <- '.join(error.args[1])}") from None
