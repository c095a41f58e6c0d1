"""Compare graphs and outputs of three cases with the recorded ones; `python -m tests.golden` compares all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.fx as fx

from kvpass import policies
from tests.golden import cases, program, store
from tests.golden.record import Recording, record

FIRST = (("Llama", "h2o"), ("GPT2", "streaming"), ("bart (reading)", "tova"))
"""Cases of the default run."""


def others() -> list[store.Case]:
    return [case for case in cases.cases() if case not in FIRST]


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    recordings = store.load()
    if recordings["versions"] != store.versions():
        pytest.skip(f"recorded with {recordings['versions']}")
    return recordings


def check(case: store.Case, stored: dict[str, Any]) -> None:
    model, policy = case
    assert store.difference(case, record(model, [policy])[policy], stored) == ""


@pytest.mark.few(2)
@pytest.mark.parametrize("case", FIRST, ids="-".join)
def test_a_recorded_case_is_as_it_was(case: store.Case, stored: dict[str, Any]) -> None:
    check(case, stored)


@pytest.mark.few(0)
@pytest.mark.some(4)
@pytest.mark.parametrize("case", others(), ids="-".join)
def test_every_other_case_is_as_it_was(case: store.Case, stored: dict[str, Any]) -> None:
    if " | ".join(case) not in stored["cases"]:
        pytest.skip("not recorded: python -m tests.golden --write --missing")
    check(case, stored)


def test_recorded_cases_are_cases_and_have_been_run(stored: dict[str, Any]) -> None:
    assert set(stored["cases"]) <= {" | ".join(case) for case in cases.cases()}
    assert {" | ".join(case) for case in FIRST} <= set(stored["cases"])
    assert all("tokens" in each["outputs"] for each in stored["cases"].values())


def traced(scale: float, name: str = "x") -> fx.Graph:
    """Trace a graph whose input has the given name."""
    graph = fx.Graph()
    node = graph.placeholder(name)
    graph.output(graph.call_function(torch.mul, (graph.call_method("cos", (node,)), scale)))
    return graph


def test_a_text_has_no_names_of_nodes_but_what_they_compute() -> None:
    assert program.text(traced(2.0)) == program.text(traced(2.0, "elsewhere"))
    assert program.text(traced(2.0)) != program.text(traced(3.0))


def test_operators_are_named_without_modules_of_the_package() -> None:
    assert program.operator(policies.get) == "get"
    assert program.operator(torch.ops.aten.add.Tensor) == "aten::add.Tensor"


def test_a_difference_is_shown_line_by_line() -> None:
    texts = [program.text(traced(scale)) for scale in (2.0, 3.0)]
    stored: dict[str, Any] = {"cases": {}, "texts": {store.digest(texts[0]): texts[0]}}
    outputs = {"tokens": [[1]], "logits": [[[0.0, 1.0, 2.0]]], "positions": [[0, 1]]}
    stored["cases"]["a | b"] = {"stages": [["canonical", store.digest(texts[0])]], "outputs": copy.deepcopy(outputs)}
    same, other = (Recording([("canonical", text)], outputs) for text in texts)
    assert store.difference(("a", "b"), same, stored) == ""
    assert "-mul_0 = torch.mul(cos_0, 2.0)" in store.difference(("a", "b"), other, stored)
    moved = Recording(same.stages, {**outputs, "logits": [[[0.0, 1.0, 2.1]]], "positions": [[0, 2]]})
    assert store.difference(("a", "b"), moved, stored).count("recorded:") == 2
