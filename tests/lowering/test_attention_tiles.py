"""Compare attention, its rows and their sums by the C++ loops with float64."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.lowering import attention_blocks, attention_sums, attention_tiles
from kvpass.lowering.attention_blocks import AttentionInputs
from kvpass.torch_private import generated_code
from kvpass.torch_private.operators import attend_with_lse

pytestmark = pytest.mark.skipif(
    attention_tiles.dtype_of_products(torch.float32, 64) is None,
    reason="torch multiplies no float32 matrices of fixed sizes on this processor",
)
LOWEST = torch.finfo(torch.float32).min


def in_float64(query: Any, key: Any, mask: Any, weight: Any, *rest: Any) -> list[torch.Tensor]:
    """Return the sums by blocks in float64; arguments as for `column_sums`."""
    causal, scale, cap, sink_logit, powers = rest
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    sink_logit = None if sink_logit is None else sink_logit.double()
    wide = AttentionInputs(query.double(), key.double(), mask, causal, scale, cap, sink_logit)
    return attention_blocks.column_sums_in_blocks(wide, weight, powers)


def sums_of(query: Any, key: Any, mask: Any, weight: Any, *rest: Any) -> list[torch.Tensor]:
    """Return the sums by the C++ loops; a log-sum-exp may follow the arguments of `in_float64`."""
    *common, powers = rest[:5]
    attention = AttentionInputs(query, key, mask, *common)
    return attention_tiles.TiledAttention.of(attention, *rest[5:]).with_totals().column_sums(weight, powers)


def assert_equal(made: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=2e-6, rtol=2e-4)


@st.composite
def operands(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw query, key, value and mask, with sizes below and above a tile of 64 queries and 128 keys.

    Each query sees the first key.
    """
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows, heads, groups = (draw(st.integers(1, 3)) for _ in range(3))
    dim, count, before = draw(st.integers(1, 40)), draw(st.integers(1, 200)), draw(st.sampled_from([0, 0, 1, 77, 130]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    query = torch.randn(rows, count, heads * groups, dim, generator=drawn).to(dtype).transpose(1, 2)
    key = torch.randn(rows, heads, count + before, dim, generator=drawn).to(dtype)
    value = torch.randn(rows, count + before, heads, dim, generator=drawn).to(dtype).transpose(1, 2)
    kind = draw(st.sampled_from(["none", "bool", "float32", "bfloat16", "float16", "-inf", "-1e9", "lowest"]))
    shape = (
        draw(st.sampled_from([1, rows])), draw(st.sampled_from([1, heads, heads * groups])),
        draw(st.sampled_from([1, count])), count + before,
    )  # fmt: skip
    hidden = torch.rand(shape, generator=drawn) < draw(st.sampled_from([0.0, 0.3, 0.97]))
    hidden[..., 0] = False
    fills = {"-inf": -torch.inf, "-1e9": -1e9, "lowest": LOWEST}
    if kind == "none":
        mask = None
    elif kind == "bool":
        mask = ~hidden
    elif kind in fills:
        mask = torch.zeros(shape).masked_fill(hidden, fills[kind])
    else:
        mask = torch.randn(shape, generator=drawn).to(getattr(torch, kind))
    return query, key, value, mask


@given(data=st.data())
@settings(max_examples=150)
def test_sums_are_those_of_float64(data):
    draw = data.draw
    query, key, _, mask = draw(operands())
    (rows, q_heads, count, _), heads = query.shape, key.shape[1]
    groups, before = q_heads // heads, key.shape[2] - count
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    weight = (torch.rand(rows, count, generator=drawn) < 0.8).float()
    cap, powers = draw(st.sampled_from([None, 5.0])), draw(st.integers(1, 2))
    sink_logit = draw(st.sampled_from([None, torch.randn(1, heads * groups, 1, 1, generator=drawn)]))
    given = (query, key, mask, weight, draw(st.booleans()), 0.3, cap, sink_logit, powers)
    assert_equal(sums_of(*given), in_float64(*given))
    computed = attention_tiles.TiledAttention.of(AttentionInputs(query, key, mask, *given[4:8])).with_totals()
    total = torch.zeros(rows, heads, groups, count + before)
    step = draw(st.integers(1, 200))
    for row in range(rows):
        for start in range(0, count, step):
            stop = min(start + step, count)
            probs = computed.probabilities(row, slice(start, stop), before + stop if given[4] else before + count)
            total[row, ..., : probs.shape[-1]] += torch.einsum("hgnk,n->hgk", probs[0], weight[row, start:stop])
    assert_equal([total], in_float64(*given[:-1], 1))


@given(data=st.data())
@settings(max_examples=150)
def test_attention_is_that_of_float64(data):
    query, key, value, mask = data.draw(operands())
    causal, cap = data.draw(st.booleans()), data.draw(st.sampled_from([None, 5.0]))
    sink_logit = data.draw(st.sampled_from([None, torch.full((1, query.shape[1], 1, 1), 0.5)]))
    rows = attention_tiles.TiledAttention.of(AttentionInputs(query, key, mask, causal, 0.3, cap, sink_logit))
    output, log_sum_exp, _ = rows.attend(value)
    logits, expected = attention_in_float64(query, key, value, mask, causal, 0.3, cap, sink_logit)
    near = dict(atol=4e-5, rtol=1e-4) if rows.dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)
    near = dict(atol=1e-2, rtol=1e-2) if output.dtype != rows.dtype else near  # rounded at the end
    torch.testing.assert_close(output.double(), expected, **near)
    torch.testing.assert_close(log_sum_exp.double(), logits.logsumexp(-1), atol=1e-4, rtol=1e-4)
    assert output.dtype == value.dtype
    assert output.transpose(1, 2).is_contiguous()


def attention_in_float64(query, key, value, mask, causal, scale, cap, sink_logit):
    """Return logits [B, Hq, q, S], or S + 1 with the sink, and the output."""
    groups, count, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    logits = query.double() @ key.mT * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    if mask is not None and 1 < mask.shape[1] < query.shape[1]:
        mask = mask.repeat_interleave(groups, 1)
    if mask is not None:
        logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    if causal:
        ahead = torch.ones(count, keys, dtype=torch.bool).triu(keys - count + 1)
        logits = logits.masked_fill(ahead, -torch.inf)
    if sink_logit is not None:
        logits = torch.cat([logits, sink_logit.double().expand(*logits.shape[:3], 1)], -1)
    return logits, logits.softmax(-1)[..., :keys] @ value


@given(data=st.data())
@settings(max_examples=150)
def test_sums_beside_attention_are_those_of_float64(data):
    draw = data.draw
    query, key, value, mask = draw(operands())
    rows, q_heads, count, _ = query.shape
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    weight, powers = (torch.rand(rows, count, generator=drawn) < 0.8).float(), draw(st.integers(1, 2))
    cap, causal = draw(st.sampled_from([None, 5.0])), draw(st.booleans())
    sink_logit = draw(st.sampled_from([None, torch.randn(1, q_heads, 1, 1, generator=drawn)]))
    attention = AttentionInputs(query, key, mask, causal, 0.3, cap, sink_logit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "TASKS_WITH_SUMS", draw(st.sampled_from([1, 128])))
        computed = attention_tiles.TiledAttention.of(attention)
        output, log_sum_exp, sums = computed.attend(value, weight, powers)
    assert torch.equal(output, computed.attend(value)[0])
    assert torch.equal(log_sum_exp, computed.attend(value)[1])
    near = dict(atol=2e-6, rtol=2e-4) if computed.dtype == torch.float32 else dict(atol=1e-6, rtol=2**-7)
    expected = in_float64(query, key, mask, weight, causal, 0.3, cap, sink_logit, powers)
    for one, other in zip(sums, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), **near)
        assert one.is_contiguous()  # compiled code expects this


