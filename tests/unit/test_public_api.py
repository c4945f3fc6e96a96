"""The public names: typed for every tool, loaded on first use, and all that examples need."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import numadist

ROOT = Path(__file__).resolve().parents[2]

WRONG = {
    "shard": ("numadist.shard(1, 2, nonsense=3)\n", 'Unexpected keyword argument "nonsense" for "shard"'),
    "explain": ("numadist.explain(3.5)\n", 'Argument 1 to "explain" has incompatible type "float"'),
    "Generator": ("numadist.Generator()\n", 'Missing positional argument "model" in call to "Generator"'),
    "Schema": (
        "numadist.Schema(2, '').save(1)\n",
        'Argument 1 to "save" of "Schema" has incompatible type "int"',
    ),
    "launch": (
        "from numadist.launch.supervise import Supervisor\nSupervisor(1, 'x', nonsense=3).fly()\n",
        'Unexpected keyword argument "nonsense" for "Supervisor"',
    ),
    "place": (
        "from numadist.launch.place import place\nplace(1, 2)\n",
        'Argument 1 to "place" has incompatible type "int"; expected "Machine"',
    ),
}
RIGHT = """
import torch
model: torch.nn.Module = torch.nn.Linear(4, 4)
schema: numadist.Schema = numadist.plan(model, torch.ones(2, 4), 2)
sharded: numadist.ShardedModel = numadist.shard(model, torch.ones(2, 4), schema=schema, compile=True)
text: str = numadist.explain(schema)
"""


def typing_imports() -> dict[str, str]:
    """Public name -> `module:name`, as type checkers read it."""
    tree = ast.parse((ROOT / "numadist" / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            where = f"numadist.{alias.name}" if node.module == "numadist" else f"{node.module}:{alias.name}"
            found[alias.asname or alias.name] = where
    return found


def test_what_type_checkers_read_is_what_is_loaded():
    assert typing_imports() == numadist._LAZY
    errors = {n for n in numadist.__all__ if inspect.isclass(getattr(numadist, n)) and n.endswith("Error")}
    assert set(numadist.__all__) >= {*numadist._LAZY, *errors, "PeerLost", "__version__"}


@pytest.mark.parametrize("name", numadist.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    found = getattr(numadist, name)
    if name == "__version__":
        return
    assert found.__doc__, f"numadist.{name} says nothing"
    assert not inspect.ismodule(found) or name == "models", f"numadist.{name} is a module"


def test_the_signature_of_shard_names_its_parameters():
    names = list(inspect.signature(numadist.shard).parameters)
    assert names == [
        *("model", "example_inputs", "schema", "group", "dynamic_shapes", "weights"),
        *("quantization", "compile", "train"),
    ]


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """Function from {file name: text} to what mypy says, a string a file."""
    pytest.importorskip("mypy", reason="needs the extra `dev`")

    def check(files):
        folder = tmp_path_factory.mktemp("typed")
        for name, text in files.items():
            (folder / name).write_text(f"import numadist\n{text}")
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *files]
        # The sources, as an installed package shows them; and the cache of `make lint`.
        environment = {**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert run.returncode in (0, 1), run.stderr
        return {n: "".join(line for line in run.stdout.splitlines(True) if line.startswith(n)) for n in files}

    return check


def test_mypy_refuses_wrong_calls_and_takes_right_ones(mypy):
    files = {f"wrong_{name}.py": text for name, (text, _) in WRONG.items()}
    said = mypy({**files, "right.py": RIGHT})
    for name, (_, expected) in WRONG.items():
        assert expected in said[f"wrong_{name}.py"], said
    assert "error" not in said["right.py"], said["right.py"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_use_public_names_only(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numadist"):
            assert node.module == "numadist", f"{path.name}:{node.lineno}: imports from {node.module}"
            assert {a.name for a in node.names} <= set(numadist.__all__), f"{path.name}:{node.lineno}"
        elif isinstance(node, ast.Import):
            inside = [a.name for a in node.names if a.name.startswith("numadist.")]
            assert not inside, f"{path.name}:{node.lineno}: imports {inside}"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "numadist"
        ):
            assert node.attr in numadist.__all__, (
                f"{path.name}:{node.lineno}: numadist.{node.attr} is not public"
            )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        importlib.import_module("numadist").shrad  # noqa: B018
