"""Test attention in pieces and blocks: all blocks together have the logits and probabilities of the whole matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpass.lowering.attend import LOWEST
from kvpass.lowering.attention_blocks import (
    AttentionInputs,
    blocks,
    by_group,
    column_sums_in_blocks,
    probs_in_blocks,
    zeros,
)

DIM = 4


@st.composite
def attentions(draw: st.DrawFn) -> AttentionInputs:
    """Draw an attention, in which a query may see no key unless it is causal."""
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows, heads, groups, count = (draw(st.integers(1, most)) for most in (3, 3, 2, 7))
    keys, causal = count + draw(st.integers(0, 4)), draw(st.booleans())
    query = torch.randn(rows, heads * groups, count, DIM, generator=drawn)
    key = torch.randn(rows, heads, keys, DIM, generator=drawn)
    by_head = st.sampled_from([1, heads, heads * groups])
    shape = (draw(st.sampled_from([1, rows])), draw(by_head), draw(st.sampled_from([1, count])))
    visible = torch.rand(*shape, keys, generator=drawn) < 0.6
    if causal:
        visible[..., 0] = True
    mask = draw(st.sampled_from([None, visible, torch.where(visible, 0.5, -torch.inf)]))
    sink = draw(st.sampled_from([None, torch.randn(*shape[:1], heads * groups, shape[2], 1, generator=drawn)]))
    return AttentionInputs(query, key, mask, causal, 0.7, draw(st.sampled_from([None, 2.0])), sink)


def whole(attention: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return all logits and probabilities, [B, Hkv, G, q, S] in float64, of one matrix for each head."""
    batch, heads, keys, _ = attention.key.shape
    groups, count = attention.query.shape[1] // heads, attention.query.shape[2]
    key = attention.key.repeat_interleave(groups, 1)
    logits = attention.query.double() @ key.double().transpose(-1, -2) * attention.scale
    if attention.cap is not None:
        logits = torch.tanh(logits / attention.cap) * attention.cap
    visible = torch.ones(batch, heads * groups, count, keys, dtype=torch.bool)
    if attention.causal:
        visible = visible.tril(keys - count)
    if attention.mask is not None:
        shared = attention.mask.shape[1]
        mask = attention.mask.repeat_interleave(groups, 1) if shared == heads and groups > 1 else attention.mask
        visible = visible & (mask if mask.dtype == torch.bool else mask > -torch.inf)
        logits = logits if mask.dtype == torch.bool else logits + mask
    logits = logits.masked_fill(~visible, -torch.inf)
    columns = [logits] if attention.sink_logit is None else [logits, attention.sink_logit.expand(batch, -1, count, 1)]
    probs = torch.cat(columns, -1).softmax(-1)[..., :keys].nan_to_num(0)  # nothing for a query without keys
    return logits.view(batch, heads, groups, count, keys), probs.view(batch, heads, groups, count, keys)


def finite(logits: Tensor) -> Tensor:
    """Return logits with the least number for all hidden keys."""
    return logits.double().clamp(min=LOWEST)


@given(attention=attentions(), size=st.sampled_from([1, 40, 1 << 20]))
def test_blocks_have_the_logits_and_probabilities_of_the_whole(attention: AttentionInputs, size: int) -> None:
    logits, probs = whole(attention)
    stop = 0
    for block, part in probs_in_blocks(attention, size):
        assert block.queries.start == stop  # consecutive
        stop = block.queries.stop
        assert block.logits.numel() <= size or block.queries.stop == block.queries.start + 1
        keys, beyond = block.keys, slice(block.keys.stop, None)
        torch.testing.assert_close(finite(block.logits), finite(logits[..., block.queries, keys]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.double(), probs[..., block.queries, keys], atol=1e-5, rtol=1e-5)
        assert not probs[..., block.queries, beyond].any()  # a block leaves out only keys that no query sees
    assert stop == attention.query.shape[2]


@given(attention=attentions(), threads=st.integers(1, 7), whole_rows=st.booleans())
def test_pieces_have_every_row_and_head_once(attention: AttentionInputs, threads: int, whole_rows: bool) -> None:
    expected, (rows, heads) = whole(attention)[1], attention.key.shape[:2]
    counted, before = torch.zeros(rows, heads), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pieces = list(attention.pieces(whole_rows))
    finally:
        torch.set_num_threads(before)
    for part, piece in pieces:
        counted[part] += 1
        torch.testing.assert_close(whole(piece)[1], expected[part], atol=1e-6, rtol=1e-6)
        assert piece.key.shape[0] * piece.key.shape[1] <= max(threads, heads if whole_rows else 1)
        assert not whole_rows or piece.key.shape[:2] == (1, heads)
    assert (counted == 1).all()


@given(attention=attentions(), powers=st.integers(0, 2), seed=st.integers(0, 99), weighed=st.booleans())
def test_column_sums_are_sums_of_powers_over_weighed_queries(
    attention: AttentionInputs, powers: int, seed: int, weighed: bool
) -> None:
    rows, count = attention.query.shape[0], attention.query.shape[2]
    weight = torch.rand(rows, count, generator=torch.Generator().manual_seed(seed))
    weight = weight if weighed else weight.round()
    _, probs = whole(attention)
    sums = column_sums_in_blocks(attention, weight, powers)
    assert len(sums) == powers
    for power, found in enumerate(sums, 1):
        expected = (probs**power * weight[:, None, None, :, None]).sum(-2)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)