@given(data=st.data())
@settings(max_examples=150)
def test_means_beside_attention_are_those_of_float64(data):
    """Test a few queries in each call, and some rows twice: every call computes the same values."""
    query, key, value, mask = data.draw(operands())
    rows, q_heads, count, _ = query.shape
    causal, cap = data.draw(st.booleans()), data.draw(st.sampled_from([None, 5.0]))
    sink_logit = data.draw(st.sampled_from([None, torch.full((1, q_heads, 1, 1), 0.5)]))
    attention = AttentionInputs(query, key, mask, causal, 0.3, cap, sink_logit)
    computed = attention_tiles.TiledAttention.of(attention)
    output, means_of = computed.attend_with_means(value)
    exact = attention_in_float64(query, key, value, mask, causal, 0.3, cap, sink_logit)[0]
    expected = exact.softmax(-1)[..., : key.shape[2]].mean(1)
    near = dict(atol=2e-6, rtol=2e-4) if computed.dtype == torch.float32 else dict(atol=1e-6, rtol=2**-7)
    step = 64 * data.draw(st.integers(1, 4))
    for row, start in [(row, start) for row in range(rows) for start in range(0, count, step)] + [(0, 0)]:
        span = slice(start, min(start + step, count))
        means = means_of(row, span, attention.keys_before(span).stop)
        torch.testing.assert_close(means[0, 0, 0].double(), expected[row, span, : means.shape[-1]], **near)
        assert not causal or not expected[row, span, means.shape[-1] :].any()
    assert torch.equal(output, computed.attend(value)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_multiplied_in_float32_where_their_own_products_are_missing(monkeypatch, dtype):
    runs = attention_tiles._runs
    monkeypatch.setattr(attention_tiles, "_runs", lambda of: of == torch.float32 and runs(of))
    query, key, value = (torch.randn(2, heads, 150, 16).to(dtype) for heads in (4, 2, 2))
    attention = AttentionInputs(query, key, None, True, 0.25)
    assert attention_sums.attends_in_tiles(attention, summed=True) == runs(torch.float32)
    exact, _ = attend_with_lse(query.double(), key.double(), value.double(), None, True, 0.25)
    for output in (
        attention_sums.attend(attention, value, torch.ones(2, 150), 1)[0],
        _output_beside_means(attention, value),
    ):
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), exact, atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


