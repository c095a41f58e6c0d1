"""Test import rules: rooms are in the order of the data flow, and no import goes against it."""

from __future__ import annotations

import ast
import collections
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvpass

PACKAGE = Path(kvpass.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"
BEGIN, END = "<!-- rooms: python -m tests.test_layout -->\n", "<!-- end of rooms -->\n"
"""Markers around the tree of rooms in docs/design.md."""
ROOMS = (
    "errors",
    "arguments",
    "versions",
    "torch_private",
    "model_access",
    "fx",
    "tensor_files",
    "policies",
    "user_budget",
    "lowering",
    "cache",
    "reference",
    "capture",
    "rewrite",
    "runtime",
    "backend",
    "decoding",
    "diagnostics",
    "calibration",
    "apps",
)
"""Files and folders of the package. Each imports only those before it."""
SKIPPED = {
    "capture": {"lowering", "cache", "reference", "user_budget"},
    "rewrite": {"reference"},
    "runtime": {"reference"},
    "backend": {"reference"},
    "decoding": {"reference", "rewrite", "capture"},
    "calibration": {"reference"},
}
"""Earlier rooms that a room must not import nevertheless."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Import(NamedTuple):
    """One import of a module of the package."""

    path: str
    module: str


def room_of(module: str) -> str:
    """Return the file or folder of the package that contains a module."""
    return module.split(".")[1] if "." in module else ""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports() -> Iterator[Import]:
    """Yield the package's imports of itself, without imports for types, which never run."""
    for path in files():
        tree = _tree(path)
        typing = {id(each) for node in ast.walk(tree) if _is_for_types(node) for each in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) not in typing:
                for module in _names(node):
                    yield Import(str(path.relative_to(PACKAGE)), module)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvpass":
        return [node.module or ""] if node.module != "kvpass" else [f"kvpass.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("kvpass.")]
    return []


def _is_allowed(each: Import) -> bool:
    here, to = each.path.split("/")[0].removesuffix(".py"), room_of(each.module)
    if here in ("__init__", to):
        return True
    return ROOMS.index(to) < ROOMS.index(here) and to not in SKIPPED.get(here, ())


def test_rooms_import_only_what_stands_before_them() -> None:
    wrong = [each for each in imports() if not _is_allowed(each)]
    assert not wrong


def test_the_import_rules_name_existing_rooms() -> None:
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in files()} - {"__init__"}
    assert there == set(ROOMS)
    assert not [(here, to) for here in SKIPPED for to in SKIPPED[here] if ROOMS.index(to) > ROOMS.index(here)]


def test_no_module_is_named_like_one_of_the_standard_library_at_the_top() -> None:
    assert not [path for path in PACKAGE.glob("*.py") if path.stem in sys.stdlib_module_names]


def test_class_names_are_unique() -> None:
    found = collections.Counter(
        node.name for path in files() for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in found.items() if count > 1]


MAX_LINES = 60
"""The maximum number of lines of a function other than a Triton kernel; pyproject.toml limits complexity."""


def test_functions_are_short() -> None:
    functions = [(path, node) for path in files() for node in ast.walk(_tree(path)) if isinstance(node, FUNCTIONS)]
    long = [(path, node) for path, node in functions if (node.end_lineno or 0) - node.lineno >= MAX_LINES]
    kernels = [any("triton.jit" in ast.unparse(each) for each in node.decorator_list) for _, node in long]
    assert not [f"{path.name}: {node.name}" for (path, node), kernel in zip(long, kernels, strict=True) if not kernel]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Check imports at the top of files, including those for types: files can be read after their imports."""
    arrows = {path: {to for to in _files_imported(path) if to != path} for path in files()}
    while leaves := [path for path, to in arrows.items() if not to & arrows.keys()]:
        for path in leaves:
            del arrows[path]
    assert not arrows, "in circles, or importing one: " + ", ".join(str(path.relative_to(PACKAGE)) for path in arrows)


def _files_imported(path: Path) -> Iterator[Path]:
    """Yield the files whose modules a file imports at its top."""
    tree = _tree(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    late = {id(each) for function in functions for each in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in late:
            yield from (file for name in _modules(node) if (file := _file_of(name)))


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement names, including names that may be modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if _file_of(name) else str(node.module) for name in inner]


def _file_of(module: str) -> Path | None:
    first, *parts = module.split(".")
    found = [PACKAGE.joinpath(*parts).with_suffix(".py"), PACKAGE.joinpath(*parts, "__init__.py")]
    return next((file for file in found if first == "kvpass" and parts and file.exists()), None)


def test_private_names_of_torch_are_in_one_room() -> None:
    """Check `torch._x` in attributes and imports, and attributes of compiled objects in strings."""
    found = {path.relative_to(PACKAGE).parts[0] for path in files() if any(_private(n) for n in ast.walk(_tree(path)))}
    assert found == {"torch_private"}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _private(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "_version":  # of a tensor
        return True
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.startswith(("_orig_mod", "_torchdynamo_", "_dynamo_"))
    return any(
        part.startswith("_") and not part.startswith(("__", "_foreach"))
        for name in _names_of_torch(node)
        for part in name.split(".")
    )


def _names_of_torch(node: ast.AST) -> list[str]:
    """Return the dotted names of torch in an attribute or an import, without operators (`torch.ops`)."""
    if isinstance(node, ast.Attribute):
        names = [ast.unparse(node)] if _is_dotted(node) else []
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name for name in names if name.startswith("torch.") and not name.startswith("torch.ops.")]


def _is_dotted(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_dotted(node.value))


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("tensor._version", True),
        ("torch._dynamo.reset()", True),
        ("torch.fx._symbolic_trace.is_fx_tracing()", True),
        ("import torch._inductor.config", True),
        ("from torch import _dynamo", True),
        ("from torch.utils._pytree import tree_map", True),
        ("torch._foreach_copy_(a, b)", False),
        ("torch.ops.aten._softmax(x)", False),
        ("torch.fx.Node.__init__(node)", False),
        ("getattr(model, '_orig_mod', model)", True),
        ("'_dynamo_static_input_type'", True),
    ],
)
def test_which_names_of_torch_are_private(line: str, private: bool) -> None:
    assert any(_private(node) for node in ast.walk(ast.parse(line))) == private


def _first_line(room: str) -> str:
    """Return the first line of a room's docstring, empty if there is none."""
    path = PACKAGE / room
    found = ast.get_docstring(_tree(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")))
    return (found or "").partition("\n")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_in_one_short_sentence(room: str) -> None:
    line = _first_line(room)
    assert line.endswith(".")
    assert len(line.split()) <= 20


def tree_of_rooms() -> str:
    """Return the map of the package: its rooms in order, each with the first line of its docstring."""
    names = [f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py" for room in ROOMS]
    lines = (f"    {name:15} {_first_line(room)}\n" for name, room in zip(names, ROOMS, strict=True))
    return f"```text\nkvpass/\n{''.join(lines)}```\n"


def _parts_of_design() -> tuple[str, str, str]:
    """Return docs/design.md before the tree of rooms, the tree, and the text after it."""
    before, _, rest = DESIGN.read_text().partition(BEGIN)
    tree, _, after = rest.partition(END)
    return before + BEGIN, tree, END + after


def test_the_tree_in_the_design_is_current() -> None:
    assert _parts_of_design()[1] == tree_of_rooms(), "write it anew: python -m tests.test_layout"


@pytest.mark.parametrize("page", ["design", "glossary", "follow_a_call"])
def test_a_page_names_files_and_definitions_that_exist(page: str) -> None:
    """Check files in backticks, relative to the root or the package, and `file::name` for definitions."""
    named = re.findall(r"`([\w/]+\.(?:py|md))(?:::([\w.]+))?`", DESIGN.with_name(f"{page}.md").read_text())
    assert named
    wrong = []
    for name, inside in named:
        path = next((p for p in (PACKAGE / name, PACKAGE.parent / name, DESIGN.parent / name) if p.exists()), None)
        if path is None or (inside and inside not in set(_defined(_tree(path)))):
            wrong.append(f"{name}::{inside}")
    assert not wrong


def _defined(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the names of the functions and classes of a module, methods as `Class.method`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _defined(node, f"{prefix}{node.name}.")


def test_the_wheel_has_every_file_that_is_not_python() -> None:
    tomllib = pytest.importorskip("tomllib")
    data = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {path for room, globs in data.items() for g in globs for path in _inside(room).glob(g)}
    bundled = PACKAGE / "apps" / "data"  # only the demo's models are installed
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and bundled not in path.parents}
    assert {path for path in files if path.suffix not in (".py", ".pyc", ".typed")} <= listed


def _inside(room: str) -> Path:
    return PACKAGE.parent / room.replace(".", "/")


if __name__ == "__main__":
    before, _, after = _parts_of_design()
    DESIGN.write_text(before + tree_of_rooms() + after)
