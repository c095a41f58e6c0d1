"""Test hand-written models that precompute rotary tables and slice them by the number of cached tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpass
from kvpass.errors import UnsupportedGraph
from tests.drawing import EXAMPLES
from tests.own_llama import Output, OwnLlama, Way
from tests.test_tokens_first import compiled, fed, tokens

TABLES = {"angles": "halves", "pair": "halves", "complex": "complexes"}


@settings(max_examples=max(4, EXAMPLES // 2))
@given(
    table=st.sampled_from(list(TABLES)),
    dim=st.sampled_from([1, 2]),
    kv_heads=st.integers(1, 3),
    rows=st.integers(1, 2),
    pieces=st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=2, max_size=4),
)
def test_until_something_is_evicted_it_is_the_uncompiled_model(
    table: str, dim: int, kv_heads: int, rows: int, pieces: list[int]
) -> None:
    way, ids = Way(dim, dim, rotate=TABLES[table], table=table), tokens(rows, sum(pieces))
    model = OwnLlama(way, width=16 * kv_heads, heads=2 * kv_heads, kv_heads=kv_heads)
    ours, _ = fed(compiled(model, "streaming", budget=32, positions="cache"), ids, pieces)
    assert torch.allclose(ours, fed(model, ids, pieces)[0], atol=1e-5)


@pytest.mark.few(6)
@pytest.mark.parametrize("inner", ["eager", "reference"])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("table", TABLES)
def test_keys_are_rotated_by_cache_positions_as_with_computed_angles(table: str, dim: int, inner: str) -> None:
    """Decode beyond the first eviction, and beyond the part of the table that cache positions read."""
    way, ids, pieces = Way(dim, dim, rotate=TABLES[table], table=table), tokens(2, 30), [9, *[1] * 6, 5, *[1] * 10]
    model, other = OwnLlama(way, layers=2), OwnLlama(dataclasses.replace(way, table=""), layers=2)
    settings = dict(budget=8, sinks=2, inner=inner)
    (ours, cache), (theirs, _) = (fed(compiled(each, "streaming", **settings), ids, pieces) for each in (model, other))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert kvpass.inspect(cache).layers[0].positions.shape[-1] <= 9


def test_it_is_the_default() -> None:
    ids, pieces = tokens(1, 16), [9, *[1] * 7]
    model = OwnLlama(Way(table="complex", rotate="complexes"))
    by_default, cached, absolute = (
        fed(compiled(model, "streaming", budget=6, positions=positions), ids, pieces)[0]
        for positions in (None, "cache", "absolute")
    )
    assert torch.equal(by_default, cached)
    assert not torch.allclose(absolute, cached, atol=1e-3)


class KeepsAPlainTensor(OwnLlama):
    """A decoder whose table is an attribute but no buffer, as in Meta's code."""

    def add_tables(self, count: int = 128) -> None:
        super().add_tables(count)
        self.plain = self.turn.clone()

    def rows_of_tables(self, start: int, stop: int) -> torch.Tensor:
        return self.plain[start:stop, :][None]


def test_a_table_that_is_no_buffer() -> None:
    ids, pieces = tokens(1, 16), [9, *[1] * 7]
    way = Way(table="complex", rotate="complexes")
    ours, theirs = (
        fed(compiled(kind(way), "streaming", budget=6, positions="cache"), ids, pieces)[0]
        for kind in (KeepsAPlainTensor, OwnLlama)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("positions", [None, "cache", "absolute"])
def test_a_budget_larger_than_the_table(positions: str | None) -> None:
    ids, pieces = tokens(1, 12), [9, 1, 1, 1]
    model = OwnLlama(Way(table="angles"))
    ours, _ = fed(compiled(model, "streaming", budget=200, positions=positions), ids, pieces)
    assert torch.allclose(ours, fed(model, ids, pieces)[0], atol=1e-5)


class BeginsLater(OwnLlama):
    def rows_of_tables(self, start: int, stop: int) -> torch.Tensor:
        return self.angles[start + 2 : stop + 2][None]


class ScalesHeads(OwnLlama):
    """A decoder with a scale that has as many entries as the prompt has tokens, along other dimensions."""

    def add_tables(self, count: int = 128) -> None:
        super().add_tables(count)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def rows_of_tables(self, start: int, stop: int) -> torch.Tensor:
        return super().rows_of_tables(start, stop) * self.scale[:4]


class Gain(torch.nn.Module):
    """A model of one layer whose keys are scaled by a table that comes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(128, 8), torch.nn.Linear(8, 128, bias=False)

    def forward(self, input_ids: torch.Tensor, gain: torch.Tensor, past_key_values: Any = None) -> Output:
        x = self.embed(input_ids)[:, None]  # [B, 1, q, D]
        seen = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        key, value = x * gain[seen : seen + input_ids.shape[1]], x
        if past_key_values is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(past_key_values[0], (key, value), strict=True))
        allowed = torch.arange(key.shape[2]) <= torch.arange(seen, key.shape[2])[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(x, key, value, attn_mask=allowed)
        return Output(self.head(y[:, 0]), ((key, value),))


@torch.no_grad()
def test_a_table_among_the_arguments_is_none_of_positions() -> None:
    """Check the refusal: the next call may bring another table."""
    model, ids, gain = Gain().eval(), tokens(1, 9), torch.rand(40, 1)
    with pytest.raises(UnsupportedGraph, match="positions='cache' is not possible"):
        compiled(model, "streaming", budget=6, positions="cache")(ids, gain)
    by_default = compiled(model, "streaming", budget=6)
    cache, made = None, []
    for piece in (ids[:, :6], *ids[:, 6:].split(1, 1)):
        out = by_default(piece, gain, past_key_values=cache)
        cache, made = out.past_key_values, [*made, out.logits]
    assert kvpass.inspect(cache).layers[0].positions.max() == 8
    assert torch.allclose(torch.cat(made, 1)[:, :6], model(ids[:, :6], gain).logits, atol=1e-5)


@pytest.mark.parametrize("kind", [BeginsLater, ScalesHeads])
def test_other_slices_change_nothing(kind: type[OwnLlama]) -> None:
    """Check default positions, which tables do not change, and outputs equal to the uncompiled model."""
    model, ids, pieces = kind(Way(table="angles")), tokens(1, 12), [4, 1, 1, 2, 1]
    ours, _ = fed(compiled(model, "streaming", budget=16), ids, pieces)
    assert torch.allclose(ours, fed(model, ids, pieces)[0], atol=1e-5)


class WritesToItsTable(OwnLlama):
    def rows_of_tables(self, start: int, stop: int) -> torch.Tensor:
        self.angles.add_(0.5)
        return super().rows_of_tables(start, stop)


class SkipsRows(OwnLlama):
    def rows_of_tables(self, start: int, stop: int) -> torch.Tensor:
        return self.angles[2 * start : 2 * stop : 2][None]


@pytest.mark.parametrize("kind", [WritesToItsTable, SkipsRows])
def test_what_cannot_be_read_as_positions_is_refused(kind: type[OwnLlama]) -> None:
    model = kind(Way(2, 2, table="angles"))
    with pytest.raises(UnsupportedGraph, match="positions='cache' is not possible"):
        fed(compiled(model, "streaming", budget=6, positions="cache"), tokens(1, 9), [9])