def _output_beside_means(attention, value):
    """Return the output of attention whose means have all been read."""
    output, means = attention_sums.attend_with_means(attention, value)
    assert all(block.dtype == torch.float32 for row in means for block in row)
    return output


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_with_rows_does_not_depend_on_how_many_come_at_once(monkeypatch, means, threads):
    query, key = torch.randn(2, 4, 300, 16).bfloat16(), torch.randn(2, 2, 300, 16).bfloat16()
    attention, before, made = AttentionInputs(query, key, None, True, 0.25), torch.get_num_threads(), []
    try:
        for size, count in ((1, threads), (1, 3), (attention_sums.SCAN_BLOCK, threads)):
            torch.set_num_threads(count)
            monkeypatch.setattr(attention_sums, "SCAN_BLOCK", size)
            if means and attention_sums.attends_in_tiles(attention, summed=True):
                output, rows = attention_sums.attend_with_means(attention, key)
            else:
                output, log_sum_exp, _ = attention_sums.attend(attention, key, torch.ones(2, 300), 0)
                rows = attention_sums.probabilities(attention, log_sum_exp)
            whole = [[torch.nn.functional.pad(x, (0, 300 - x.shape[-1])) for x in blocks] for blocks in rows]
            made.append([output, torch.cat([torch.cat(blocks, 3) for blocks in whole]).mean((1, 2))])
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*made, strict=True):
        assert all(torch.equal(one, other) for other in others)
    torch.testing.assert_close(made[0][1].sum(-1), torch.ones(2, 300), atol=4e-3, rtol=0)
    torch.testing.assert_close(output, attention_sums.attend(attention, key, torch.ones(2, 300), int(means))[0])


def test_logits_that_rise_from_tile_to_tile_count_with_their_final_totals():
    """Test probabilities relative to lower maxima, down to a share of zero in the final total."""
    key = torch.linspace(-300, 300, 700).view(1, 1, 700, 1)
    query, weight = torch.full((1, 1, 40, 1), 1.0), torch.ones(1, 40)
    query[..., 7, :] = 0.001
    given = query, key, None, weight, False, 1.0, None, None, 2
    attention = AttentionInputs(query, key, None, False, 1.0, None, None)
    assert_equal(attention_tiles.TiledAttention.of(attention).attend(key, weight, 2)[2], in_float64(*given))


