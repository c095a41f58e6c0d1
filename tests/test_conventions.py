"""Conventions of the tests: an expected error is the one that is meant, and no case passes by saying nothing."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from kvpass import errors

ROOT = Path(__file__).parents[1]
ERRORS = tuple(name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception))


def test_every_error_that_a_test_expects_is_named_by_its_words() -> None:
    """Errors of kvpass: without `match` any other refusal passes as the one that is meant."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, tree in _test_files()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and call.args
        if any(name in ast.unparse(call.args[0]) for name in ERRORS)
        if not any(keyword.arg == "match" for keyword in call.keywords)
    ]
    assert found == []


def test_no_test_returns_early() -> None:
    """A case that says nothing is left out of the parameters, rejected, or skipped with a reason."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in _test_files()
        for test in ast.walk(tree)
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_")
        for node in ast.walk(test)
        if isinstance(node, ast.Return) and node.value is None
    ]
    assert found == []


MOST_WORDS = 20


def test_docstrings_of_the_package_begin_with_one_short_sentence() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "kvpass").rglob("*.py"))
        for line in _first_lines(ast.parse(path.read_text(encoding="utf-8")))
        if len(line.split()) > MOST_WORDS or not line.endswith(".")
    ]
    assert found == []


def test_documented_attributes_and_arguments_exist() -> None:
    """A renamed field or parameter is renamed in the docstring too."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "kvpass").rglob("*.py"))}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    found = [
        f"{path.relative_to(ROOT)}: {node.name}: {name}"
        for path, node in nodes
        for name in (_undocumented(node, classes) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else ())
    ]
    assert found == []


def _undocumented(node: ast.ClassDef | ast.FunctionDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names that a docstring lists and that its class or function does not have."""
    if isinstance(node, ast.ClassDef):
        return _listed(node, "Attributes") - _attributes(node, classes)
    return _listed(node, "Args") - {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}


def _listed(node: ast.ClassDef | ast.FunctionDef, section: str) -> set[str]:
    _, _, text = (ast.get_docstring(node) or "").partition(f"{section}:\n")
    lines = itertools.takewhile(lambda line: not line or line.startswith("    "), text.splitlines())
    entries = [match.group(1) for line in lines if (match := re.match(r"    ([\w*][\w*, ]*):", line))]
    return {name.strip() for entry in entries for name in entry.split(",")}


def _attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names that a class and its bases in the package define, or set on `self`."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    stored = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    found |= {each.attr for each in stored if isinstance(each, ast.Attribute)}
    found |= {each.id for each in stored if isinstance(each, ast.Name)}
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    return found.union(*(_attributes(classes[base], classes) for base in bases if base in classes))


def _first_lines(tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings, without those that begin with their arguments."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and not text.startswith("Args:"):
            yield text.partition("\n")[0]


def _test_files() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))
