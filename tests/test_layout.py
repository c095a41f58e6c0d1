"""Who may import whom: the folders in the order in which data goes through them, and no arrow against it."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpass

PACKAGE = Path(kvpass.__file__).parent
BASE = {"errors", "arguments", "compat", "cache_names", "graphs", "policies", "precision", "budget"}
LAYER = {*BASE, "layer", "lowering", "storage"}
REWRITE = {*LAYER, "capture", "rewrite"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "compat": {"errors"},
    "cache_names": set(),
    "graphs": {"errors", "compat"},
    "precision": set(),
    "versions": set(),
    "doctor": {"compat", "versions"},
    "policies": {"errors", "arguments", "align", "compat"},  # kv_align's networks; what other ranks know of their heads
    "budget": {"errors", "arguments", "policies"},
    "storage": {"errors", "policies", "precision", "compat"},
    "lowering": {*BASE, "storage"},
    "layer": LAYER,
    "capture": BASE,
    "logs": {"errors", "compat", "rewrite"},
    "rewrite": REWRITE,
    "once": {"errors", "compat", "graphs", "lowering"},
    "replay": {"errors", "compat"},
    "runtime": REWRITE,
    "timings": {"errors", "compat"},
    "findings": {"rewrite", "logs", "timings"},
    "reference": REWRITE,
    "backend": {*REWRITE, "runtime", "once", "replay", "logs", "findings", "versions"},
    "report": {*REWRITE, "runtime", "timings", "findings", "backend"},
    "decoding": {*LAYER, "runtime", "backend"},
    "apps": {"errors"},
}
"""What a file or folder of the package may import at its top; those that are not here may import everything."""
LATER = {
    ("backend", "reference"): "the compiled path knows nothing of references until it is asked for one",
}
"""Arrows inside of functions, and why."""


def room(module: str) -> str:
    """The file or folder of the package that a module is, or is in."""
    return module.split(".")[1] if "." in module else ""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of the package that a file imports, and whether it does so inside of a function.

    What is imported for types alone runs never, and may be anything.
    """
    tree = ast.parse(path.read_text())
    typing = {id(each) for node in ast.walk(tree) if _for_types(node) for each in ast.walk(node)}
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        for name in _names(node):
            yield name, id(node) not in top


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvpass":
        inside = node.module != "kvpass"
        return [node.module or ""] if inside else [f"kvpass.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("kvpass.")]
    return []


@pytest.mark.parametrize("where", sorted(MAY_IMPORT))
def test_no_arrow_goes_against_the_order(where: str) -> None:
    wrong = []
    for path in files():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != where:
            continue
        for name, later in imports(path):
            to = room(name)
            allowed = to == where or to in MAY_IMPORT[where] or (later and (where, to) in LATER)
            if not allowed:
                wrong.append(f"{'/'.join(parts)} -> {name}")
    assert not wrong


def test_rules_are_of_what_there_is() -> None:
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in files()}
    assert there >= MAY_IMPORT.keys()
    used = {
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), room(n)) for path in files() for n, _ in imports(path)
    }
    assert used >= LATER.keys()


def test_no_two_modules_of_a_room_have_one_name_and_none_that_of_a_standard_one() -> None:
    import sys

    names = collections.Counter(path.stem for path in (PACKAGE / "rewrite").rglob("*.py") if path.stem != "__init__")
    shadows = [path for path in PACKAGE.glob("*.py") if path.stem in sys.stdlib_module_names]
    assert not shadows
    assert "step" not in names


def test_no_two_files_import_each_other_on_whatever_way() -> None:
    """At their tops, what is imported for types alone included: a file can be read after those that it imports."""
    arrows = {path: {to for to in _files_imported(path) if to != path} for path in files()}
    while leaves := [path for path, to in arrows.items() if not to & arrows.keys()]:
        for path in leaves:
            del arrows[path]
    assert not arrows, "in circles, or importing one: " + ", ".join(str(path.relative_to(PACKAGE)) for path in arrows)


def _files_imported(path: Path) -> Iterator[Path]:
    """The files whose modules a file imports at its top."""
    for node in ast.walk(_tree(path)):
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if inside:
            for each in ast.walk(node):
                each.in_function = True  # type: ignore[attr-defined]
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not hasattr(node, "in_function"):
            yield from (file for name in _modules(node) if (file := _file_of(name)))


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement names, those that may be names inside of one included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if _file_of(name) else str(node.module) for name in inner]


def _file_of(module: str) -> Path | None:
    first, *parts = module.split(".")
    found = [PACKAGE.joinpath(*parts).with_suffix(".py"), PACKAGE.joinpath(*parts, "__init__.py")]
    return next((file for file in found if first == "kvpass" and parts and file.exists()), None)


def test_private_names_of_torch_are_in_compat_alone() -> None:
    """`torch._x` as an attribute or an import; strings do not count."""
    allowed = {"compat.py", "testing/compat.py", "testing/interpreter.py", "demo/meter.py"}
    found = {str(path.relative_to(PACKAGE)) for path in files() if any(_private(n) for n in ast.walk(_tree(path)))}
    assert found <= allowed


def _tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def _private(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith(("__", "_foreach")):
        return isinstance(node.value, ast.Name) and node.value.id == "torch"
    named = node.module if isinstance(node, ast.ImportFrom) else None
    return bool(named) and named.startswith("torch.") and any(part.startswith("_") for part in named.split("."))