@pytest.mark.parametrize("size", [30.0, 50.0, 88.0, 1e4])
def test_a_cap_bounds_logits_of_any_size(size):
    """Test logits beyond 128 in base two, whose powers exceed float32."""
    query, key = torch.ones(1, 1, 40, 1), torch.tensor([1.0, -1.0, 0.5]).view(1, 1, 3, 1)
    operands = query, key, key, None, False, size * 5, 5.0, None
    rows = attention_tiles.TiledAttention.of(AttentionInputs(query, key, None, False, size * 5, 5.0))
    output, *_ = rows.attend(key)
    torch.testing.assert_close(output.double(), attention_in_float64(*operands)[1], atol=1e-5, rtol=1e-5)
    assert_equal(
        rows.with_totals().column_sums(torch.ones(1, 40), 1),
        in_float64(query, key, None, torch.ones(1, 40), *operands[4:], 1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hides", ["bool", "-inf"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_sees_no_key_gets_zeros(dtype, hides, causal):
    """Test single queries in a tile, and complete tiles."""
    query, key, value = (torch.randn(1, 2, 140, 8).to(dtype) for _ in range(3))
    seen = torch.ones(1, 1, 140, 140, dtype=torch.bool)
    blind = torch.arange(140)[(torch.arange(140) % 3 == 0) | (torch.arange(140) > 63)]
    seen[..., blind, :] = False
    mask = seen if hides == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    rows = attention_tiles.TiledAttention.of(AttentionInputs(query, key, mask, causal, 0.5))
    output, log_sum_exp, _ = rows.attend(value)
    assert not output[:, :, blind].any()
    assert (log_sum_exp[:, :, blind] == -torch.inf).all()
    assert output.isfinite().all()
    _, means_of = rows.attend_with_means(value)
    means = means_of(0, slice(0, 140), 140)[0, 0, 0]
    assert not means[blind].any()
    torch.testing.assert_close(means.sum(-1), seen[0, 0].any(-1).float(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_not_a_number_stays_in_its_query(kind, cap):
    query, key, value = (torch.randn(1, 1, 70, 8).bfloat16() for _ in range(3))
    query[..., 5, 0] = torch.nan
    seen = torch.ones(1, 1, 70, 70, dtype=torch.bool)
    seen[..., 3] = False
    added = torch.zeros(seen.shape).masked_fill(~seen, LOWEST)
    mask = seen if kind == torch.bool else None if kind is None else added.to(kind)
    output, *_ = attention_tiles.TiledAttention.of(AttentionInputs(query, key, mask, True, 0.5, cap)).attend(value)
    assert output[0, 0].isnan().any(-1).nonzero().flatten().tolist() == [5]
    assert output[0, 0, 5].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "queries", "mask_heads", "summed", "faster"),
    [
        (torch.bfloat16, 8000, 0, False, False),  # the library is as fast
        (torch.bfloat16, 8000, 1, False, True),  # and skips nothing
        (torch.bfloat16, 512, 1, False, False),
        (torch.bfloat16, 512, 2, False, True),  # but copies a mask of each head
        (torch.bfloat16, 512, 0, True, True),
        (torch.bfloat16, 16, 2, True, False),
        (torch.float32, 64, 0, False, True),  # its products in float32 do not use AMX
        (torch.float64, 8000, 1, True, False),
    ],
)
def test_the_librarys_attention_is_taken_where_it_is_as_fast(monkeypatch, dtype, queries, mask_heads, summed, faster):
    monkeypatch.setattr(attention_tiles.processor, "has_matrix_tiles", lambda: True)
    monkeypatch.setattr(attention_tiles.processor, "dot_products", lambda: frozenset([torch.bfloat16]))
    monkeypatch.setattr(attention_tiles, "_runs", lambda _: True)
    query = torch.empty(1, 4, queries, 8, dtype=dtype, device="meta")
    mask = torch.empty(1, mask_heads, queries, 8000, dtype=torch.bool, device="meta") if mask_heads else None
    assert attention_tiles.is_faster(query, mask, summed) == faster


def test_attention_by_the_library_is_that_in_tiles(monkeypatch):
    query, key = torch.randn(1, 4, 70, 8), torch.randn(1, 2, 70, 8)
    attention = AttentionInputs(query, key, None, True, 0.5, None, None)
    here = attention_tiles.is_faster(query, None, summed=True)
    monkeypatch.setattr(attention_tiles, "is_faster", lambda *_: False)
    weight = torch.ones(1, 70)
    output, log_sum_exp, sums = attention_sums.attend(attention, key, weight, 2)
    for one, other in zip((output, log_sum_exp), attend_with_lse(query, key, key, None, True, 0.5), strict=True):
        assert torch.equal(one, other)
    assert_equal(sums, in_float64(query, key, None, weight, True, 0.5, None, None, 2))
    if here:
        monkeypatch.undo()
        torch.testing.assert_close(attention_sums.attend(attention, key, weight, 2), (output, log_sum_exp, sums))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 300.0, 1e9])
