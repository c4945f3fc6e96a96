"""The checks of test_house.py find what they are for: each is shown a house that breaks its rule."""

import ast

import house
import pytest


@pytest.fixture
def build(tmp_path):
    """Function that writes files {path: text} and returns the folder they are in."""

    def write(files):
        for name, text in {"numadist/__init__.py": "", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_two_files_that_import_each_other_are_found_also_by_late_imports(build):
    root = build(
        {
            "numadist/a.py": "from numadist.b import f\n",
            "numadist/b.py": "def f():\n    from numadist import a\n    return a\n",
            "numadist/c.py": "from numadist.a import f\n",
        }
    )
    assert house.circles(root) == [["numadist.a", "numadist.b"]]


def test_a_long_circle_is_found_and_what_only_type_checkers_read_is_none(build):
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from numadist.a import f\n"
    root = build(
        {
            "numadist/a.py": "import numadist.b\n",
            "numadist/b.py": "from numadist import c\n",
            "numadist/c.py": guarded,
        }
    )
    assert house.circles(root) == []
    (root / "numadist/c.py").write_text("from numadist.a import f\n")
    assert house.circles(root) == [["numadist.a", "numadist.b", "numadist.c"]]


def test_a_module_of_a_package_is_no_import_of_the_package(build):
    root = build(
        {
            "numadist/p/__init__.py": "from numadist.p.x import X\n",
            "numadist/p/x.py": "from numadist.p import y\nX = y\n",
            "numadist/p/y.py": "",
        }
    )
    assert house.circles(root) == []


def test_an_import_without_permission_and_a_permission_without_use_are_found(build):
    root = build({"numadist/a.py": "import torch\n", "numadist/b/c.py": "from numadist.a import x\n"})
    rules = {"__init__": set(), "a": {"torch"}, "b": {"a"}}
    assert house.foreign_imports(root, rules) == {}
    assert house.unused_permissions(root, rules) == {}
    assert house.foreign_imports(root, {**rules, "a": set()}) == {"numadist/a.py": ["torch"]}
    assert house.unused_permissions(root, {**rules, "b": {"a", "torch"}}) == {"b": ["torch"]}
    assert house.foreign_imports(root, {"__init__": set(), "a": {"torch"}}) == {"numadist/b/c.py": ["b"]}


def test_long_classes_and_functions_are_found(build):
    body = "".join(f"        x{i} = {i}\n" for i in range(8))
    root = build({"numadist/a.py": f"class Long:\n    def f(self):\n{body}"})
    path = root / "numadist/a.py"
    assert house.too_long(path, (ast.ClassDef,), 9) == {"Long": 10}
    assert house.too_long(path, (ast.ClassDef,), 10) == {}
    assert house.too_long(path, (ast.FunctionDef,), 8) == {"f": 9}


def test_a_linked_folder_is_read_where_it_lies(build):
    root = build({"launch/__init__.py": "", "launch/cli.py": "import torch\n"})
    (root / "numadist/launch").symlink_to("../launch")
    assert house.foreign_imports(root, {"__init__": set(), "launch": set()}) == {"launch/cli.py": ["torch"]}


def test_the_table_has_every_part_below_those_it_may_import():
    rules = {"top": {"middle", "torch"}, "middle": {"base"}, "base": set()}
    rows = house.table(rules).splitlines()[2:]
    assert rows == ["| `base` | - |", "| `middle` | `base` |", "| `top` | `middle`, `torch` |"]
    with pytest.raises(AssertionError, match="know each other"):
        house.in_layers({"a": {"b"}, "b": {"a"}})
