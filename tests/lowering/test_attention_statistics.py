"""Compare column sums in pieces with the full attention matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.strategies  # noqa: F401  loads the Hypothesis profile
from kvpass.lowering import attention_blocks, attention_sums, attention_tiles
from kvpass.lowering.attention_statistics import StatisticsArguments, attention_statistics
from kvpass.policies import resolve, to_json

NAMES = ("total", "squares", "last", "window", "logits", "older", "older_peak")


def operands(query, key, mask, real, causal, scale, window=1, powers=2, value=None):
    """Return arguments of the operator for sums of `powers` and statistics of the last `window` queries."""
    request = StatisticsArguments(NAMES[:powers] + NAMES[2:], causal, scale, None, key.shape[1], window)
    return query, key, value, mask, None, real, None, request.to_text()


def scan_operands(query, key, mask, real, causal, scale, value=None):
    """Return arguments of the operator for the scan of a cascade with one sub-cache in 5 slots."""
    policy = to_json(resolve("cascade", {"sinks": 1, "cascades": 1}))
    request = StatisticsArguments(("scan",), causal, scale, None, key.shape[1], scan=policy, budget=5)
    return query, key, value, mask, None, real, None, request.to_text()


def statistics(*given, **more):
    return attention_statistics(*operands(*given, **more))


def whole(query, key, mask, real, causal, scale, window):
    """Compute the same statistics from the full matrix, query by query."""
    rows, heads, keys, _ = key.shape
    groups, count = query.shape[1] // heads, query.shape[2]
    logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if causal:
        ahead = torch.arange(keys) > torch.arange(keys - count, keys)[:, None]
        logits = logits.masked_fill(ahead, torch.finfo(torch.float32).min)
    if mask is not None:
        floor = torch.finfo(torch.float32).min
        logits = logits.masked_fill(~mask, floor) if mask.dtype == torch.bool else logits + mask
    probs = logits.softmax(-1)
    out = {name: torch.zeros(rows, query.shape[1], keys) for name in NAMES}
    for b in range(rows):
        queries = real[b].nonzero().flatten().tolist()
        for q in queries:
            out["total"][b] += probs[b, :, q]
            out["squares"][b] += probs[b, :, q] ** 2
        voters = queries[-window:]
        for q in voters:
            out["window"][b] += probs[b, :, q] / len(voters)
            older = slice(0, voters[0] + keys - count)
            out["older"][b, :, older] += logits[b, :, q, older].softmax(-1) / len(voters)
            peak = logits[b, :, q, older].view(heads, groups, -1).amax(1, keepdim=True).softmax(-1)
            out["older_peak"][b, :, older] += peak.expand(-1, groups, -1).flatten(0, 1) / len(voters)
        if queries:
            out["last"][b], out["logits"][b] = probs[b, :, queries[-1]], logits[b, :, queries[-1]]
    made = {name: x.view(rows, heads, groups, keys) for name, x in out.items()}
    return {**made, "older_peak": made["older_peak"][:, :, :1]}


@given(data=st.data())
def test_pieces_add_up_to_the_whole(data):
    draw = data.draw
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows, heads, groups, count = (draw(st.integers(1, most)) for most in (2, 2, 3, 9))
    keys, causal = count + draw(st.integers(0, 4)), draw(st.booleans())
    query = torch.randn(rows, heads * groups, count, 4, generator=drawn)
    key = torch.randn(rows, heads, keys, 4, generator=drawn)
    shape = (draw(st.sampled_from([1, rows])), draw(st.sampled_from([1, heads * groups])), count, keys)
    hidden = torch.rand(shape, generator=drawn) < 0.2
    hidden[..., 0] = False
    kinds = {"none": None, "bool": ~hidden, "additive": hidden * -1e9 + torch.randn(shape, generator=drawn)}
    mask = kinds[draw(st.sampled_from(sorted(kinds)))]
    real = torch.rand(rows, count, generator=drawn) > draw(st.sampled_from([-1.0, 0.3, 1.0]))
    window, powers = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "BLOCK", draw(st.sampled_from([1, 3 * rows * heads * groups * keys, 1 << 20])))
        made = statistics(query, key, mask, real, causal, 0.5, window, powers)
        got = dict(zip(NAMES[:powers] + NAMES[2:], made, strict=True))
    expected = whole(query, key, mask, real, causal, 0.5, window)
    for name in (*NAMES[2:], *NAMES[:powers]):
        torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5)


def test_peaks_of_heads_that_the_cache_joins():
    """Test keys computed from one row for all heads: the highest logit is that of any query head."""
    drawn = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 6, 4, generator=drawn), torch.randn(2, 2, 6, 4, generator=drawn)
    real = torch.ones(2, 6, dtype=torch.bool)
    request = StatisticsArguments(("older_peak",), True, 0.5, None, 1, 2).to_text()
    [made] = attention_statistics(query, key, None, None, None, real, None, request)
    logits = (query[:, :, 4:] @ key[:, :, :4].repeat_interleave(2, 1).transpose(2, 3) * 0.5).amax(1)
    assert made.shape == (2, 1, 1, 6)
    torch.testing.assert_close(made[:, 0, 0, :4], logits.softmax(-1).mean(1))
    assert (made[..., 4:] == 0).all()


@given(data=st.data())
def test_attention_and_its_sums_come_of_the_same_products(data):
    draw = data.draw
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows, heads, groups, count = (draw(st.integers(1, most)) for most in (2, 3, 3, 9))
    dtype, causal = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), draw(st.booleans())
    keys = count if causal else count + draw(st.integers(0, 4))
    query, key, value = (
        torch.randn(rows, each, n, 4, generator=drawn).to(dtype)
        for each, n in ((heads * groups, count), (heads, keys), (heads, keys))
    )
    hidden = torch.rand(rows, draw(st.sampled_from([1, heads, heads * groups])), count, keys, generator=drawn) < 0.3
    hidden[..., 0] = False
    seen = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)[None, None]
    mask = None if causal else ~hidden if draw(st.booleans()) else (0.5 - 1e4 * hidden).to(dtype)
    real = torch.rand(rows, count, generator=drawn) > draw(st.sampled_from([-1.0, 0.3]))
    given, powers = (mask, real, causal, 0.5), draw(st.integers(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "BLOCK", draw(st.sampled_from([1, 3 * rows * heads * groups * keys, 1 << 20])))
        output, *sums = statistics(query, key, *given, 2, powers, value)
        alone = statistics(query, key, *given, 2, powers)
        scanning, scanned = attention_statistics(*scan_operands(query, key, *given, value))
        [scanned_alone] = attention_statistics(*scan_operands(query, key, *given))
    for made, expected in zip([*sums, scanned], [*alone, scanned_alone], strict=True):  # the library rounds its totals
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-3)
    each = seen if causal else mask.repeat_interleave(groups, 1) if mask.shape[1] == heads else mask
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, each, scale=0.5, enable_gqa=True)
    loose = {} if dtype != torch.bfloat16 else dict(atol=0.05, rtol=0.05)
    for made in (output, scanning):
        torch.testing.assert_close(made, expected, **loose)


@pytest.mark.parametrize("options", [{}, {"heads": "kv"}, {"reduce": "max"}, {"select": False}])
@pytest.mark.parametrize("padded", [False, True])
def test_a_scan_beside_attention_in_tiles_is_the_scan_of_all_rows(options, padded):
    """Test a scan of means that attention returns, and of rows of all heads."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 200, 8, generator=drawn) for heads in (4, 2, 2))
    policy = to_json(resolve("cascade", {"cascades": 4, "sinks": 4, **options}))
    request = StatisticsArguments(("scan",), not padded, 0.5, None, 2, scan=policy, budget=44).to_text()
    real = torch.ones(2, 200, dtype=torch.bool)
    real[1, :30] = not padded
    mask = (torch.ones(200, 200, dtype=torch.bool).tril() & real[:, None, None]) if padded else None
    _, beside = attention_statistics(query, key, value, mask, None, real, None, request)
    [alone] = attention_statistics(query, key, None, mask, None, real, None, request)
    torch.testing.assert_close(beside, alone, atol=1e-6, rtol=1e-3)
    assert (beside.ge(0) & real[:, None]).sum(-1).unique().tolist() == [44]