def test_a_known_log_sum_exp_changes_nothing(dtype, shift):
    """Test a log-sum-exp of 1e9, which is too coarse for division, so that totals are computed."""
    drawn = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 150, 16, generator=drawn).to(dtype) for heads in (4, 2))
    mask = torch.full((1, 1, 150, 150), -torch.inf).triu(1) - shift
    _, totals = attend_with_lse(query, key, key, mask.to(dtype), False, 0.25)
    given = (query, key, mask.to(dtype), torch.ones(2, 150), False, 0.25, None, None, 2)
    for made, expected in zip(sums_of(*given, totals), sums_of(*given), strict=True):
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("hides", ["bool", "-inf"])
def test_a_query_that_sees_no_key_adds_nothing(hides):
    query, key = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    seen[..., 3, :] = False
    mask = seen if hides == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    _, totals = attend_with_lse(query, key, key, mask, False, 0.5)
    weight = torch.ones(1, 9)
    without = torch.ones(1, 9)
    without[:, 3] = 0
    for known in (None, totals):
        made = sums_of(query, key, mask, weight, False, 0.5, None, None, 2, known)
        expected = sums_of(query, key, mask, without, False, 0.5, None, None, 2)
        for one, other in zip(made, expected, strict=True):
            torch.testing.assert_close(one, other)
    rows = attention_tiles.TiledAttention.of(AttentionInputs(query, key, mask, False, 0.5, None, None))
    for one, other in zip(rows.attend(key, weight, 2)[2], expected, strict=True):
        torch.testing.assert_close(one, other)


def test_sums_do_not_depend_on_the_number_of_threads():
    query, key = torch.randn(2, 4, 300, 16).bfloat16(), torch.randn(2, 2, 300, 16).bfloat16()
    given = (query, key, None, torch.ones(2, 300), True, 0.25, None, None, 2)
    attention = AttentionInputs(query, key, None, True, 0.25, None, None)
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            beside = attention_tiles.TiledAttention.of(attention).attend(key, torch.ones(2, 300), 2)[2]
            made.append([*sums_of(*given), *beside])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (1, 2, 0, 5), (1, 2, 3, 0)])
def test_nothing_to_sum_gives_zeros(shape):
    rows, heads, count, keys = shape
    query, key = torch.randn(rows, heads, count, 4), torch.randn(rows, heads, keys, 4)
    made = sums_of(query, key, None, torch.ones(rows, count), False, 1.0, None, None, 2)
    made += attention_tiles.TiledAttention.of(AttentionInputs(query, key, None, False, 1.0, None, None)).attend(
        key, torch.ones(rows, count), 2
    )[2]
    assert [x.shape for x in made] == [(rows, heads, 1, keys)] * 4
    assert all(not x.any() for x in made)


def test_a_processor_without_the_products_has_the_blocks(monkeypatch):
    """Compare scores in float32, for every reason that disables the loops."""
    query, key = torch.randn(1, 4, 70, 8), torch.randn(1, 2, 70, 8)
    attention, weight = AttentionInputs(query, key, None, True, 0.5, None, None), torch.ones(1, 70)
    expected = attention_sums.column_sums(attention, weight, 2)

    def fails(*_: Any) -> Any:
        raise OSError("undefined symbol")

    attention_tiles._runs.cache_clear()
    monkeypatch.setattr(attention_tiles, "_library", fails)
    try:
        assert attention_tiles.dtype_of_products(torch.bfloat16, 8) is None
        made = attention_sums.column_sums(attention, weight, 2)
    finally:
        attention_tiles._runs.cache_clear()
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_wrong_products_are_not_used(monkeypatch, caplog):
    """Simulate a library that expects its operands in another layout."""
    attention_tiles._runs.cache_clear()
    monkeypatch.setattr(attention_tiles.TiledAttention, "column_sums", lambda *_: [torch.ones(1, 1, 1, 3)])
    try:
        with caplog.at_level("INFO", "kvpass.attention"):
            assert attention_tiles.dtype_of_products(torch.float32, 8) is None
        assert "no attention in C++ with products in torch.float32: the results are wrong" in caplog.text
    finally:
        attention_tiles._runs.cache_clear()


