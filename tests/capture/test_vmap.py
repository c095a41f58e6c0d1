"""Test that expanded torch.vmap calls give equal results, and that unsupported ones stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture import simplify
from kvpass.torch_private import fx_nodes

ROWS, QUERIES, KEYS = torch.arange(2), torch.arange(3, 6), torch.arange(6)
TABLE = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
LAST = torch.tensor(4)

One = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of one row, query and key."""

TERMS: dict[str, One] = {
    "causal": lambda b, q, k: k <= q,
    "causal, as a method": lambda b, q, k: k.le(q),
    "a window": lambda b, q, k: k > q - 2,
    "looked up by row and key": lambda b, q, k: TABLE[b, k] > 0,
    "looked up by row and query": lambda b, q, k: TABLE[b, q] > 0,
    "blocks": lambda b, q, k: (TABLE[b, q] > 0) == (TABLE[b, k] > 0),
    "all": lambda b, q, k: q.new_ones((), dtype=torch.bool),
    "a tensor from outside": lambda b, q, k: k < LAST,
    "of the row alone": lambda b, q, k: b == 0,
    "a chosen number": lambda b, q, k: torch.where(k < q, k, q) > 2,
}


def mapped(one: One) -> Callable[..., Tensor]:
    """Map a function over [B], [q] and [S] to [B, q, S], as transformers makes masks."""
    keys = torch.vmap(one, in_dims=(None, None, 0))
    return torch.vmap(torch.vmap(keys, in_dims=(None, 0, None)), in_dims=(0, None, None))


def written_out(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, int]:
    """Return the output of a graph after expansion, and the number of remaining calls into vmap."""
    left: list[int] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        assert any(map(fx_nodes.is_batching, gm.graph.nodes))
        simplify.replace_vmap(gm.graph)
        gm.graph.lint()
        gm.recompile()
        left.append(sum(map(fx_nodes.is_batching, gm.graph.nodes)))
        return gm.forward

    torch._dynamo.reset()
    made: Tensor = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return made, sum(left)


@pytest.mark.parametrize("seed", range(4))
def test_any_mask_of_one_at_a_time(seed: int) -> None:
    """Combine every term with the others, by random operators in random order."""
    drawn = random.Random(seed)
    terms = drawn.sample(list(TERMS.values()), len(TERMS))
    joins = [drawn.choice([torch.logical_and, torch.logical_or, torch.bitwise_xor]) for _ in terms]

    def one(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        made = terms[0](b, q, k)
        for term, join in zip(terms[1:], joins, strict=False):
            made = join(made, term(b, q, k))
        return made

    ours, left = written_out(lambda *given: mapped(one)(*given), ROWS, QUERIES, KEYS)
    assert not left
    assert torch.equal(ours, mapped(one)(ROWS, QUERIES, KEYS))


def test_several_of_one_depth() -> None:
    def both(*given: Tensor) -> Tensor:
        return mapped(TERMS["causal"])(*given) & mapped(TERMS["blocks"])(*given)

    ours, left = written_out(both, ROWS, QUERIES, KEYS)
    assert not left
    assert torch.equal(ours, both(ROWS, QUERIES, KEYS))


def across(rows: Tensor, keys: Tensor) -> Tensor:
    """Return [S, B]: the outer mapped dimension comes last, not first."""
    one = torch.vmap(lambda b, k: b < k, in_dims=(None, 0))
    return torch.vmap(one, in_dims=(0, None), out_dims=1)(rows, keys)


def of_two_depths(rows: Tensor, keys: Tensor) -> Tensor:
    return torch.vmap(lambda b: b > 0)(rows)[:, None] & torch.vmap(
        torch.vmap(lambda b, k: b < k, in_dims=(None, 0)), in_dims=(0, None)
    )(rows, keys)


STAYS: dict[str, Callable[..., Tensor]] = {
    "something with dimensions inside": lambda rows, keys: torch.vmap(lambda b: (TABLE[b] > 0).any())(rows),
    "an operation along what is mapped over": lambda rows, keys: torch.vmap(lambda b: b.cumsum(0))(rows),
    "another dtype beside a number": lambda rows, keys: torch.vmap(lambda k: k.int() * LAST)(keys),
    "levels that are put behind": across,
    "several of different depths": of_two_depths,
}


@pytest.mark.parametrize("what", STAYS)
def test_an_unsupported_vmap_stays(what: str) -> None:
    ours, left = written_out(lambda *given: STAYS[what](*given), ROWS, KEYS)
    assert left
    assert torch.equal(ours, STAYS[what](ROWS, KEYS))
