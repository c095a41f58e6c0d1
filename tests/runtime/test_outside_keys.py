"""Test that keys which grow outside of every graph are refused, and that those of an encoder are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from tests import models

IDS = torch.randint(0, 16, (2, 40), generator=torch.Generator().manual_seed(0))
PIECES = (5, *[1] * 6)


class UncompiledCache:
    """A cache that grows in a function that Dynamo does not trace."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable
    def update(self, *new: Tensor) -> tuple[Tensor, Tensor]:
        key, value = new if self.pair is None else (torch.cat(each, 2) for each in zip(self.pair, new, strict=True))
        self.pair = key, value
        return self.pair


class Attending(nn.Module):
    """An attention layer.

    Args:
        rotate: changes queries and keys after the update, by the first index of each.
        early: whether queries are projected before the update.
    """

    def __init__(self, rotate: Callable[[Tensor, Any], Tensor], early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.early, self.rotate = nn.Embedding(16, 16), early, rotate
        self.query, self.key_value = nn.Linear(16, 16), nn.Linear(16, 32)
        self.eval()

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        x = self.embed(ids)
        query = self.query(x).unflatten(-1, (-1, 8)).transpose(1, 2) if self.early else None
        key, value = cache.update(*self.key_value(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, 1))
        if query is None:
            query = self.query(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        count, total = query.shape[2], key.shape[2]
        query, key = self.rotate(query, total - count), self.rotate(key, 0)
        mask = torch.arange(total) <= torch.arange(total - count, total)[:, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def unrotated(x: Tensor, first: Any) -> Tensor:
    return x


def rotated(x: Tensor, first: Any) -> Tensor:
    angle = torch.arange(first, first + x.shape[2]).float()[:, None] @ torch.tensor([[1.0, 0.5, 0.2, 0.1]])
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


@torch.no_grad()
def converse(compiled: Any, cache: UncompiledCache) -> None:
    for piece in IDS[:, : sum(PIECES)].split(PIECES, 1):
        compiled(piece.contiguous(), cache)


@pytest.mark.parametrize(("rotate", "early"), [(unrotated, False), (rotated, False), (rotated, True)])
def test_keys_that_grow_in_an_uncompiled_function_are_refused(rotate: Any, early: bool) -> None:
    compiled = torch.compile(Attending(rotate, early), backend=kvpass.backend("streaming", budget=6, inner="eager"))
    with pytest.raises(kvpass.UnsupportedGraph, match="come from outside of the graph and grow with each call"):
        converse(compiled, UncompiledCache())


def test_a_backend_that_is_not_strict_warns_once() -> None:
    backend = kvpass.backend("streaming", budget=6, inner="eager", strict=False)
    cache, compiled = UncompiledCache(), torch.compile(Attending(unrotated), backend=backend)
    with pytest.warns(kvpass.KVPassWarning, match="grow with each call") as warned:
        converse(compiled, cache)
    assert len([each for each in warned if "grow with each call" in str(each.message)]) == 1
    assert cache.pair is not None
    assert cache.pair[0].shape[2] == sum(PIECES)


class CrossAttending(Attending):
    """A layer that attends to keys and values of an encoder, which a caller passes."""

    def forward(self, ids: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        query = self.query(self.embed(ids)).unflatten(-1, (-1, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, *cache)


@torch.no_grad()
def test_keys_of_one_encoder_output_after_another_are_not_refused() -> None:
    """Check outputs that differ by one token in length, which is the number of new tokens."""
    model = CrossAttending(unrotated)
    compiled = torch.compile(model, backend=kvpass.backend("full", inner="eager"), dynamic=True)
    for length in (7, 8, 9, 9, 8, 9):
        pair = torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
        for step in range(2):
            ids = IDS[:, step : step + 1].contiguous()
            torch.testing.assert_close(compiled(ids, pair), model(ids, pair))


@torch.no_grad()
def test_an_output_of_an_encoder_may_be_empty() -> None:
    compiled = torch.compile(CrossAttending(unrotated), backend=kvpass.backend("full", inner="eager"), dynamic=True)
    for length in (7, 3, 0, 1, 0):
        compiled(IDS[:, :1].contiguous(), (torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)))


@torch.no_grad()
def test_growth_is_noticed_where_conversations_take_turns() -> None:
    backend = kvpass.backend("streaming", budget=6, inner="eager")
    compiled = torch.compile(Attending(unrotated), backend=backend, dynamic=True)
    caches = UncompiledCache(), UncompiledCache()
    for cache, length in zip(caches, (5, 9), strict=True):
        compiled(IDS[:, :length].contiguous(), cache)
    turns = [(cache, step) for step in range(20, 30) for cache in caches]
    with pytest.raises(kvpass.UnsupportedGraph, match="grow with each call"):
        take_turns(compiled, turns)


def take_turns(compiled: Any, turns: list[tuple[UncompiledCache, int]]) -> None:
    for cache, step in turns:
        compiled(IDS[:, step : step + 1].contiguous(), cache)


class AttendingTwice(nn.Module):
    """A language model, and an attention layer on keys and values that a caller passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.query = models.build("Llama", layers=3), nn.Linear(128, 8)
        self.eval()

    def forward(self, ids: Tensor, outside: tuple[Tensor, Tensor], past_key_values: Any = None) -> Any:
        out = self.inner(ids, past_key_values=past_key_values, use_cache=True)
        attended = F.scaled_dot_product_attention(self.query(out.logits)[:, None], *outside)
        return out.past_key_values, attended


@torch.no_grad()
def attend_twice(model: Any) -> None:
    keys, seen, cache = torch.randn(2, 1, sum(PIECES), 8), 0, None
    for piece in IDS[:, : sum(PIECES)].split(PIECES, 1):
        seen += piece.shape[1]
        cache, _ = model(piece.contiguous(), (keys[:, :, :seen], keys[:, :, :seen]), cache)


def test_a_model_whose_layers_are_regions_warns_too() -> None:
    model = AttendingTwice()
    kvpass.compile(model, "streaming", budget=32, inner="eager", strict=False)
    with pytest.warns(kvpass.KVPassWarning, match="grow with each call"):
        attend_twice(model)