def test_float64_and_odd_heads_have_the_products_that_exist():
    assert attention_tiles.dtype_of_products(torch.float64, 64) is None
    assert attention_tiles.dtype_of_products(torch.bfloat16, 5) == torch.float32
    assert attention_tiles.dtype_of_products(torch.float16, 64) == torch.float32


def test_a_mask_of_any_true_bytes_hides_nothing_that_it_shows():
    query, key = torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    mask = torch.full((1, 1, 40, 40), 2, dtype=torch.uint8).view(torch.bool)
    output, *_ = attention_tiles.TiledAttention.of(AttentionInputs(query, key, mask, False, 0.5)).attend(key)
    expected, *_ = attention_tiles.TiledAttention.of(AttentionInputs(query, key, None, False, 0.5)).attend(key)
    torch.testing.assert_close(output, expected)


def test_an_expanded_query_is_copied():
    query, key = torch.randn(1, 1, 1, 8).expand(1, 1, 90, 8), torch.randn(1, 1, 90, 8)
    output, *_ = attention_tiles.TiledAttention.of(AttentionInputs(query, key, None, True, 0.5)).attend(key)
    expected, *_ = attention_tiles.TiledAttention.of(AttentionInputs(query.contiguous(), key, None, True, 0.5)).attend(
        key
    )
    assert torch.equal(output, expected)


FIRST_USE_IN_A_CHUNK = """
import torch, kvpass
from tests.models import build
model = torch.compile(build("Llama", layers=1), backend=kvpass.backend(policy="{policy}", budget=100, inner="eager"))
ids = torch.arange(1, 65)[None] % 50
with torch.no_grad():
    out = model(ids[:, :8], use_cache=True)
    out = model(ids, **{{"past_key_values": out.past_key_values}}, use_cache=True)
print(out.logits.isfinite().all().item())
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "tova", "full"])
def test_the_first_use_may_be_in_a_chunk_that_is_traced(policy):
    """Check products on real tensors in a separate process, in which none has been checked before."""
    command = [sys.executable, "-c", FIRST_USE_IN_A_CHUNK.format(policy=policy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


FAILURES = {  # a line of the source, and its replacement in the test's build
    "no memory for the tiles of a thread": (
        "products(QUERIES * KEYS) {}",
        "products(QUERIES * KEYS) { if (++made == 2) throw std::bad_alloc(); }\n  static inline std::atomic<int> made;",
    ),
    "a product of the library in a thread": (
        "product(dim, stride, from, keys, products.data());",
        "if (block == 1) throw std::bad_alloc(); product(dim, stride, from, keys, products.data());",
    ),
    "the probabilities of a few queries": (
        "if (tile != HIDDEN) tiles.multiply",
        "if (first) throw std::bad_alloc();\n        if (tile != HIDDEN) tiles.multiply",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_in_a_thread_is_an_error_and_does_not_end_the_process(failure, monkeypatch):
    attention = AttentionInputs(*(torch.randn(2, heads, 300, 16) for heads in (4, 2)), None, True, 0.25, None, None)
    source = attention_tiles.source(torch.float32, None)
    before, after = FAILURES[failure]
    assert source.count(before) == 1
    compute_all(attention)  # products are checked at first use
    source = "#include <new>\n" + source.replace(before, after)
    monkeypatch.setattr(attention_tiles, "_library", lambda *_: generated_code.cpp_library(source))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match=r"attention in C\+\+ failed: std::bad_alloc"):
            compute_all(attention)
    finally:
        torch.set_num_threads(threads)


def compute_all(attention: AttentionInputs) -> None:
    attention_sums.attend(attention, attention.key, torch.ones(2, 300), 2)
    for row in attention_sums.probabilities(attention):
        list(row)
