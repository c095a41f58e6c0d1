"""Test position ids of prompts with several rotary embeddings."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.fx as fx

import kvpass
from kvpass.runtime import checks
from kvpass.runtime.checks import PositionCheck

VALID = torch.tensor([[True] * 4, [False, True, True, True]])


def check_of(monkeypatch: pytest.MonkeyPatch, starts: list[int | None]) -> PositionCheck:
    """Return a check for the caller's ids (None) and for computed ids that start at a number."""
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    nodes = [ids if start is None else graph.call_function(torch.add, (ids, start)) for start in starts]
    graph.output(tuple(nodes))
    monkeypatch.setattr(checks, "find_rotary", lambda site: types.SimpleNamespace(position=nodes[site]))
    monkeypatch.setattr(checks, "strip_reshapes", lambda node: node)
    sites: Any = range(len(starts))
    return PositionCheck(fx.GraphModule(torch.nn.Module(), graph), sites)


def ids_from(start: int) -> torch.Tensor:
    return (VALID.long().cumsum(-1) - 1 + start).clamp(min=0)


@pytest.mark.parametrize("starts", [[3], [3, None], [None, 3], [None], [3, 3, 3]])
def test_a_step_goes_on_from_the_ids_of_a_prompt(monkeypatch: pytest.MonkeyPatch, starts: list[int | None]) -> None:
    check = check_of(monkeypatch, starts)
    first, seen = check.first_ids((ids_from(0),), VALID), VALID.sum(-1)
    assert first is not None
    assert first.tolist() == [max(start or 0 for start in starts)] * 2
    for ids, fits in ((seen, True), (seen + 1, False)):
        assert bool(check.continues((ids[:, None],), VALID[:, -1:], first, seen)) == fits


@pytest.mark.parametrize("first_id", [1, 7])
def test_ids_of_the_caller_continue_from_any_first_id(monkeypatch: pytest.MonkeyPatch, first_id: int) -> None:
    check, seen = check_of(monkeypatch, [None, None]), VALID.sum(-1)
    first = check.first_ids((ids_from(0) + first_id,), VALID)
    assert first is not None
    assert first.tolist() == [first_id] * 2
    for ids, fits in ((first_id + seen, True), (seen, False)):
        assert bool(check.continues((ids[:, None],), VALID[:, -1:], first, seen)) == fits
    assert bool(check.continues((seen[:, None],), VALID[:, -1:], None, seen))  # rows from several prompts


def test_ids_of_the_caller_beside_the_ones_of_the_model_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvpass.UnsupportedGraph, match="do not increase by one over the real tokens"):
        check_of(monkeypatch, [3, None]).first_ids((ids_from(0) + 1,), VALID)


def test_rotary_embeddings_that_begin_at_ids_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvpass.UnsupportedGraph, match="several rotary embeddings"):
        check_of(monkeypatch, [3, None, 5]).first_ids((ids_from(0),), VALID)
