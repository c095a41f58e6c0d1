"""What an attention call gives in double precision, and how far the rounding of its dtypes may take it from there.

Logits are products of rounded numbers, summed and rounded again: each is off by some units in the last place of the
product of the norms, and of the logit itself.  A softmax turns an error of a logit into a share of the probability,
and probabilities and the result are rounded once more.  So the tolerance follows from the dtypes of one call and from
the numbers that are attended to, however many layers there are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from kvpass.fx.precision import HIDDEN, accumulate_dtype

SAFETY = 4.0
"""How many times the estimated rounding error is allowed."""
SAME = 16.0
"""Units in the last place by which values may differ, as a whole, that are computed alike from equal values."""
TENSOR_CORES = 2.0**-11
"""The precision of products in float32 on a GPU, which may be computed in TF32."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """The exact result of an attention call.

    Attributes:
        output: float64 [B, Hq, q, Dv].
        error: float64 [B, Hq, q], the root mean square over Dv that is allowed.
        lse, lse_error: float64 [B, Hq, q], the log-sum-exp without the sink.
        some: bool [B, Hq, q], whether the query sees a key.
        hidden: bool [B, Hq, q], whether finite logits hide every key, so that the query attends to hidden keys.
        zero: bool [B, Hq, q], whether no key has a finite logit and the answer is zero.
        bias: float64 [B or 1, Hq or 1, q or 1, N], what the mask adds, -inf where it hides a key; None for nothing.
        bias_eps: a unit in the last place of the mask's own dtype.
        keys: N.
    """

    output: Tensor
    error: Tensor
    lse: Tensor
    lse_error: Tensor
    some: Tensor
    hidden: Tensor
    zero: Tensor
    bias: Tensor | None
    bias_eps: float
    keys: int

    def excess(self, output: Tensor, only: Tensor | None = None) -> float:
        """By how much an output [B, Hq, q, Dv] exceeds the allowed error, as a multiple; of `only` these queries.

        A query whose answer is NaN, as a softmax over nothing gives it, is not compared.
        """
        apart = (output.double() - self.output).square().mean(-1).sqrt()
        known = self.some | self.hidden | self.zero
        return _largest(apart, self.error, known if only is None else known & only)

    def lse_excess(self, lse: Tensor, only: Tensor | None = None) -> float:
        """The same of a log-sum-exp of the shape [B, Hq, q]; that of hidden keys alone must hide, too."""
        apart = (lse.double() - self.lse).abs()
        hides = self.hidden if only is None else self.hidden & only
        if bool((hides & ~(lse <= HIDDEN / 2)).any()):
            return math.inf
        return _largest(apart, self.lse_error, self.some if only is None else self.some & only)

    def hides_new_keys(self) -> bool:
        """Whether a query does not see its own key, so that it may see none; the last q keys are the queries' own."""
        queries = self.some.shape[2]
        if self.bias is None or self.bias.shape[-1] < queries:
            return not bool(self.some.all())
        own = self.bias[..., -queries:]
        own = own.expand(*own.shape[:2], queries, queries).diagonal(dim1=-2, dim2=-1)
        return bool((own <= HIDDEN).any())

    def sees(self, mask: Tensor, bias: Tensor | None, columns: Tensor) -> bool:
        """Whether a mask [B, ., ., q, N] and a bias on slots are those on the keys, for queries that see any.

        Args:
            columns: int64 [B, H', N], the number of the slot's key among those here; -1 for a free slot.
        """
        ours = torch.zeros((), dtype=torch.float64, device=mask.device) if bias is None else bias.double()
        ours = torch.where(mask, ours, -torch.inf)
        rows, heads, queries, _ = self.output.shape
        ours = _by_query_head(ours, heads).expand(rows, heads, queries, -1)
        groups = heads // columns.shape[1]
        chosen = columns.repeat_interleave(groups, 1)[:, :, None].expand(-1, -1, queries, -1)
        theirs = self._on_all(rows, heads, queries).gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, -torch.inf)
        some = self.some[..., None]
        hidden = theirs <= HIDDEN
        if bool((((ours <= HIDDEN) != hidden) & some).any()):
            return False
        eps = 0.0 if bias is None else _eps(bias)
        close = (ours - theirs).abs() <= SAME * max(eps, self.bias_eps) * theirs.abs()
        return bool((close | hidden | ~some).all())

    def _on_all(self, rows: int, heads: int, queries: int) -> Tensor:
        if self.bias is None:
            return self.output.new_zeros(()).expand(rows, heads, queries, self.keys)
        return self.bias.expand(rows, heads, queries, -1)


