"""Test which of two caches is that of the keys, and calls that add none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.cache.model_cache import caches_in
from tests.adversary.models import Small
from tests.adversary.oracle import Case, judge

QKV = torch.randn(3, 1, 1, 12, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


class Kept(nn.Module):
    """Attention to a cache of another dtype, whose keys or values grow first."""

    def __init__(self, dtype: torch.dtype, values_first: bool) -> None:
        super().__init__()
        self.dtype, self.values_first = dtype, values_first

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past: Any = None) -> Any:
        key, value = key.to(self.dtype), value.to(self.dtype)
        if past is not None and self.values_first:
            value = torch.cat([past[1], value], 2)
            key = torch.cat([past[0], key], 2)
        elif past is not None:
            key = torch.cat([past[0], key], 2)
            value = torch.cat([past[1], value], 2)
        total, new = key.shape[2], query.shape[2]
        mask = torch.arange(total) <= torch.arange(total - new, total)[:, None]
        return F.scaled_dot_product_attention(query, key.float(), value.float(), attn_mask=mask), (key, value)


@torch.no_grad()
def conversation(call: Any, past: Any = None) -> tuple[Tensor, Any]:
    """Return the outputs of a prompt and steps, and the last cache."""
    outputs = []
    for start, end in ((0, 6), *((n, n + 1) for n in range(6, 12))):
        out, past = call(*(x[:, :, start:end].contiguous() for x in QKV), past)
        outputs.append(out)
    return torch.cat(outputs, 2), past


def tokens_kept(policy: str, dtype: torch.dtype, values_first: bool) -> tuple[list[int], Tensor]:
    """Return the positions of the cached tokens after a conversation, and its outputs."""
    torch._dynamo.reset()
    compiled = torch.compile(Kept(dtype, values_first), backend=kvpass.backend(policy, budget=8, inner="eager"))
    outputs, past = conversation(compiled)
    return caches_in(past)[0].slots.position.sort(-1).values.flatten().tolist(), outputs


@pytest.mark.parametrize("policy", ["knorm", "d2o", "h2o"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_order_in_which_keys_and_values_grow_does_not_matter(policy: str, dtype: torch.dtype) -> None:
    kept, outputs = tokens_kept(policy, dtype, values_first=False)
    also_kept, same = tokens_kept(policy, dtype, values_first=True)
    assert kept == also_kept
    assert torch.equal(outputs, same)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "streaming", "h2o", "tova"])
def test_a_call_without_new_tokens_is_refused(policy: str) -> None:
    """Check that nothing is touched: the conversation goes on behind the refusal."""
    budget = {} if policy == "full" else {"budget": 8}
    compiled = torch.compile(Kept(torch.float32, False), backend=kvpass.backend(policy, inner="eager", **budget))
    _, past = compiled(*(x[:, :, :6].contiguous() for x in QKV))
    _, past = compiled(*(x[:, :, 6:7].contiguous() for x in QKV), past)
    with pytest.raises(kvpass.UnsupportedGraph, match="a call without new tokens"):
        compiled(*(x[:, :, :0].contiguous() for x in QKV), past)
    out, _ = compiled(*(x[:, :, 7:8].contiguous() for x in QKV), past)
    assert out.shape == (1, 1, 1, 8)


def unequal(key_dtype: torch.dtype, value_dtype: torch.dtype) -> Any:
    """Return a function of a query, keys and values in float32 that attends to a cache of two dtypes."""

    def forward(query: Tensor, key: Tensor, value: Tensor, past: Any = None) -> Any:
        key, value = -key.to(key_dtype), -value.to(value_dtype)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        return F.scaled_dot_product_attention(query, key.float(), value.float()), (key, value)

    return forward


def twice(query: Tensor, key: Tensor, value: Tensor, past: Any = None) -> Any:
    """Attend with two queries of each row, as rows of one call."""
    key, value = -key, -value
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    out = F.scaled_dot_product_attention(torch.cat([query, -query]), torch.cat([key, key]), torch.cat([value, value]))
    return out, (key, value)


REFUSED = {
    "keys wider": (unequal(torch.float64, torch.float32), "keys are cached in torch.float64 and values in torch.f"),
    "keys narrower": (unequal(torch.bfloat16, torch.float32), "keys are cached in torch.bfloat16 and values in torc"),
    "16 bits of both kinds": (unequal(torch.float16, torch.bfloat16), "cast one of them before it is cached"),
    "rows doubled": (twice, "2 rows of queries attend to a cache of 1 rows"),
}


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_no_slots_hold_is_refused(name: str, policy: str) -> None:
    model, reason = REFUSED[name]
    budget = {} if policy == "full" else {"budget": 8}
    compiled = torch.compile(model, backend=kvpass.backend(policy, inner="eager", **budget))

    def prompt_and_step() -> None:
        _, past = compiled(*(x[:, :, :6].contiguous() for x in QKV))
        compiled(*(x[:, :, 6:7].contiguous() for x in QKV), past)

    with pytest.raises(kvpass.UnsupportedGraph, match=reason):
        prompt_and_step()


def by_group(add: Any) -> Any:
    """Return attention with the queries of a KV head in a dimension of their own."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        logits = q.unflatten(1, (2, 2)) @ add(k * 0.35).mT
        return (logits.masked_fill(j > i, -torch.inf).softmax(-1) @ add(v)).flatten(1, 2)

    return attend