@pytest.mark.parametrize("attends", [False, True])
def test_a_scan_does_not_depend_on_the_default_dtype(attends):
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 70, 8, generator=drawn) for heads in (4, 2, 2))
    given = scan_operands(query, key, None, torch.ones(1, 70, dtype=torch.bool), True, 0.5, value if attends else None)
    expected = attention_statistics(*given)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = attention_statistics(*given)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("additive", [False, True])
def test_a_query_whose_mask_hides_every_key_gets_nothing_and_changes_no_sum(additive):
    """Check that such queries, which left padding has, give zeros and no NaN, as in the library."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 4, generator=drawn) for heads in (4, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].clone()
    mask[..., :2] = False  # two tokens of padding
    real = torch.tensor([[False, False, True, True, True]])
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask
    output, total, squares, *late = statistics(query, key, given, real, False, 0.5, 2, 2, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, given, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(output, expected)
    shorter = (mask[..., 2:, 2:], real[:, 2:], False, 0.5, 2, 2)
    alone = statistics(query[:, :, 2:], key[:, :, 2:], *shorter)
    for made, there in zip([total, squares, *late[:2]], alone, strict=False):
        torch.testing.assert_close(made[..., 2:], there)


@pytest.mark.parametrize("make", [operands, scan_operands])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [6, 40])  # 6 queries use the library, 40 use tiles
@pytest.mark.parametrize("by_token", [True, False])
def test_fake_results_have_the_shapes_and_strides_of_real_ones(make, attends, causal, count, by_token):
    """Check strides too, for any order of heads in memory."""
    keys = count if causal else count + 3
    query, key, value = torch.randn(2, 4, count, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    query = query.transpose(1, 2).contiguous().transpose(1, 2) if by_token else query
    mask, real = torch.ones(2, 2, count, keys, dtype=torch.bool), torch.ones(2, count, dtype=torch.bool)
    given = make(query, key, None if causal else mask, real, causal, 0.5, value=value if attends else None)
    torch.library.opcheck(attention_statistics, given)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_results_of_one_query_share_no_memory(count, causal, monkeypatch):
    """Check the way of a GPU, where the mean row of one query is its last row; torch refuses results that alias."""
    drawn = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, count, 8, generator=drawn), torch.randn(2, 2, count, 8, generator=drawn)
    request = StatisticsArguments(("last", "logits", "window"), causal, 0.5, None, 2)
    given = (query, key, None, None, None, torch.ones(2, count, dtype=torch.bool), None, request.to_text())
    expected = attention_statistics(*given)
    monkeypatch.setattr(attention_sums, "uses_kernel", lambda attention: True)
    made = attention_statistics(*given)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len({each.untyped_storage().data_ptr() for each in made}) == len(made)


def test_a_request_is_its_text():
    request = StatisticsArguments(("scan",), True, 0.3, None, 2, scan=to_json(resolve("cascade", {})), budget=0.5)
    assert StatisticsArguments.from_text(request.to_text()) == request
    assert not {*request.to_text()} & {*'"\\\n'}  # C++ string literals take the text unescaped


@pytest.fixture
def in_blocks(monkeypatch):
    """Simulate a processor without the C++ loops."""
    monkeypatch.setattr(attention_tiles, "dtype_of_products", lambda dtype, dim: None)


def test_no_block_is_larger_than_it_may_be(monkeypatch, in_blocks):
    """Check that no [queries x keys] matrix is computed, for any length of the prompt."""
    sizes = []
    made = attention_blocks.AttentionInputs.logits

    def spied(*args):
        logits = made(*args)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(attention_blocks.AttentionInputs, "logits", spied)
    query, key = torch.randn(1, 4, 3000, 8), torch.randn(1, 2, 3000, 8)
    statistics(query, key, None, torch.ones(1, 3000, dtype=torch.bool), True, 0.5, 64, 2)
    assert max(sizes) <= attention_blocks.BLOCK


@pytest.mark.parametrize("rows", [1, 3])
def test_a_block_has_queries_of_few_rows_and_heads(rows, monkeypatch, in_blocks):
    """Check the number of queries in a block, which must not shrink with more rows."""
    shapes = []
    made = attention_blocks.AttentionInputs.logits
    monkeypatch.setattr(
        attention_blocks.AttentionInputs, "logits", lambda *args: shapes.append(out := made(*args)) or out
    )
    monkeypatch.setattr(attention_blocks, "BLOCK", 2 * 40 * 8)
    query, key = torch.randn(rows, 4, 40, 8), torch.randn(rows, 2, 40, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    statistics(query, key, None, torch.ones(rows, 40, dtype=torch.bool), True, 0.5, 1, 1)
    assert {logits.shape[:3] for logits in shapes} == {(1, 1, 2)}
    assert max(logits.shape[3] for logits in shapes) == 8


def masks(count: int) -> dict[str, torch.Tensor]:
    """Return boolean masks [1, 1, count, count] of prompts."""
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    padded, behind = causal.clone(), causal.clone()
    padded[:, :7], behind[:, -9:] = False, False
    blind = causal.clone()
    blind[8:16] = False
    kinds = {"causal": causal, "window": causal.triu(-3), "padded": padded, "behind": behind, "blind": blind}
    return {name: mask[None, None] for name, mask in kinds.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", masks(1))
@pytest.mark.parametrize("heads", [1, 4])
def test_keys_that_a_mask_hides_change_nothing(kind, heads, causal, monkeypatch, in_blocks):
    """Compare with the same mask in additive form."""
    drawn = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, each, 24, 4, generator=drawn) for each in (4, 2))
    mask = masks(24)[kind].expand(2, heads, -1, -1)
    real = mask.any(-1).any(1)
    monkeypatch.setattr(attention_blocks, "BLOCK", 4 * 4 * 24)
    sums = statistics(query, key, mask, real, causal, 0.5, 2, 2)[:2]
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    expected = statistics(query, key, additive, real, causal, 0.5, 2, 2)[:2]
    for got, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_sums_of_half_precision_are_those_of_float32():
    """Check that logits are not rounded, so that kept tokens differ from a float32 reference only by ties."""
    drawn = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, each, 64, 16, generator=drawn).bfloat16() for each in (4, 2))
    given = (None, torch.ones(1, 64, dtype=torch.bool), True, 2.0, 4, 2)
    expected = statistics(query.float(), key.float(), *given)
    for got, wanted in zip(statistics(query, key, *given), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)  # the order of additions differs


@pytest.mark.parametrize("hides", ["bool", "additive"])
@pytest.mark.parametrize("with_value", [False, True])
def test_a_mask_of_one_column_is_for_all_keys(hides, with_value):
    query, key = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8)
    seen = (torch.arange(40) % 7 > 0)[None, None, :, None]
    mask = seen if hides == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -1.0)
    real, value = torch.ones(1, 40, dtype=torch.bool), key if with_value else None
    common = dict(powers=1 if with_value else 2, value=value)
    result = statistics(query, key, mask, real, False, 0.5, **common)
    expected = statistics(query, key, mask.expand(1, 1, 40, 40).contiguous(), real, False, 0.5, **common)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)
