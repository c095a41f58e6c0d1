"""Test how many keys a sparse index is known to select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs

from kvpass.capture.sparse_index import SparseIndex, _selection_limit, cached_scoring_keys
from kvpass.fx import walk


def topk_of(count: Callable[[Any], Any]) -> fx.Node:
    """Return the topk of a graph with a dynamic number of keys S, which selects `count(S)` of them."""
    backend = EagerAndRecordGraphs()

    def select(scores: Tensor) -> Tensor:
        return scores.topk(count(scores.shape[-1]), -1).indices

    scores = torch.rand(2, 90)
    torch._dynamo.mark_dynamic(scores, 1)
    torch.compile(select, backend=backend)(scores)
    return next(node for node in backend.graphs[0].graph.nodes if "topk" in str(node.target))


@pytest.mark.parametrize(
    ("count", "limit"),
    [
        (lambda keys: 64, 64),
        (lambda keys: torch.sym_min(64, keys), 64),
        (lambda keys: keys, None),
        (lambda keys: torch.sym_min(64, keys - 1), 0),
        (lambda keys: torch.sym_min(keys // 2, keys - 1), 0),
        (lambda keys: keys - 1, 0),
        (lambda keys: keys // 2, 0),
    ],
)
def test_the_most_keys_that_a_sparse_index_selects(count: Any, limit: int | None) -> None:
    """Check that an index is only said to select all keys up to a number if it does; 0 is unknown."""
    assert _selection_limit(topk_of(count)) == limit


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.concatenate])
def test_scoring_keys_are_found_in_any_spelling(join: Any) -> None:
    backend = EagerAndRecordGraphs()

    def select(past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        keys = join([past, new], 1)
        return keys, (new @ keys.transpose(1, 2)).topk(2, -1).indices

    torch.compile(select, backend=backend)(torch.rand(1, 5, 8), torch.rand(1, 1, 8))
    outputs = walk.results(backend.graphs[0].graph)
    index = SparseIndex(outputs[1], True, outputs[1].all_input_nodes[0], 2)
    assert cached_scoring_keys(index, outputs) == [(outputs[0], 1)]
