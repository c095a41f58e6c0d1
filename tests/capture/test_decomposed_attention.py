"""Test that attention calls are found in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.capture import decomposed_attention
from tests import on_reference

LOWEST = torch.finfo(torch.float32).min
Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def scale_first(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return ((q * 0.25) @ k.transpose(-1, -2)).masked_fill(~allowed, LOWEST).softmax(-1) @ v


def scale_and_mask_together(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    mask = torch.where(allowed, 0.0, LOWEST)
    return ((torch.matmul(q, k.transpose(2, 3)) + mask) / 4.0).softmax(-1).matmul(v)


def soft_cap(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25 / 3.0) * 3.0
    logits = torch.where(allowed, logits, torch.tensor(LOWEST))
    return torch.matmul(torch.nn.functional.softmax(logits, dim=-1, dtype=torch.float32).to(v.dtype), v)


def in_other_words(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.divide(torch.multiply(q @ k.transpose(-1, -2), 0.5), 2.0)
    return torch.subtract(logits, torch.where(allowed, 0.0, -LOWEST)).softmax(-1) @ v


def sinks(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3)) * 0.25 + torch.where(allowed, 0.0, LOWEST)
    beside = torch.tensor([0.5, -0.5, 1.0, 0.0]).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    joined = torch.cat([logits, beside], -1)
    joined = joined - joined.max(-1, keepdim=True).values
    return torch.matmul(joined.softmax(-1)[..., :-1], v)


def in_one_batch(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    rows, heads, count, dim = q.shape
    q, k, v = (x.reshape(rows * heads, -1, dim) for x in (q, k, v))
    bias = torch.zeros(rows * heads, 1, k.shape[1])
    logits = bias.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.25).view(rows, heads, count, -1)
    probabilities = logits.masked_fill(~allowed, LOWEST).softmax(-1)
    return torch.bmm(probabilities.view(rows * heads, count, -1), v).view(rows, heads, count, dim)


def gate_by_sum(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Apply a sink after attention, by scaling the output with the share that the sink leaves."""
    logits = torch.matmul(q, k.transpose(2, 3)) * 0.25 + torch.where(allowed, 0.0, LOWEST)
    left = (torch.logsumexp(logits, dim=-1) - torch.tensor([0.5, -0.5, 1.0, 0.0]).view(1, -1, 1)).sigmoid()
    probabilities = torch.softmax(logits, -1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(probabilities, v) * left.unsqueeze(-1)


def gate_by_sum_afterwards(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3)).masked_fill(~allowed, LOWEST).float()
    return torch.matmul(logits.softmax(-1), v) * logits.logsumexp(-1, keepdim=True).tanh()


