"""Test the facts that errors carry: the line of the model and the reason, in copies, pickles and wrapped errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx

import kvpass
from kvpass.apps.evaluation.session import unless_refused
from tests.models import build

IDS = torch.arange(3, 11)[None]
SETTINGS: dict[str, Any] = dict(policy="h2o", budget=8, inner="eager")
SDPA = "sdpa_attention.py"
"""The file of transformers that calls torch's attention."""


def in_place(model: Any) -> Any:
    return kvpass.compile(model, **SETTINGS)


def as_backend(model: Any) -> Any:
    return torch.compile(model, backend=kvpass.backend(**SETTINGS))


def check_facts(error: kvpass.UnsupportedGraph, reason: str) -> None:
    """Check the line and the reason of an error, and of a copy and a pickle of it."""
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(each) is type(error)
        assert str(each) == str(error)
        assert each.reason == error.reason
        assert each.line == error.line
    file, number, code = str(error.line).split(":", 2)
    assert file.endswith(SDPA)
    assert number.isdigit()
    assert "scaled_dot_product_attention" in code
    assert error.reason.startswith(reason)


@pytest.mark.parametrize("way", [in_place, as_backend])
def test_a_refusal_of_a_model_has_its_line_and_reason(way: Callable[[Any], Any]) -> None:
    model = way(build("Llama", layers=1))
    with torch.enable_grad(), pytest.raises(kvpass.UnsupportedGraph, match="needs gradients") as refused:
        model(IDS, use_cache=True)
    check_facts(refused.value, "the graph needs gradients, and a bounded cache has none; call model.eval()")
    assert str(refused.value) == f"{refused.value.line}: {refused.value.reason}"


@pytest.mark.parametrize("way", [in_place, as_backend])
def test_of_several_refusals_the_first_has_its_line_and_reason(way: Callable[[Any], Any]) -> None:
    model = build("Llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    compiled = way(model)
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="2 cache-updating operation") as refused:
        compiled(IDS, use_cache=True)
    check_facts(refused.value, "attention with dropout 0.1: the model is in training mode")


def test_an_error_that_dynamo_wraps_keeps_its_line_and_reason() -> None:
    refusal = kvpass.ShardingError("no rewrite", line=f"{SDPA}:7: scaled_dot_product_attention(q, k, v)")

    def refuse(dynamo_gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        raise refusal

    compiled = torch.compile(torch.sin, backend=refuse)
    found = unless_refused(lambda: compiled(torch.ones(2)))
    assert found is refusal
    check_facts(refusal, "no rewrite")


@pytest.mark.parametrize(
    "error",
    [
        kvpass.PolicyError("old"),
        kvpass.UnsupportedGraph("old", line="model.py:3: x"),
        kvpass.UnsupportedGraph("old", message="whole"),
    ],
    ids=str,
)
def test_a_reworded_error_shows_its_new_message_alone(error: kvpass.KVPassError) -> None:
    facts = {name: getattr(error, name) for name in ("reason", "line") if hasattr(error, name)}
    before = str(error)
    error.reword(f"file: {before}")
    assert str(error) == "file: " + before
    assert all(getattr(error, name) == fact for name, fact in facts.items())
