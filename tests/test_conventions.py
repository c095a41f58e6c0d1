"""Conventions of the tests: an expected error is the one that is meant, and no case passes by saying nothing."""

from __future__ import annotations

import ast
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


def _first_lines(tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings, without those that begin with their arguments."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and not text.startswith("Args:"):
            yield text.partition("\n")[0]


def _test_files() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))
