"""Check that padding queries get finite outputs, and that no policy sums NaN from undefined queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.cache.admission import TokensToAdmit, admit
from kvpass.cache.cached_attention import AttentionOutput, CachedAttention, Mask, NewTokens
from kvpass.cache.chunk_step import chunk_step
from kvpass.cache.slots import Slots
from kvpass.cache.step import decode_step, read_step
from kvpass.lowering.attention_statistics import StatisticsOperands, as_attention, statistics
from kvpass.policies import Policy, resolve
from kvpass.policies.types import Attention
from tests.adversary.models import Small, keys, logits, queries, sdpa
from tests.layer import CallTokens, layout_for, prompt_mask

LOWEST = "lowest"
ROWS, HEADS, DIM, BUDGET = 3, 2, 8, 12
PROMPT = torch.tensor([[0] * 5, [0, 0, 1, 1, 1], [1] * 5]).bool()  # the first row has only padding so far
FORMS: list[Any] = [None, -torch.inf, LOWEST, -1e9]
WRITTEN = [(low, boolean) for low in FORMS for boolean in (True, False) if boolean or low is not None]
"""Ways to hide a key: a bool mask for the library, a bool mask that fills logits, or a bias."""


def hiding(slots: Slots, valid: Tensor, low: Any, boolean: bool, dtype: torch.dtype, sees: bool) -> Mask:
    """Return a causal mask that hides all keys from padding, and from all queries unless a query `sees` a key."""
    query_index = slots.length[:, None] + torch.arange(valid.shape[1])
    number = torch.finfo(dtype).min if low == LOWEST else low

    def mask(index: Tensor, position: Tensor, key_features: list[Tensor]) -> Tensor:
        allowed = (
            (index[:, :, None, None] <= query_index[:, None, None, :, None]) & valid[:, None, None, :, None] & sees
        )
        return allowed if boolean else torch.zeros(allowed.shape).masked_fill(~allowed, number).to(dtype)

    return mask


def stretch(count: int, valid: Tensor, dtype: torch.dtype) -> CallTokens:
    drawn = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(ROWS, h, count, DIM, generator=drawn).to(dtype) for h in (2 * HEADS, HEADS, HEADS))
    return CallTokens(q, k, v, valid)


def slots_of(policy: Policy, dtype: torch.dtype) -> tuple[Any, Slots]:
    """Return a layout, and slots after the prompt."""
    new = stretch(5, PROMPT, dtype)
    layout = layout_for(policy, BUDGET, new, False)
    attention = Attention()
    if policy.statistics:
        spec = StatisticsOperands(new.q, new.k, prompt_mask(PROMPT), False, 0.3, heads=HEADS, sharding=None)
        attention = as_attention(policy, statistics(policy, spec, PROMPT, BUDGET), PROMPT)
    return layout, admit(layout, None, TokensToAdmit(new.k, new.v, PROMPT, attention), ())


def check(attended: AttentionOutput, valid: Tensor, sums: list[Tensor]) -> None:
    """Check that outputs for padding and sums over queries are finite."""
    padding = ~valid[:, None, :, None].expand_as(attended.output)
    assert attended.output[padding].isfinite().all()
    assert not any(each.isnan().any() for each in sums)


@pytest.mark.few(12)
@pytest.mark.some(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sees", [True, False], ids=["sees", "blind"])
@pytest.mark.parametrize("ends", ["plain", "cap", "sink"])
@pytest.mark.parametrize("spelled", [False, True], ids=["library", "spelled"])
@pytest.mark.parametrize(("low", "boolean"), WRITTEN)
@pytest.mark.parametrize("name", ["full", "streaming", "h2o", "tova", "d2o"])
def test_outputs_for_padding_and_scores_are_finite(
    name: str, low: Any, boolean: bool, spelled: bool, ends: str, sees: bool, dtype: torch.dtype
) -> None:
    """Check steps, layers that share a cache, and chunks; scores stay finite if a real query sees no key."""
    policy = resolve(name, {}).for_layer(0, 1)
    how: dict[str, Any] = {"cap": 2.0} if ends == "cap" else {}
    how |= {"sink_logit": torch.zeros(1, 2 * HEADS, 1, 1)} if ends == "sink" else {}
    hidden = (torch.finfo(dtype).min if low == LOWEST else low) if boolean else None
    for valid in (torch.tensor([[0], [0], [0]]), torch.tensor([[0], [1], [0]])):
        real = valid.bool()
        layout, slots = slots_of(policy, dtype)
        new = stretch(1, real, dtype)
        mask = hiding(slots, real, low, boolean, dtype, sees)
        call = CachedAttention(0.3, mask, hidden_logit=hidden, decomposed=spelled, has_padding_inputs=True, **how)
        before = slots.length.clone()
        check(
            decode_step(layout, call, slots, NewTokens(new.q, new.k, new.v, real[:, 0])),
            real,
            list(slots.state.values()),
        )
        assert torch.equal(slots.length, before + 1)
    layout, slots = slots_of(policy, dtype)
    check(read_step(layout, call, slots, NewTokens(new.q, new.k, new.v, real[:, 0])), real, [])
    for wide in (torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1]]), torch.zeros(3, 3)):
        real = wide.bool()
        layout, slots = slots_of(policy, dtype)
        new = stretch(3, real, dtype)
        mask = hiding(slots, real, low, boolean, dtype, sees)
        call = CachedAttention(0.3, mask, hidden_logit=hidden, decomposed=spelled, has_padding_inputs=True, **how)
        attended = chunk_step(layout, call, slots, NewTokens(new.q, new.k, new.v, real))
        check(attended, real, list(attended.statistics))


@pytest.mark.few(1)
@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_outputs_are_numbers_where_the_models_own_are(policy: str, low: float) -> None:
    """Test a mask that also hides padding queries, in a batch with padding on the left and between tokens."""
    real = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 10])

    def allowed(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
        return (j <= i) & keys(p).bool() & queries(p, i).bool()

    spelled = logits(lambda a, i, j, p: a + torch.zeros(()).masked_fill(~allowed(i, j, p), low))
    library = sdpa(lambda i, j, p: torch.zeros(()).masked_fill(~allowed(i, j, p), low))
    for attend in (spelled, library, sdpa(allowed)):
        model = Small(attend)
        compiled = torch.compile(model, backend=kvpass.backend(policy, budget=16, inner="eager"))
        past = own = None
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9), (9, 10)):
            ids = torch.arange(start, stop).repeat(2, 1)
            mask = real[:, :stop].contiguous()
            with torch.no_grad():
                theirs, own = model(ids, own, p=mask)
                ours, past = compiled(ids, past, p=mask)
            assert not (theirs.isfinite() & ~ours.isfinite()).any()
        torch._dynamo.reset()