def bias_of_values(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Add a bias for each key that is computed from its values in all heads."""
    bias = torch.nn.functional.softplus(v.transpose(1, 2).flatten(2) * 2).mean(-1) * 4
    mask = bias[:, None, None].expand(-1, q.shape[1], q.shape[2], -1).masked_fill(~allowed, LOWEST)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def bias_from_the_end(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Add the end of a table of biases; the table limits the number of keys."""
    table = (torch.arange(1 - TABLE, 1) * torch.tensor([[0.5], [0.25], [0.1], [0.05]]))[:, None]  # table [4, 1, TABLE]
    bias = table[:, max(0, table.shape[1] - k.shape[2]) :, max(0, table.shape[2] - k.shape[2]) :]
    logits = (torch.matmul(q, k.transpose(2, 3)) * 0.25 + bias).masked_fill(~allowed, LOWEST)
    return torch.matmul(logits.softmax(-1), v)


def written_in_place(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Write in place and ignore the returned tensors; the mask is as large as the logits."""
    logits = torch.matmul(q, k.transpose(2, 3))
    logits *= 0.5
    logits.mul_(0.5)
    logits.masked_fill_((allowed == 0).expand_as(logits), LOWEST)
    return torch.matmul(logits.float().softmax(-1), v)


def added_in_place(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3)).div_(4.0)
    logits.add_(torch.where(allowed, 0.0, LOWEST))
    return torch.matmul(logits.softmax(-1), v)


TABLE = 16


def as_equations(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / 4.0
    return torch.einsum("b h q k, b h k d -> b h q d", logits.masked_fill(~allowed, -torch.inf).softmax(-1), v)


def in_empty_memory(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Use a mask whose memory is written to before a view of it is read."""
    mask = torch.empty(allowed.shape[-2:])
    mask.fill_(0.0)
    mask.masked_fill_(allowed.logical_not()[0, 0], LOWEST)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def shift_of_capped_logits(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Subtract each row's maximum after a soft cap and before the mask, which leaves the softmax as it is."""
    logits = torch.tanh(torch.matmul(q, k.transpose(2, 3)) / 12.0) * 3.0
    logits = logits - logits.amax(-1, keepdim=True)
    return torch.matmul(logits.masked_fill(~allowed, LOWEST).softmax(-1), v)


def shift_of_capped_logits_and_sinks(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    logits = torch.tanh(torch.matmul(q, k.transpose(2, 3)) / 12.0) * 3.0 + torch.where(allowed, 0.0, LOWEST)
    joined = torch.cat([logits, torch.ones(*q.shape[:3], 1) * 0.5], -1)
    joined.sub_(joined.amax(-1, keepdim=True))
    return torch.matmul(joined.softmax(-1)[..., :-1], v)


SPELLINGS: list[Spelling] = [
    scale_first,
    scale_and_mask_together,
    soft_cap,
    in_other_words,
    sinks,
    in_one_batch,
    gate_by_sum,
    gate_by_sum_afterwards,
    bias_of_values,
    bias_from_the_end,
    written_in_place,
    added_in_place,
    as_equations,
    in_empty_memory,
    shift_of_capped_logits,
    shift_of_capped_logits_and_sinks,
]


class Model(torch.nn.Module):
    """One attention layer with a growing past."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.embed = spelling, torch.nn.Embedding(64, 64)
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
        self.embed.weight.data.mul_(3)

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        x = self.qkv(self.embed(ids))
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in x.chunk(3, -1))
        seen = 0 if past is None else past[0].shape[2]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        allowed = torch.arange(seen + ids.shape[1]) <= torch.arange(seen, seen + ids.shape[1])[:, None]
        y = self.spelling(q, k, v, allowed[None, None])
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)


@torch.no_grad()
def run(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    out, past = model(ids[:, :6])
    outputs = [out]
    for t in (6, *range(8, ids.shape[1])):  # a chunk, then single tokens
        out, past = model(ids[:, t : 8 if t == 6 else t + 1], past)
        outputs.append(out)
    return torch.cat(outputs, 1), past


@pytest.mark.few(2)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_rewritten_and_right(spelling: Spelling) -> None:
    model, ids = Model(spelling).eval(), torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    expected, _ = run(model, ids)
    torch._dynamo.reset()
    ours, past = run(torch.compile(model, backend=kvpass.backend("full", inner="eager")), ids)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert kvpass.inspect(past).seen == 16
    bounded = []
    for inner in ("eager", "reference"):
        torch._dynamo.reset()
        bounded.append(run(torch.compile(model, backend=on_reference.backend("h2o", budget=6, inner=inner)), ids)[0])
    torch.testing.assert_close(bounded[0], bounded[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(bounded[0], expected, atol=1e-3)  # tokens were evicted


@pytest.mark.few(3)
@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_every_spelling_is_read_in_a_prompt_of_one_token(spelling: Spelling) -> None:
    model, ids = Model(spelling).eval(), torch.tensor([[5], [9]])
    expected, _ = model(ids)
    torch._dynamo.reset()
    out, past = torch.compile(model, backend=kvpass.backend("h2o", budget=6, inner="eager"))(ids)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert kvpass.inspect(past).seen == 1


def test_a_table_that_ends_is_an_error_and_not_read_beyond() -> None:
    model, ids = Model(bias_from_the_end).eval(), torch.zeros(2, TABLE + 1, dtype=torch.int64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend("streaming", budget=8, inner="eager"))
    run(compiled, ids[:, :TABLE])
    with pytest.raises(RuntimeError, match="fake"):
        run(compiled, ids)


def bias_of_all_values(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    bias = v.transpose(1, 2).flatten(2).mean(-1).cumsum(-1)
    mask = torch.where(allowed, bias[:, None, None], LOWEST)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def bias_beside_the_best(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    bias = torch.where(allowed, v.transpose(1, 2).flatten(2).mean(-1)[:, None, None], LOWEST)
    mask = bias - bias.amax(-1, keepdim=True)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("spelling", [bias_of_all_values, bias_beside_the_best])
def test_a_bias_computed_from_several_values_is_refused(spelling: Spelling) -> None:
    model, ids = Model(spelling).eval(), torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with pytest.raises(kvpass.UnsupportedGraph, match=r"mix tokens|not proven to treat keys one by one"):
        run(torch.compile(model, backend=kvpass.backend("full", inner="eager")), ids)


def find(
    function: Callable[..., Any], *args: Tensor, unread: list[str] | None = None
) -> list[decomposed_attention.AttentionCall]:
    """Return the attention calls in Dynamo's graph of a function; reasons for unread softmaxes go to `unread`."""
    found: list[decomposed_attention.AttentionCall] = []

    def backend(gm: Any, _: Any) -> Any:
        calls, others = decomposed_attention.find_attention_calls(gm)
        found.extend(calls)
        if unread is not None:
            unread.extend(others.values())
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return found


def test_the_cap_scale_mask_and_sinks_of_a_call_are_read() -> None:
    q = torch.randn(2, 4, 3, 16)
    (call,) = find(soft_cap, q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    assert call.cap == pytest.approx(3.0)
    assert call.scale == pytest.approx(0.25)
    assert call.mask is not None
    (call,) = find(sinks, q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    assert call.sink_logit is not None
    assert call.cap is None
    (call,) = find(gate_by_sum, q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    assert call.lse is not None


def sum_with_the_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([torch.matmul(q, k.transpose(2, 3)), torch.ones(*q.shape[:3], 1)], -1)
    return torch.matmul(joined.softmax(-1)[..., :-1], v) * joined.logsumexp(-1, keepdim=True)


def sum_of_other_logits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3))
    shifted = logits - logits.max(-1, keepdim=True).values
    return torch.matmul(shifted.softmax(-1), v) * shifted.logsumexp(-1, keepdim=True)


def sum_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3))
    return torch.matmul(logits.softmax(-1), v) * logits.logsumexp(-2)[..., None]


@pytest.mark.parametrize("function", [sum_with_the_sink, sum_of_other_logits, sum_over_queries])
def test_another_logsumexp_is_not_taken_for_that_of_the_logits(function: Callable[..., Tensor]) -> None:
    q = torch.randn(2, 4, 3, 16)
    (call,) = find(function, q, q, q)
    assert call.lse is None


def test_a_logsumexp_before_a_write_to_the_logits_is_not_taken() -> None:
    def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.matmul(q, k.transpose(2, 3))
        total = logits.logsumexp(-1, keepdim=True)
        logits.mul_(0.5)
        return torch.matmul(logits.softmax(-1), v) * total

    q = torch.randn(2, 4, 3, 16)
    (call,) = find(before, q, q, q)
    assert call.lse is None
    assert call.scale == 0.5


def squares(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2)


NO_ATTENTION: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "no second product": (lambda x: squares(x).softmax(-1), "softmax", "0 matrix products read it"),
    "no first product": (lambda x: x.softmax(-1) @ x.transpose(-1, -2), "softmax", "not computed from a product"),
    "training": (lambda x: torch.dropout(squares(x).softmax(-1), 0.5, True) @ x, "softmax", "0 matrix products"),
    "other logits": (lambda x: squares(x).sin().softmax(-1) @ x, "sin", "does not support this operation on"),
    "hides nothing": (
        lambda x: squares(x).masked_fill(x.sum() > 0, -1.0).softmax(-1) @ x, "masked_fill", "-1 does not hide a token"
    ),
    "over queries": (lambda x: squares(x).softmax(-2) @ x, "softmax", "not over the last dimension"),
    "capped twice": (lambda x: squares(x).tanh().tanh().softmax(-1) @ x, "tanh", "capped twice"),
}  # fmt: skip


def with_sink(logits: Tensor, values: Tensor) -> Tensor:
    joined = torch.cat([logits, torch.ones(*logits.shape[:3], 1)], -1)
    return joined.softmax(-1)[..., :-1] @ values


def shifted(logits: Tensor) -> Tensor:
    return logits - logits.amax(-1, keepdim=True)


def shifted_in_place(logits: Tensor) -> Tensor:
    return logits.sub_(logits.max(-1, keepdim=True).values)


def by_sums(x: Tensor) -> Tensor:
    """Return logits that are no product of matrices."""
    return (x[:, :, :, None] * x[:, :, None]).sum(-1)


NO_ATTENTION |= {
    "a choice of no product": (
        lambda x: torch.where(x > 0, by_sums(x), LOWEST).softmax(-1) @ x, "where", "no operand comes from a product"
    ),
    "a sum of no product": (lambda x: (by_sums(x) + x).softmax(-1) @ x, "add", "no operand comes from a product"),
    "a bound of no product": (
        lambda x: by_sums(x).maximum(x.new_tensor(LOWEST)).softmax(-1) @ x, "maximum", "no operand comes from a product"
    ),
}  # fmt: skip
SHIFTED = "the maximum of each row is subtracted before"
NO_ATTENTION |= {
    "shifted before sinks": (lambda x: with_sink(shifted(squares(x)), x), "sub", SHIFTED),
    "shifted in place before sinks": (lambda x: with_sink(shifted_in_place(squares(x)), x), "sub_", SHIFTED),
    "shifted before a mask and sinks": (
        lambda x: with_sink(shifted(squares(x)).masked_fill(x > 0, LOWEST), x), "sub", SHIFTED
    ),
    "shifted before a cap": (lambda x: (torch.tanh(shifted(squares(x)) / 3) * 3).softmax(-1) @ x, "sub", SHIFTED),
    "shifted before a cap, a mask and once more": (
        lambda x: shifted(shifted(squares(x)).tanh().masked_fill(x[..., :1] > 0, LOWEST)).softmax(-1) @ x,
        "sub", SHIFTED,
    ),
}  # fmt: skip


def in_place(write: Callable[[Tensor], Any], to: str) -> Callable[[Tensor], Tensor]:
    """Return attention with a write in place whose result is unused."""

    def attend(x: Tensor) -> Tensor:
        bias, keys = x.mean(-1)[..., None, :] * 2, x * 2
        logits = x @ keys.transpose(-1, -2) + bias
        if to in ("logits", "bias"):
            write(logits if to == "logits" else bias)
        probabilities = logits.softmax(-1)
        if to in ("probabilities", "keys"):
            write(probabilities if to == "probabilities" else keys)
        return probabilities @ x

    return attend


NO_ATTENTION |= {
    "written by subscript": (in_place(lambda t: t.__setitem__((..., 0), 0.0), "logits"), "setitem", "no operation"),
    "written by a view": (in_place(lambda t: t[..., 0].fill_(0.0), "logits"), "fill_", "another view"),
    "written by an unknown operation": (in_place(lambda t: t.sin_(), "logits"), "sin_", "not support this operation"),
    "probabilities are written": (in_place(lambda t: t.mul_(0.5), "probabilities"), "mul_", "during the computation"),
    "keys are written": (in_place(lambda t: t.mul_(0.5), "keys"), "mul_", "during the computation"),
    "a bias is written": (in_place(lambda t: t.mul_(0.5), "bias"), "mul_", "during the computation"),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_an_unread_softmax_names_the_operation_and_the_reason(name: str) -> None:
    function, at, why = NO_ATTENTION[name]
    unread: list[str] = []
    assert find(function, torch.randn(2, 4, 16, 16), unread=unread) == []
    (one,) = unread
    assert one.startswith(f"{at!r} at ")
    assert why in one
    assert "test_decomposed_attention.py:" in one


def test_a_refusal_says_which_operation_was_not_understood() -> None:
    def sine(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).sin().masked_fill(~allowed, LOWEST).softmax(-1) @ v

    model, ids = Model(sine).eval(), torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with pytest.raises(
        kvpass.UnsupportedGraph, match=r"'sin' at .*test_decomposed_attention\.py:\d+: return .*not support this op"
    ):
        run(torch.compile(model, backend=kvpass.backend("full", inner="eager")), ids)


def test_an_argument_of_a_later_torch_is_refused() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    ours = kvpass.backend("full", inner="eager", validate=False)

    def backend(gm: Any, examples: Any) -> Any:
        for node in gm.graph.nodes:
            if "attn_mask" in node.kwargs:
                node.kwargs = {**node.kwargs, "softcap": 3.0}
        return ours(gm, examples)

    model, ids = Model(plain).eval(), torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with torch.no_grad():
        _, past = model(ids[:, :6])
        with pytest.raises(kvpass.UnsupportedGraph, match="kvpass does not know its argument softcap"):
            torch.compile(model, backend=backend)(ids[:, 6:7], past)
