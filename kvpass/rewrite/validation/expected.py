"""Compute an attention call in double precision, and bound the rounding error of its dtypes.

Logits are products of rounded numbers, which are summed and rounded again.  The error of a logit is some units in the
last place of the product of the norms and of the logit itself.  A softmax turns the error of a logit into a share of
the probability, and probabilities and the result are rounded once more.  The tolerance therefore follows from the
dtypes and operands of one call, for any number of layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from kvpass.cache.slots import select_heads
from kvpass.fx.precision import HIDDEN, accumulate_dtype

ROUNDING_MARGIN = 4.0
"""The allowed multiple of the estimated rounding error."""
EQUAL_ULPS = 16.0
"""The allowed difference, in units in the last place, between the same computations of equal values."""
TENSOR_CORES = 2.0**-11
"""The precision of float32 products on a GPU, which may use TF32."""


@dataclasses.dataclass(frozen=True)
class ExactAttention:
    """The exact result of an attention call.

    Attributes:
        output: float64 [B, Hq, q, Dv].
        error: float64 [B, Hq, q], the allowed root mean square over Dv.
        lse, lse_error: float64 [B, Hq, q], the log-sum-exp without the sink, and its allowed error.
        sees: bool [B, Hq, q], whether the query sees a key.
        hidden: bool [B, Hq, q], whether finite logits hide every key, so that the query attends to hidden keys.
        zero: bool [B, Hq, q], whether no key has a finite logit and the answer is zero.
        bias: float64 [B or 1, Hq or 1, q or 1, N], the mask's addend, -inf for a hidden key; None for no mask.
        bias_eps: a unit in the last place of the mask's own dtype.
        keys: N.
    """

    output: Tensor
    error: Tensor
    lse: Tensor
    lse_error: Tensor
    sees: Tensor
    hidden: Tensor
    zero: Tensor
    bias: Tensor | None
    bias_eps: float
    keys: int

    def excess(self, output: Tensor, only: Tensor | None = None) -> float:
        """Return the largest error of an output [B, Hq, q, Dv] as a multiple of the allowed one.

        Only queries in `only` are compared, except queries whose answer is NaN, as from a softmax over nothing.
        """
        difference = (output.double() - self.output).square().mean(-1).sqrt()
        comparable = self.sees | self.hidden | self.zero
        return _largest_share(difference, self.error, comparable if only is None else comparable & only)

    def lse_excess(self, lse: Tensor, only: Tensor) -> float:
        """Return the largest error of a log-sum-exp [B, Hq, q]; infinity if it is not low without a visible key."""
        if bool((self.hidden & only & ~(lse <= HIDDEN / 2)).any()):
            return math.inf
        return _largest_share((lse.double() - self.lse).abs(), self.lse_error, self.sees & only)

    def hides_new_keys(self) -> bool:
        """Return whether some query does not see its own key, and so may see no key at all."""
        queries = self.sees.shape[2]
        if self.bias is None or self.bias.shape[-1] < queries:
            return not bool(self.sees.all())
        own = self.bias[..., -queries:]
        own = own.expand(*own.shape[:2], queries, queries).diagonal(dim1=-2, dim2=-1)
        return bool((own <= HIDDEN).any())

    def of_heads(self, heads: Tensor, count: int) -> ExactAttention:
        """Select the results of the query heads of some KV heads, int64 [B, h]."""
        groups = self.output.shape[1] // count
        query_heads = (heads[:, :, None] * groups + torch.arange(groups, device=heads.device)).flatten(1)  # [B, h G]
        output, sees = (select_heads(x, query_heads) for x in (self.output, self.sees))
        return dataclasses.replace(self, output=output, sees=sees)

    def matches_mask(self, mask: Tensor, bias: Tensor | None, columns: Tensor) -> bool:
        """Return whether a mask [B, ., ., q, N] and a bias on slots equal the keys' ones.

        Queries that see no key are not compared. A bias may be a sum of products, as of a query and a table of relative
        positions: the rounding of its terms does not become less where they cancel.

        Args:
            columns: int64 [B, H', N], the index of each slot's key among the keys here; -1 for a free slot.
        """
        on_slots = torch.zeros((), dtype=torch.float64, device=mask.device) if bias is None else bias.double()
        on_slots = torch.where(mask, on_slots, -torch.inf)
        rows, heads, queries, _ = self.output.shape
        on_slots = _by_query_head(on_slots, heads).expand(rows, heads, queries, -1)
        groups = heads // columns.shape[1]
        chosen = columns.repeat_interleave(groups, 1)[:, :, None].expand(-1, -1, queries, -1)
        on_keys = self.output.new_zeros(()) if self.bias is None else self.bias
        on_keys = on_keys.expand(rows, heads, queries, self.keys).gather(-1, chosen.clamp(min=0))
        on_keys = on_keys.masked_fill(chosen < 0, -torch.inf)
        sees = self.sees[..., None]
        hidden = on_keys <= HIDDEN
        if bool((((on_slots <= HIDDEN) != hidden) & sees).any()):
            return False
        eps = max(0.0 if bias is None else _eps(bias), self.bias_eps)
        size = on_keys.abs().masked_fill(hidden, 0.0)
        sum_eps = min(eps, torch.finfo(torch.float32).eps)
        allowed = EQUAL_ULPS * (eps * size + sum_eps * size.amax(-1, keepdim=True))
        return bool((((on_slots - on_keys).abs() <= allowed) | hidden | ~sees).all())


def _largest_share(difference: Tensor, allowed: Tensor, only: Tensor) -> float:
    shares = torch.where(only, difference / allowed, 0.0)
    return math.inf if bool(shares.isnan().any()) else float(shares.max()) if shares.numel() else 0.0


def _by_query_head(mask: Tensor, heads: int) -> Tensor:
    """Reshape a mask [B, H or 1, G or 1, q, N] to [B, Hq or 1, q, N]."""
    if mask.ndim == 4 or mask.shape[1] * mask.shape[2] in (1, heads):
        return mask if mask.ndim == 4 else mask.flatten(1, 2)
    if mask.shape[2] == 1:
        return mask.expand(-1, -1, heads // mask.shape[1], -1, -1).flatten(1, 2)
    return mask.expand(-1, heads // mask.shape[2], -1, -1, -1).flatten(1, 2)


def attend_exactly(
    call: dict[str, Any], columns: Tensor | None = None, queries: Tensor | None = None
) -> ExactAttention:
    """Compute the exact result of a call of `kvpass.capture.canonical.attention`, or of its log-sum-exp.

    Args:
        call: the operator's arguments by name; without a value there is no output.
        columns: the keys that are attended to, all by default.
        queries: the queries that are compared, all by default.
    """
    query, key, value = call["query"], call["key"], call.get("value")
    value = key if value is None else value
    bias = _bias(call, query.shape[2], key.shape[2])
    if columns is not None:
        key, value, bias = key[:, :, columns], value[:, :, columns], _select(bias, -1, columns)
    if queries is not None:
        query, bias = query[:, :, queries], _select(bias, -2, queries)
    logits, error = _logits(call, query, _for_heads(key, query))
    biased = _with_bias(call, logits, error, bias)
    # A bias may be added to a masking value, so half of that value also masks.
    visible = torch.ones_like(logits[..., :1]) if bias is None else bias > HIDDEN / 2
    sees = visible.any(-1).expand(logits.shape[:-1])
    if not bool(sees.all()):
        blind = _hidden_bias(call, logits, error, bias)
        biased = (torch.where(sees[..., None], biased[0], blind[0]), torch.where(sees[..., None], biased[1], blind[1]))
    return _exact_result(call, *biased, sees, _for_heads(value, query), bias, queries)


def in_result_dtype(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call with operands rounded to the dtype of the result, as autocasting does."""
    narrower = torch.finfo(dtype).eps > torch.finfo(call["query"].dtype).eps
    if not narrower or call.get("output_dtype") is not None:
        return call
    return {**call, **{name: call[name].to(dtype) for name in ("query", "key", "value") if name in call}}


def _for_heads(vectors: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values for each query head, in float64, with zeros for numbers that are not finite."""
    return vectors.double().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(query.shape[1] // vectors.shape[1], 1)


def _select(bias: Tensor | None, dim: int, chosen: Tensor) -> Tensor | None:
    if bias is None or bias.shape[dim] == 1:
        return bias
    return bias.index_select(dim, chosen.to(bias.device))


def _bias(call: dict[str, Any], query_len: int, keys: int) -> Tensor | None:
    """Return the addend of mask and causality, -inf for a key that a boolean mask hides, or None."""
    mask, bias = call["mask"], None
    if mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
        bias = mask.double() if mask.dtype != torch.bool else torch.zeros(mask.shape, device=mask.device).double()
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias
    if call.get("causal"):
        ahead = torch.ones(query_len, keys, dtype=torch.bool, device=call["query"].device).triu(1)
        bias = torch.zeros(1, 1, query_len, keys, device=ahead.device).double().masked_fill(ahead, -torch.inf)
    return bias


def _logits(call: dict[str, Any], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [B, Hq, q, N] without a mask, and the allowed error of each."""
    operand_eps, product_eps = _eps(query), _eps(query, call.get("product_dtype"), call.get("logit_dtype"))
    sum_eps = _sum_eps(query)
    logits = query.double() @ key.transpose(-1, -2) * call["scale"]
    norms = query.double().norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :] * abs(call["scale"])
    error = norms * (operand_eps / math.sqrt(query.shape[-1]) + sum_eps) + product_eps * logits.abs()
    if call.get("cap") is not None:
        logits = torch.tanh(logits / call["cap"]) * call["cap"]
        error = error + product_eps * logits.abs()
    return logits, ROUNDING_MARGIN * error


def _with_bias(call: dict[str, Any], logits: Tensor, error: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the mask's bias to logits, and its rounding to their error."""
    if bias is None:
        return logits, error
    product_eps = _eps(call["query"], call.get("product_dtype"), call.get("logit_dtype"))
    logits = logits + bias
    return logits, error + ROUNDING_MARGIN * torch.where(bias == -torch.inf, 0.0, product_eps * logits.abs())


def _hidden_bias(call: dict[str, Any], logits: Tensor, error: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return logits and errors of queries that see no key.

    A masking value is so low that rounding decides which part remains of the logit that it is added to.
    """
    hidden_logit, mask = call.get("hidden_logit"), call["mask"]
    boolean = mask is not None and mask.dtype == torch.bool
    if bias is None or (boolean and hidden_logit is None):
        return _with_bias(call, logits, error, bias)
    if boolean and hidden_logit is not None:
        return torch.where(bias == -torch.inf, hidden_logit, logits), torch.where(bias == -torch.inf, 0.0, error)
    dtype = call.get("logit_dtype") or accumulate_dtype(call["query"].dtype)
    low, rounded, high = ((logits + sign * error + bias).to(dtype).double() for sign in (-1, 0, 1))
    change = torch.maximum(high - rounded, rounded - low).nan_to_num(0.0)
    exact = ((low == bias) & (high == bias)) | (rounded == -torch.inf)  # the bias absorbs the logit
    return rounded, change + torch.where(exact, 0.0, 2 * torch.finfo(dtype).eps * rounded.abs())


def _exact_result(
    call: dict[str, Any],
    logits: Tensor,
    error: Tensor,
    sees: Tensor,
    value: Tensor,
    bias: Tensor | None,
    queries: Tensor | None,
) -> ExactAttention:
    sink, no_key = call.get("sink_logit"), (logits == -torch.inf).all(-1)
    logits = torch.where(no_key[..., None], 0.0, logits)
    lse = logits.logsumexp(-1)
    with_sink = logits
    if sink is not None:
        sink = sink if queries is None or sink.shape[2] == 1 else sink[:, :, queries]
        with_sink = torch.cat([logits, sink.double().expand(*logits.shape[:3], 1)], -1)
    probs = with_sink.softmax(-1)[..., : logits.shape[-1]].masked_fill(no_key[..., None], 0.0)
    output = probs @ value
    relative_error = (2 * error.clamp(max=10)).expm1()
    squares = value.square().sum(-1)  # [B, Hq, N]
    distance_squared = squares[..., None, :] - 2 * output @ value.transpose(-1, -2) + output.square().sum(-1)[..., None]
    # The rounding of a sum of N terms grows like a random walk.
    sum_eps = _sum_eps(call["query"]) * math.sqrt(value.shape[2])
    own_eps = _eps(call["query"], call.get("logit_dtype"), call.get("output_dtype")) + sum_eps
    rounding = ROUNDING_MARGIN * own_eps * (probs * squares.sqrt()[..., None, :]).sum(-1)
    sink_error = 0 if sink is None else (1 - probs.sum(-1)) * output.norm(dim=-1) * relative_error.amax(-1)
    allowed = (probs * relative_error * distance_squared.clamp(min=0).sqrt()).sum(-1) + rounding + sink_error
    lse_probs = logits.softmax(-1)
    lse_error = (lse_probs * relative_error).sum(-1) + ROUNDING_MARGIN * own_eps * lse.abs()
    # An exact result allows no error, and errors are divided by the allowed one.
    tiny = torch.finfo(torch.float64).tiny
    error = allowed / math.sqrt(value.shape[-1]) + tiny
    floating = call["mask"] is not None and call["mask"].is_floating_point()
    bias_eps = _eps(call["mask"]) if floating else 0.0
    decomposed = call.get("logit_dtype") is not None and sink is None  # its softmax over nothing is NaN
    zero = torch.zeros_like(no_key) if decomposed else no_key
    return ExactAttention(
        output, error, lse, lse_error + tiny, sees, ~sees & ~no_key, zero, bias, bias_eps, value.shape[2]
    )


def _sum_eps(tensor: Tensor) -> float:
    """Return a unit in the last place of the numbers in which products of a dtype are summed."""
    return min(_eps(tensor), torch.finfo(torch.float32).eps)


def _eps(tensor: Tensor, *dtypes: torch.dtype | None) -> float:
    """Return a unit in the last place of the coarsest of some dtypes."""
    eps = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, *dtypes) if dtype is not None)
    return max(eps, TENSOR_CORES) if tensor.is_cuda and eps > torch.finfo(torch.float64).eps else eps


def equal_up_to_rounding(actual: Any, expected: Any) -> bool:
    """Return whether two values are equal up to rounding, given the same computation of equal values."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return not isinstance(expected, (bool, int, float)) or bool(actual == expected)
    if actual.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(actual.to(expected.dtype), expected)
    if torch.equal(actual, expected) or not expected.numel():
        return True
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return False
    difference = (actual.double() - expected.double())[finite].norm()
    return bool(difference <= EQUAL_ULPS * _eps(expected) * expected[finite].double().norm())