def _largest(apart: Tensor, allowed: Tensor, only: Tensor) -> float:
    share = torch.where(only, apart / allowed, 0.0)
    return math.inf if bool(share.isnan().any()) else float(share.max()) if share.numel() else 0.0


def _by_query_head(mask: Tensor, heads: int) -> Tensor:
    """[B, H or 1, G or 1, q, N] as [B, Hq or 1, q, N]."""
    if mask.ndim == 4 or mask.shape[1] * mask.shape[2] in (1, heads):
        return mask if mask.ndim == 4 else mask.flatten(1, 2)
    if mask.shape[2] == 1:
        return mask.expand(-1, -1, heads // mask.shape[1], -1, -1).flatten(1, 2)
    return mask.expand(-1, heads // mask.shape[2], -1, -1, -1).flatten(1, 2)


def expected(call: dict[str, Any], columns: Tensor | None = None, queries: Tensor | None = None) -> Expected:
    """The exact result of a call of `kvpass.capture.canonical.attention`, or of its log-sum-exp.

    Args:
        call: the operator's arguments by name; without a value there is no output.
        columns: the keys that are attended to, all by default.
        queries: the queries that are looked at, all by default.
    """
    query, key, value = call["query"], call["key"], call.get("value")
    value = key if value is None else value
    bias = _bias(call, query.shape[2], key.shape[2])
    if columns is not None:
        key, value, bias = key[:, :, columns], value[:, :, columns], _taken(bias, -1, columns)
    if queries is not None:
        query, bias = query[:, :, queries], _taken(bias, -2, queries)
    logits, error = _logits(call, query, _for_heads(key, query))
    added = _with_bias(call, logits, error, bias)
    seen = torch.ones_like(logits[..., :1]) if bias is None else bias > HIDDEN / 2  # a bias may be added to what hides
    some = seen.any(-1).expand(logits.shape[:-1])
    if not bool(some.all()):
        blind = _hidden_alone(call, logits, error, bias)
        added = (torch.where(some[..., None], added[0], blind[0]), torch.where(some[..., None], added[1], blind[1]))
    return _attended(call, *added, some, _for_heads(value, query), bias, queries)


def as_computed(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a call with its operands in the dtype of the result, to which autocasting rounds them."""
    narrower = torch.finfo(dtype).eps > torch.finfo(call["query"].dtype).eps
    if not narrower or call.get("output") is not None:
        return call
    return {**call, **{name: call[name].to(dtype) for name in ("query", "key", "value") if name in call}}


def _for_heads(rows: Tensor, query: Tensor) -> Tensor:
    """Rows once for each query head; a row without numbers counts for nothing, as a key that is hidden does."""
    return rows.double().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(query.shape[1] // rows.shape[1], 1)


def _taken(bias: Tensor | None, dim: int, chosen: Tensor) -> Tensor | None:
    if bias is None or bias.shape[dim] == 1:
        return bias
    return bias.index_select(dim, chosen.to(bias.device))


def _bias(call: dict[str, Any], queries: int, keys: int) -> Tensor | None:
    """What mask and causality add to the logits, -inf for a key that a boolean one hides, or None."""
    mask, made = call["mask"], None
    if mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
        made = mask.double() if mask.dtype != torch.bool else torch.zeros(mask.shape, device=mask.device).double()
        made = made.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else made
    if call.get("causal"):
        ahead = torch.ones(queries, keys, dtype=torch.bool, device=call["query"].device).triu(1)
        made = torch.zeros(1, 1, queries, keys, device=ahead.device).double().masked_fill(ahead, -torch.inf)
    return made


def _logits(call: dict[str, Any], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The logits [B, Hq, q, N] without a mask, and how far each may be off."""
    given, products = _eps(query), _eps(query, call.get("scores"), call.get("weights"))
    accumulated = _accumulated(query)
    logits = query.double() @ key.transpose(-1, -2) * call["scale"]
    norms = query.double().norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :] * abs(call["scale"])
    error = norms * (given / math.sqrt(query.shape[-1]) + accumulated) + products * logits.abs()
    if call.get("cap") is not None:
        logits = torch.tanh(logits / call["cap"]) * call["cap"]
        error = error + products * logits.abs()
    return logits, SAFETY * error


def _with_bias(call: dict[str, Any], logits: Tensor, error: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits with what the mask adds, and how far each may be off."""
    if bias is None:
        return logits, error
    products = _eps(call["query"], call.get("scores"), call.get("weights"))
    logits = logits + bias
    return logits, error + SAFETY * torch.where(bias == -torch.inf, 0.0, products * logits.abs())


def _hidden_alone(call: dict[str, Any], logits: Tensor, error: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same of queries that see no key: the rounding of a low number decides what is left of a logit beside it."""
    hidden, mask = call.get("hidden"), call["mask"]
    boolean = mask is not None and mask.dtype == torch.bool
    if bias is None or (boolean and hidden is None):
        return _with_bias(call, logits, error, bias)
    if boolean and hidden is not None:
        return torch.where(bias == -torch.inf, hidden, logits), torch.where(bias == -torch.inf, 0.0, error)
    dtype = call.get("weights") or accumulate_dtype(call["query"].dtype)
    low, made, high = ((logits + by * error + bias).to(dtype).double() for by in (-1, 0, 1))
    apart = torch.maximum(high - made, made - low).nan_to_num(0.0)
    absorbed = (low == bias) & (high == bias)
    return made, apart + torch.where(absorbed | (made == -torch.inf), 0.0, 2 * torch.finfo(dtype).eps * made.abs())


def _attended(
    call: dict[str, Any],
    logits: Tensor,
    error: Tensor,
    some: Tensor,
    value: Tensor,
    bias: Tensor | None,
    queries: Tensor | None,
) -> Expected:
    sink, nothing = call.get("sink_logit"), (logits == -torch.inf).all(-1)
    logits = torch.where(nothing[..., None], 0.0, logits)
    lse = logits.logsumexp(-1)
    whole = logits
    if sink is not None:
        sink = sink if queries is None or sink.shape[2] == 1 else sink[:, :, queries]
        whole = torch.cat([logits, sink.double().expand(*logits.shape[:3], 1)], -1)
    probs = whole.softmax(-1)[..., : logits.shape[-1]].masked_fill(nothing[..., None], 0.0)
    output = probs @ value
    doubt = (2 * error.clamp(max=10)).expm1()
    squares = value.square().sum(-1)  # [B, Hq, N]
    apart = squares[..., None, :] - 2 * output @ value.transpose(-1, -2) + output.square().sum(-1)[..., None]
    # The rounding of a sum of N terms grows as that of a random walk.
    summed = _accumulated(call["query"]) * math.sqrt(value.shape[2])
    own = _eps(call["query"], call.get("weights"), call.get("output")) + summed
    rounding = SAFETY * own * (probs * squares.sqrt()[..., None, :]).sum(-1)
    sink_doubt = 0 if sink is None else (1 - probs.sum(-1)) * output.norm(dim=-1) * doubt.amax(-1)
    allowed = (probs * doubt * apart.clamp(min=0).sqrt()).sum(-1) + rounding + sink_doubt
    shares = logits.softmax(-1)
    lse_error = (shares * doubt).sum(-1) + SAFETY * own * lse.abs()
    tiny = torch.finfo(torch.float64).tiny
    error = allowed / math.sqrt(value.shape[-1]) + tiny
    floating = call["mask"] is not None and call["mask"].is_floating_point()
    bias_eps = _eps(call["mask"]) if floating else 0.0
    spelled = call.get("weights") is not None and sink is None  # its softmax over nothing is NaN
    zero = torch.zeros_like(nothing) if spelled else nothing
    return Expected(output, error, lse, lse_error + tiny, some, ~some & ~nothing, zero, bias, bias_eps, value.shape[2])


def _accumulated(tensor: Tensor) -> float:
    """A unit in the last place of the numbers in which sums over products of a dtype are kept."""
    return min(_eps(tensor), torch.finfo(torch.float32).eps)


def _eps(tensor: Tensor, *dtypes: torch.dtype | None) -> float:
    """A unit in the last place of the coarsest of some dtypes."""
    eps = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, *dtypes) if dtype is not None)
    return max(eps, TENSOR_CORES) if tensor.is_cuda and eps > torch.finfo(torch.float64).eps else eps


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal that are computed alike from equal values."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return not isinstance(theirs, (bool, int, float)) or bool(ours == theirs)
    if ours.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return torch.equal(ours.to(theirs.dtype), theirs)
    if torch.equal(ours, theirs) or not theirs.numel():
        return True
    known = theirs.isfinite()
    if not torch.equal(known, ours.isfinite()):
        return False
    apart = (ours.double() - theirs.double())[known].norm()
    return bool(apart <= SAME * _eps(theirs) * theirs[known].double().norm())