@given(attention=attentions(), data=st.data())
def test_gathered_queries_attend_as_before(attention: AttentionInputs, data: st.DataObject) -> None:
    rows, count = attention.query.shape[0], attention.query.shape[2]
    picked = st.lists(st.integers(0, count - 1), min_size=2, max_size=2)
    index = torch.tensor(data.draw(st.lists(picked, min_size=rows, max_size=rows)))
    gathered = attention.gathered(index)
    assert not gathered.causal
    _, probs = whole(attention)
    for _, part in probs_in_blocks(gathered):
        wanted = torch.stack([own[:, :, each] for own, each in zip(probs, index, strict=True)])
        torch.testing.assert_close(part.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cpu_multiplies_half_precision_in_float32(dtype: torch.dtype) -> None:
    query, key = torch.randn(1, 2, 5, DIM).to(dtype), torch.randn(1, 2, 5, DIM).to(dtype)
    attention = AttentionInputs(query, key, None, True, 0.5)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for _, piece in attention.pieces():
        assert (piece.query.dtype, piece.key.dtype) == (expected, expected)
        for block, probs in probs_in_blocks(piece):
            assert (block.logits.dtype, probs.dtype) == (expected, expected)
    (sums,) = column_sums_in_blocks(attention, torch.ones(1, 5), 1)
    torch.testing.assert_close(sums, whole(attention)[1].sum(-2).float(), atol=1e-5, rtol=1e-5)


def test_autocast_changes_no_logits() -> None:
    attention = AttentionInputs(torch.randn(1, 2, 5, DIM), torch.randn(1, 2, 5, DIM), None, False, 0.5)
    (plain,) = blocks(attention)
    expected = plain.logits.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (block,) = blocks(attention)
    assert torch.equal(block.logits, expected)


@pytest.mark.parametrize("count", [0, 1])
def test_attention_of_no_or_one_query(count: int) -> None:
    attention = AttentionInputs(torch.randn(2, 4, count, DIM), torch.randn(2, 2, 6, DIM), None, True, 0.5)
    assert [block.queries for block in blocks(attention)] == [slice(0, 1)] * count
    (sums,) = column_sums_in_blocks(attention, torch.ones(2, count), 1)
    torch.testing.assert_close(sums.sum(-1), torch.full((2, 2, 2), float(count)))
    assert torch.equal(zeros(attention), torch.zeros(2, 2, 2, 6))


@given(size=st.integers(1, 200), shape=st.tuples(*[st.integers(1, 5)] * 4))
def test_slices_of_queries_are_as_large_as_may_be(size: int, shape: tuple[int, ...]) -> None:
    rows, heads, count, keys = shape
    attention = AttentionInputs(torch.zeros(rows, heads, count, 1), torch.zeros(rows, 1, keys, 1), None, False, 1.0)
    spans = attention.query_slices(size)
    each = rows * heads * keys  # logits of a query
    for span in spans:
        assert (span.stop - span.start) * each <= max(size, each)
    assert all((span.stop - span.start + 1) * each > size for span in spans[:-1])
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(count))


@pytest.mark.parametrize(("shape", "grouped"), [(1, (1, 1)), (2, (2, 1)), (6, (2, 3))])
def test_heads_are_grouped_by_kv_head(shape: int, grouped: tuple[int, int]) -> None:
    x = torch.randn(2, shape, 3, 4)
    found = by_group(x, 2)
    assert found.shape == (2, *grouped, 3, 4)
    assert torch.equal(found.flatten(1, 2), x)


@pytest.mark.parametrize("make", [lambda mask: mask, lambda mask: torch.where(mask, 0.0, -torch.inf)])
def test_a_query_that_sees_no_key_has_no_probabilities(make: Any) -> None:
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[..., 1, :] = False
    attention = AttentionInputs(torch.randn(1, 2, 3, DIM), torch.randn(1, 2, 5, DIM), make(mask), False, 0.5)
    with_sink = dataclasses.replace(attention, sink_logit=torch.zeros(1, 2, 1, 1))
    for each in (attention, with_sink):
        for _, probs in probs_in_blocks(each):
            assert not probs[..., 1, :].any()
            assert probs[..., [0, 2], :].gt(0).all()
