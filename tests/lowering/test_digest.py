"""Test that cached Inductor code is found only with the sources that generated it."""

from __future__ import annotations

import ast
import importlib
import inspect
import shutil
import types
from pathlib import Path

import pytest
import torch.fx as fx

import kvpass
from kvpass import versions
from kvpass.lowering import graph_passes
from kvpass.runtime import backend_base

ROOT = Path(kvpass.__file__).parent
CHANGES = (backend_base._prepare_prompt_graph, backend_base._prepare_step_graph)
DECIDE_NOTHING = {"kvpass", "kvpass.errors", "kvpass.versions"}
"""Modules that do not affect compiled code."""


def imported_by(module: types.ModuleType) -> set[str]:
    """Return the modules of kvpass that a module imports at top level."""
    found = set()
    for each in ast.parse(inspect.getsource(module)).body:
        if isinstance(each, ast.ImportFrom) and (each.module or "").partition(".")[0] == "kvpass":
            path = str(each.module).split(".")
            inside = [name.name for name in each.names if (ROOT.joinpath(*path[1:]) / f"{name.name}.py").exists()]
            found |= {f"{each.module}.{name}" for name in inside} or {str(each.module)}
    return found


def test_every_module_that_graph_changes_use_is_hashed() -> None:
    functions = [value for change in CHANGES for name in change.__code__.co_names
                 if inspect.isfunction(value := change.__globals__.get(name))]  # fmt: skip
    waiting = {each.__module__ for each in functions} - {backend_base.__name__}
    assert waiting == {"kvpass.lowering.graph_passes", "kvpass.lowering.row_products"}
    seen: set[str] = set()
    while waiting:
        seen.add(name := waiting.pop())
        waiting |= imported_by(importlib.import_module(name)) - seen
    assert {name.split(".")[1] for name in seen - DECIDE_NOTHING} <= set(graph_passes.HASHED)


@pytest.mark.parametrize(
    "edited",
    [
        *("fx/splicing.py", "torch_private/inductor.py", "lowering/row_products.py", "lowering/row_kernel.cpp"),
        "runtime/backend_base.py",
    ],
)
@pytest.mark.parametrize("change", CHANGES)
def test_editing_code_that_a_graph_change_runs_changes_the_digest(
    change: types.FunctionType, edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(ROOT, tmp_path / "kvpass", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(versions, "__file__", str(copy / "versions.py"))
    monkeypatch.setattr(graph_passes, "__file__", str(copy / "lowering" / "graph_passes.py"))
    monkeypatch.setattr(backend_base, "__file__", str(copy / "runtime" / "backend_base.py"))
    found = []
    for _ in range(2):
        versions.digest_of_sources.cache_clear()
        found.append(graph_passes.pass_digest(change))
        with open(copy / edited, "a", encoding="utf-8") as file:
            file.write("# edited\n")
    monkeypatch.undo()
    versions.digest_of_sources.cache_clear()
    assert found[0] == graph_passes.pass_digest(change) != found[1]


def test_each_change_of_a_graph_has_a_digest_of_its_own() -> None:
    def other(graph: fx.Graph) -> None:
        del graph

    assert len({graph_passes.pass_digest(change) for change in (*CHANGES, other)}) == 3