def by_row_and_head(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Attend with rows and heads joined to one dimension."""
    k, v = (k * 0.35).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).masked_fill(j > i, -torch.inf)
    return torch.bmm(logits.softmax(-1), v.flatten(0, 1)).view(q.shape)


COMPUTED = {
    "[:, :, None]": by_group(lambda x: x[:, :, None]),
    "unsqueeze": by_group(lambda x: x.unsqueeze(2)),
    "flatten": by_row_and_head,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_keys_with_heads_in_other_dimensions(name: str) -> None:
    verdict = judge(Case(Small(COMPUTED[name], heads=4, kv_heads=2)), "streaming", positions="absolute")
    assert verdict.kind == "held", str(verdict)


def head_by_head(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    one = [F.scaled_dot_product_attention(*(x[:, h : h + 1] for x in (q, k, v)), attn_mask=j <= i) for h in range(2)]
    return torch.cat(one, 1)


def minus_another(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Subtract attention of other queries, as in differential attention."""
    one, other = (F.scaled_dot_product_attention(x, k, v, attn_mask=j <= i) for x in (q, q.flip(1)))
    return one - 0.3 * other


def by_halves_of_values(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Attend twice with the same probabilities."""
    halves = [F.scaled_dot_product_attention(q, k, x, attn_mask=j <= i) for x in (v * 0.5, v * 0.5)]
    return halves[0] + halves[1]


@pytest.mark.parametrize("policy", ["h2o", "tova", "streaming"])
@pytest.mark.parametrize("attend", [head_by_head, minus_another, by_halves_of_values])
def test_a_layer_that_attends_in_several_calls(attend: Any, policy: str) -> None:
    verdict = judge(
        Case(Small(attend, layers=2)), policy, **({"positions": "absolute"} if policy == "streaming" else {})
    )
    whole = policy == "streaming" or attend is by_halves_of_values
    assert verdict.kind == ("held" if whole else "refused"), str(verdict)
    assert whole or "this layer attends in several calls" in verdict.detail


class Convolved(nn.Module):
    """Attention whose new keys or values are averages with the token before, which a state keeps in place."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past: Any) -> Any:
        keys, values, states = past
        if "k" in self.parts:
            key = self._average(key, states[0])
        if "v" in self.parts:
            value = self._average(value, states[1])
        key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        total, new = key.shape[2], query.shape[2]
        mask = torch.arange(total) <= torch.arange(total - new, total)[:, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask), (key, value, states)

    def _average(self, new: Tensor, state: Tensor) -> Tensor:
        joined = torch.cat([state, new], 2)
        state.copy_(joined[:, :, -1:])
        return (joined[:, :, 1:] + joined[:, :, :-1]) / 2


def convolved(call: Any) -> tuple[Tensor, Any]:
    """Return `conversation` of a model that begins with empty keys and values, and states of zero."""
    return conversation(call, (torch.tensor([]), torch.tensor([]), [torch.zeros(1, 1, 1, 8) for _ in range(2)]))


@pytest.mark.parametrize("parts", ["k", "v", "kv"])
def test_new_keys_may_be_computed_from_a_state_that_is_written_in_place(parts: str) -> None:
    """Check a state of the last token, as of a convolution, which is no cache that attention reads."""
    expected, _ = convolved(Convolved(parts))
    for policy, budget in (("full", None), ("streaming", 8)):
        torch._dynamo.reset()
        settings: Any = dict(budget=budget, inner="eager")
        outputs, past = convolved(torch.compile(Convolved(parts), backend=kvpass.backend(policy, **settings)))
        before_eviction = slice(None if budget is None else budget)
        assert torch.allclose(outputs[:, :, before_eviction], expected[:, :, before_eviction], atol=1e-5)
        assert len(kvpass.inspect(past).layers) == 1
