"""Test forms of masks by class: each is held with equal outputs, or refused with name and line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.rewrite import pipeline
from tests.adversary.models import Attend, Bare, Feed, additive, keys, queries, sdpa, seen
from tests.adversary.oracle import Case, Kind, Verdict, judge

LOWEST = torch.finfo(torch.float32).min
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 11])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3], [0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3]])
REAL = torch.ones(2, 400, dtype=torch.int64)
PIECES = (5, 1, 1, 3, 1)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A model of one layer, its calls, and the expected verdict."""

    name: str
    attend: Attend
    kind: Kind = "held"
    pieces: tuple[int, ...] = PIECES
    inputs: dict[str, Feed] = dataclasses.field(default_factory=dict)
    policy: str = "full"
    model: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        verdict = self.verdict()
        assert verdict.kind == self.kind, verdict

    def verdict(self) -> Verdict:
        made = Bare(self.attend, table=torch.tensor([0.5, 1.0]), **self.model)
        case = Case(made, self.inputs, self.pieces, wrap=made.call, real=self.inputs.get("p"))
        return judge(case, self.policy)


def spelled(name: str, change: Callable[..., Tensor], kind: Kind = "held", **how: Any) -> Spelling:
    """Attend with change(logits, i, j, **inputs) before the softmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, table: Tensor, **inputs: Tensor) -> Tensor:
        return change(q @ k.mT / 3, i, j, **inputs).softmax(-1) @ v

    return Spelling(name, attend, kind, **how)


def called(name: str, mask: Callable[..., Tensor], kind: Kind = "held", **how: Any) -> Spelling:
    """Attend by scaled_dot_product_attention with mask(i, j, **inputs)."""
    return Spelling(name, sdpa(lambda i, j, table, **inputs: mask(i, j, **inputs)), kind, **how)


def parameters(spellings: list[Spelling]) -> Any:
    return pytest.mark.parametrize("spelling", [pytest.param(each, id=each.name) for each in spellings])


def hidden(i: Tensor, j: Tensor, low: float = LOWEST) -> Tensor:
    """Return an additive causal mask [q, S]."""
    return torch.zeros(()).masked_fill(j > i, low)


PADDED = {"inputs": {"p": seen(LEFT)}}
BOUND = [
    spelled("where-of-zeros", lambda a, i, j, p: a + padding_of(p, i, j), **PADDED),
    spelled("where-by-name", lambda a, i, j: torch.where(condition=j <= i, input=a, other=-1e9)),
    spelled("where-as-a-method", lambda a, i, j: a.where(j <= i, -1e9)),
    spelled("where-as-a-method-by-name", lambda a, i, j: a.where(condition=j <= i, other=torch.tensor(-1e9))),
    spelled("masked-fill-by-name", lambda a, i, j: a.masked_fill(mask=j > i, value=LOWEST)),
    spelled("add-by-name", lambda a, i, j: torch.add(a, other=hidden(i, j))),
    spelled("add-with-alpha", lambda a, i, j: torch.add(a, hidden(i, j, -1e9), alpha=2)),
    spelled("subtract-with-alpha", lambda a, i, j: torch.sub(a, hidden(i, j, 1e9), alpha=2)),
    spelled("multiply-by-name", lambda a, i, j: torch.mul(a, other=0.5) + hidden(i, j)),
    spelled(
        "padding-by-name", lambda a, i, j, p: a.masked_fill((j > i) | torch.eq(keys(p), other=0), LOWEST), **PADDED
    ),
    spelled("rounded-logits", lambda a, i, j: torch.div(a, 0.5, rounding_mode="floor") + hidden(i, j), "refused"),
    spelled("rounded-indices", lambda a, i, j: a.masked_fill(torch.div(j, 2, rounding_mode="floor") > i // 2, -1e9)),
    spelled("alpha-on-the-logits", lambda a, i, j: torch.add(hidden(i, j), a, alpha=2), "refused"),
]


def counted(name: str, index: Callable[[Tensor], Tensor]) -> Spelling:
    """Attend with index(k) in place of the key index."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
        return (q @ k.mT / 3).masked_fill(index(k) > i, -1e9).softmax(-1) @ v

    return Spelling(name, attend, policy="h2o")


FROM_ZERO = [
    counted("from-zero", lambda k: torch.arange(0, k.shape[2])),
    counted("from-zero-by-one", lambda k: torch.arange(0, k.shape[2], 1)),
    counted("end-by-name", lambda k: torch.arange(end=k.shape[2])),
    counted("from-zero-end-by-name", lambda k: torch.arange(0, end=k.shape[2])),
    counted("by-name", lambda k: torch.arange(step=1, end=k.shape[2], start=0, dtype=torch.int64)),
]
COUNTED = [
    counted("from-one-end-by-name", lambda k: torch.arange(1, end=k.shape[2] + 1) - 1),
    counted("from-one-by-name", lambda k: torch.arange(start=1, end=k.shape[2] + 1) - 1),
    counted("by-two", lambda k: torch.arange(0, 2 * k.shape[2], 2) // 2),
    counted("down", lambda k: k.shape[2] - torch.arange(k.shape[2], 0, -1)),
]


@parameters(FROM_ZERO)
def test_a_mask_by_an_index_from_zero_is_computed_in_the_step(
    spelling: Spelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the host computes nothing: a `DecodeLoop` refuses steps for which it does."""
    graphs, build = list[Any](), pipeline.build_host_graph
    monkeypatch.setattr(pipeline, "build_host_graph", lambda *given: graphs.append(build(*given)) or graphs[-1])
    spelling.check()
    assert graphs
    assert set(graphs) == {None}


@pytest.mark.few(2)
@parameters(COUNTED)
def test_a_key_index_may_count_in_any_way(spelling: Spelling) -> None:
    spelling.check()


def padding_of(p: Tensor, i: Tensor, j: Tensor) -> Tensor:
    seen_by = (j <= i) & keys(p).bool()
    return torch.zeros_like(seen_by, dtype=torch.float32).where(seen_by, -torch.inf)


@pytest.mark.few(2)
@parameters(BOUND)
def test_arguments_are_bound_by_signature(spelling: Spelling) -> None:
    """Check that `op_table.normalize_calls` brings every call into one form before any analysis."""
    spelling.check()


SCALED = [
    spelled("filled-then-multiplied", lambda a, i, j: a.masked_fill(j > i, -1e4) * 1e-4, "refused"),
    spelled("filled-then-divided", lambda a, i, j: torch.where(j <= i, a, -1e4) / 1e4, "refused"),
    spelled("bounded-then-multiplied", lambda a, i, j: a.masked_fill(j > i, -1e9).clamp(min=-1e4) * 1e-3, "refused"),
    spelled("filled-then-capped", lambda a, i, j: torch.tanh(a.masked_fill(j > i, -1e9) / 2) * 2, "refused"),
    spelled("added-then-multiplied", lambda a, i, j: (a + hidden(i, j, -1e4)) * 1e-4),
    spelled("low-enough-after-the-factor", lambda a, i, j: a.masked_fill(j > i, -1e9) * 0.5),
    spelled("filled-then-scaled", lambda a, i, j: a.masked_fill(j > i, -1e4) / 8**0.5),
    spelled("filled-then-halved", lambda a, i, j: torch.where(near(i, j), a, -1e4) * 0.5),
    spelled("bounded-then-halved", lambda a, i, j: a.masked_fill(~near(i, j), -1e9).clamp(min=-1e4) * 0.5),
    spelled("filled-then-divided-by-twenty", lambda a, i, j: a.masked_fill(j > i, -1e4) / 20, "refused"),
    spelled("lowest-then-multiplied", lambda a, i, j: (a + hidden(i, j)) * 0.5),
    spelled("bounded", lambda a, i, j: a.masked_fill(j > i, -1e9).clamp(min=-1e4)),
]


@pytest.mark.few(2)
@parameters(SCALED)
def test_a_mask_is_judged_after_all_later_factors(spelling: Spelling) -> None:
    """Check that the walk back from the softmax multiplies all later factors before it reads a mask."""
    spelling.check()


def near(i: Tensor, j: Tensor) -> Tensor:
    """Mask for earlier tokens in the same block of three: the first of each block sees nothing."""
    return (j < i) & (j // 3 == i // 3)


def earlier(i: Tensor, j: Tensor, s: Tensor) -> Tensor:
    """Mask for earlier tokens of the same segment: the first of each segment sees nothing."""
    return (j < i) & (keys(s) == queries(s, i))


SEGMENTED = {"inputs": {"s": seen(SEGMENTS)}}
HALF = {"model": {"dtype": torch.bfloat16}}
SINGLE = (1, 1, 1, 1, 1, 1, 1)
EMPTY = [
    spelled("filled-lowest", lambda a, i, j: a.masked_fill(~near(i, j), LOWEST)),
    spelled("filled-1e9", lambda a, i, j: a.masked_fill(~near(i, j), -1e9)),
    spelled("filled-1e4", lambda a, i, j: a.masked_fill(~near(i, j), -1e4)),
    spelled("added-lowest", lambda a, i, j: a + additive(near(i, j))),
    spelled("added-1e9", lambda a, i, j: a + additive(near(i, j), -1e9)),
    spelled("bounded-below", lambda a, i, j: torch.max(a + additive(near(i, j)), torch.tensor(LOWEST))),
    spelled("biased-then-filled", lambda a, i, j: (a + 0.3 * (j - i)).masked_fill(~near(i, j), -1e4)),
    spelled("bfloat16", lambda a, i, j: a.masked_fill(~near(i, j), torch.finfo(a.dtype).min), **HALF),
    spelled("one-token-at-a-time", lambda a, i, j: a.masked_fill(~near(i, j), -1e9), pieces=SINGLE),
    spelled("segments", lambda a, i, j, s: a.masked_fill(~earlier(i, j, s), LOWEST), **SEGMENTED),
    called("library-bool", lambda i, j: near(i, j)[None, None]),
    called("library-segments", earlier, **SEGMENTED),
    called("library-lowest", lambda i, j: additive(near(i, j))[None, None]),
    called("library-infinite", lambda i, j: additive(near(i, j), -torch.inf)[None, None]),
    called("library-bfloat16", lambda i, j: additive(near(i, j)).bfloat16()[None, None], **HALF),
]


@pytest.mark.few(2)
@parameters(EMPTY)
def test_a_query_that_sees_nothing_gets_the_models_answer(spelling: Spelling) -> None:
    """Check that hidden keys rank above free slots, which are at -inf, below any mask of the model."""
    spelling.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "h2o", "sage"])
@parameters([EMPTY[0], EMPTY[3], EMPTY[10], EMPTY[13]])
def test_a_query_that_sees_nothing_under_other_policies(spelling: Spelling, policy: str) -> None:
    """Check prompts and chunks with scores: equal outputs, and no NaN in a policy's sums."""
    dataclasses.replace(spelling, policy=policy).check()


def test_a_query_that_sees_padding_alone_gets_nan() -> None:
    """Check that the output is NaN, not a plausible number: the model averages over padding, which is not cached."""
    allowed = spelled("", lambda a, i, j, p: a.masked_fill(~near(i, j) | (keys(p) == 0), LOWEST)).attend
    made = Bare(allowed, table=torch.ones(2))
    case = Case(made, {"p": seen(LEFT)}, (5, 1, 1), wrap=made.call, real=seen(LEFT))
    assert judge(case).detail == "call 2: off by nan"


TWICE = [
    spelled("different-numbers", lambda a, i, j: a.masked_fill(j > i, -1e9).masked_fill(~near(i, j), -1e4)),
    spelled("the-other-way", lambda a, i, j: a.masked_fill(~near(i, j), -1e4).masked_fill(j > i, LOWEST)),
    spelled("lower-where-it-is-near", lambda a, i, j: a.masked_fill(j > i, -1e4).masked_fill(near(i, j), -2e4)),
    spelled("and-infinite", lambda a, i, j: a.masked_fill(~near(i, j), -1e4).masked_fill(j > i, -torch.inf)),
    spelled("biased-before-both", lambda a, i, j: twice(a - 0.1 * (i - j), i, j, -2e4, -1e4)),
    spelled("numbers-close-together", lambda a, i, j: twice(a, i, j, -10010, -1e4), "refused"),
    spelled("a-bound-between", lambda a, i, j: twice(a, i, j, -3e4, -1e4).clamp(min=-2e4), "refused"),
    spelled("four-numbers", lambda a, i, j: twice(twice(a, i, j, -4e4, -3e4), i, j + 1, -2e4, -1e4), "refused"),
    spelled("both-low", lambda a, i, j: a.masked_fill(~near(i, j), -1e9).masked_fill(j > i, LOWEST)),
    spelled("both-low-replaced", lambda a, i, j: torch.where(near(i, j), a.masked_fill(j > i, LOWEST), -1e9)),
    spelled("the-same-number", lambda a, i, j: a.masked_fill(j > i, -1e4).masked_fill(~near(i, j), -1e4)),
    spelled("added-after", lambda a, i, j: a.masked_fill(~near(i, j), -1e4) + hidden(i, j), "refused"),
    spelled("added-after-the-lowest", lambda a, i, j: a.masked_fill(j > i, LOWEST) + additive(near(i, j), -1e9)),
    spelled("added-before", lambda a, i, j: (a + hidden(i, j, -1e9)).masked_fill(~near(i, j), -1e4), "refused"),
    spelled("biased-before", lambda a, i, j: (a - 0.1 * (i - j)).masked_fill(~near(i, j), -1e4)),
    spelled("added-before-the-lowest", lambda a, i, j: (a + hidden(i, j, -1e9)).masked_fill(~near(i, j), LOWEST)),
    spelled("infinite-and-lowest", lambda a, i, j: a.masked_fill(j > i, -torch.inf).masked_fill(~near(i, j), LOWEST)),
]


@pytest.mark.few(2)
@parameters(TWICE)
def test_masks_apply_in_the_models_order(spelling: Spelling) -> None:
    """Check that masks are composed from first to last, and that ambiguous fill values are refused."""
    spelling.check()


def less_the_maximum(a: Tensor) -> Tensor:
    return a - a.amax(-1, keepdim=True)


AROUND_THE_MAXIMUM = [
    spelled("filled", lambda a, i, j: less_the_maximum(a.masked_fill(~near(i, j), -1e9)).masked_fill(j > i, -1e9)),
    spelled("lower-first", lambda a, i, j: less_the_maximum(a + additive(near(i, j))).masked_fill(j > i, -1e9)),
    spelled("added", lambda a, i, j: less_the_maximum(a + additive(near(i, j))) + hidden(i, j, -1e9)),
    spelled("biased-after", lambda a, i, j: less_the_maximum(a.masked_fill(~near(i, j), -1e9)) - 0.5 * (i - j)),
    spelled("in-place", lambda a, i, j: less_the_maximum(a.masked_fill_(~near(i, j), -1e9)).masked_fill_(j > i, -1e9)),
]
BESIDE_THE_MAXIMUM = [
    spelled("biased-before", lambda a, i, j: less_the_maximum(a - 0.1 * (i - j)).masked_fill(~near(i, j), -1e9)),
    spelled("both-before", lambda a, i, j: less_the_maximum(twice(a, i, j, LOWEST, -1e9))),
    spelled("both-after", lambda a, i, j: twice(less_the_maximum(a), i, j, LOWEST, -1e9)),
]


@pytest.mark.few(1)
@parameters(AROUND_THE_MAXIMUM)
def test_masks_on_both_sides_of_the_maximum_are_not_read(spelling: Spelling) -> None:
    """Check that less its maximum, a row whose keys are all hidden is a row of zeros, on which a second mask acts."""
    assert "subtracted between two masks" in spelling.verdict().detail


@pytest.mark.few(1)
@parameters(BESIDE_THE_MAXIMUM)
def test_masks_on_one_side_of_the_maximum_are_read(spelling: Spelling) -> None:
    spelling.check()


def twice(a: Tensor, i: Tensor, j: Tensor, one: float, other: float) -> Tensor:
    """Fill logits of later keys with one number, and of keys that are not near with another."""
    return a.masked_fill(j > i, one).masked_fill(~near(i, j), other)


FLOAT16 = torch.finfo(torch.float16).min


def in_half(name: str, change: Callable[..., Tensor], kind: Kind = "held", **how: Any) -> Spelling:
    return spelled(name, change, kind, **{"model": {"dtype": torch.float16}, **how})


def added_in(dtype: torch.dtype, allowed: Tensor, low: float) -> Tensor:
    return torch.zeros((), dtype=dtype).masked_fill(~allowed, low)


HALVES = [
    in_half("filled-and-added", lambda a, i, j, p: a.masked_fill(j > i, FLOAT16) + padding_in(a, p, i, j), **PADDED),
    in_half(
        "chosen-and-added",
        lambda a, i, j, p: torch.where(j <= i, a, torch.full([], FLOAT16, dtype=a.dtype)) + padding_in(a, p, i, j),
        **PADDED,
    ),
    in_half("bounded", lambda a, i, j, p: torch.max(a + padding_in(a, p, i, j), torch.tensor(FLOAT16)), **PADDED),
    in_half("biased-after", lambda a, i, j: a.masked_fill(j > i, FLOAT16) + (0.1 * (j - i)).to(a.dtype)),
    in_half("float32-after", lambda a, i, j: (a.masked_fill(j > i, FLOAT16) + 0.1 * (j - i)).half()),
    in_half("too-high", lambda a, i, j: a.masked_fill(j > i, -1e4) + (0.1 * (j - i)).to(a.dtype), "refused"),
    spelled("bfloat16", lambda a, i, j: a.masked_fill(j > i, -1e4) + (0.1 * (j - i)).to(a.dtype), **HALF),
    spelled("bfloat16-1e4", lambda a, i, j: (a + 0.3 * (j - i)).to(a.dtype).masked_fill(~near(i, j), -1e4), **HALF),
]


def padding_in(a: Tensor, p: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return added_in(a.dtype, (j <= i) & keys(p).bool(), torch.finfo(a.dtype).min)


@pytest.mark.few(1)
@parameters(HALVES)
def test_numbers_absorb_logits_in_the_models_own_dtype(spelling: Spelling) -> None:
    """Check float16, whose lowest number is -65504: added to it, ordinary logits are rounded away."""
    spelling.check()


ROUNDED = {
    "float16": lambda a, i, j: a + added_in(torch.float16, near(i, j), FLOAT16),
    "float16-1e4": lambda a, i, j: a + added_in(torch.float16, near(i, j), -1e4),
    "bfloat16-1e4": lambda a, i, j: a.bfloat16() + added_in(torch.bfloat16, near(i, j), -1e4),
    "rounded-later": lambda a, i, j: (a.float() + added_in(torch.float32, near(i, j), FLOAT16)).half(),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_query_that_sees_nothing_in_half_precision_gets_nan(name: str) -> None:
    """Check that a step gives NaN where the model rounds and steps do not, unless validation refuses it."""
    dtype = torch.bfloat16 if name.startswith("bfloat16") else torch.float16
    made = Bare(spelled("", ROUNDED[name]).attend, table=torch.ones(2), dtype=dtype)
    detail = judge(Case(made, {}, (5, 1, 1), wrap=made.call)).detail
    assert detail == "call 2: off by nan" or "the rewritten graph is not the model's" in detail


def written(name: str, write: Callable[..., Any], kind: Kind = "held", **how: Any) -> Spelling:
    """Attend with logits that write(logits, i, j, **inputs) changes in place, without use of its result."""

    def change(a: Tensor, i: Tensor, j: Tensor, **inputs: Tensor) -> Tensor:
        write(a, i, j, **inputs)
        return a.float()

    return spelled(name, change, kind, **how)


WRITTEN = [
    written("filled", lambda a, i, j: a.masked_fill_(j > i, LOWEST)),
    written("filled-as-large-as-logits", lambda a, i, j: a.masked_fill_((j > i).expand_as(a), LOWEST)),
    written("added", lambda a, i, j: a.add_(hidden(i, j))),
    written("scaled-then-filled", lambda a, i, j: (a.mul_(0.5), a.masked_fill_(j > i, -1e9))),
    written("filled-then-scaled", lambda a, i, j: (a.masked_fill_(j > i, -1e4), a.mul_(1e-4)), "refused"),
    written("padding-alone", lambda a, i, j, p: a.masked_fill_((keys(p) == 0).expand_as(a), LOWEST), **PADDED),
    written("by-subscript", lambda a, i, j: a.__setitem__((j > i).expand_as(a), -1e9), "refused"),
    written("by-a-view", lambda a, i, j: a[:, :1].masked_fill_(j > i, LOWEST), "refused"),
]


@pytest.mark.few(1)
@parameters(WRITTEN)
def test_writes_in_place_to_logits_are_read(spelling: Spelling) -> None:
    """Check that the walk from the softmax finds writes, which have no users, as the last write to their target."""
    spelling.check()


def mask_written(name: str, write: Callable[..., Any]) -> Spelling:
    """Attend with a view of a mask [q, S] that write(mask, i, j) changed before."""

    def mask(i: Tensor, j: Tensor) -> Tensor:
        made = torch.zeros(len(i), len(j))
        write(made, i, j)
        return made[None, None]

    return called(name, mask)


MASKS_WRITTEN = [
    mask_written("filled", lambda m, i, j: m.masked_fill_(j > i, LOWEST)),
    mask_written("filled-with-holes", lambda m, i, j: m.masked_fill_((j > i) | ((j % 3 == 1) & (j < i)), -torch.inf)),
    mask_written("added", lambda m, i, j: m.add_(hidden(i, j))),
    mask_written("added-through-a-view", lambda m, i, j: m[None].add_(hidden(i, j))),
    mask_written("filled-then-scaled", lambda m, i, j: (m.masked_fill_(j > i, -1e9), m.mul_(2))),
]


@pytest.mark.few(2)
@parameters(MASKS_WRITTEN)
def test_writes_in_place_to_a_mask_are_read(spelling: Spelling) -> None:
    """Check masks with writes, whose nodes have no users: a slice for one key would miss them.

    Such masks are computed on the host, with their writes, instead of sliced.
    """
    spelling.check()


def beside(name: str, change: Callable[..., Tensor], kind: Kind = "refused") -> Spelling:
    """Attend with change(masked logits, a column of sinks, i, j) before the softmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
        a = q @ k.mT / 3 + hidden(i, j, -1e9)
        return change(a, table[:1].expand(*a.shape[:3], 1), i, j).softmax(-1)[..., :-1] @ v

    return Spelling(name, attend, kind)


SINKS = [
    beside("nothing-after", lambda a, s, i, j: torch.cat([a, s], -1), "held"),
    beside("a-mask-as-wide", lambda a, s, i, j: torch.cat([a, s], -1) + F.pad(hidden(i, j), (0, 1))),
    beside("a-bias-of-queries", lambda a, s, i, j: torch.cat([a, s], -1) + i * 0.1),
    beside("rows-filled", lambda a, s, i, j: torch.cat([a, s], -1).masked_fill(i % 3 == 1, -1e9)),
    beside("keys-filled", lambda a, s, i, j: torch.cat([a, s], -1).masked_fill(F.pad(j > i, (0, 1)), -1e9)),
    beside("bounded", lambda a, s, i, j: torch.cat([a, s], -1).clamp(min=-1e9)),
    beside("scaled", lambda a, s, i, j: torch.cat([a, s], -1) * 0.5),
]


@pytest.mark.few(1)
@parameters(SINKS)
def test_operations_on_logits_joined_with_sinks_are_refused(spelling: Spelling) -> None:
    """Check that a column of sinks is found only if no operation changes it."""
    spelling.check()


def grouped(name: str, change: Callable[..., Tensor], kind: Kind = "held") -> Spelling:
    """Attend with five dimensions, [B, Hkv, G, q, S]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
        a = q.view(q.shape[0], 2, 2, *q.shape[2:]) @ k[:, :, None].mT / 3
        mixed = change(a, i, j).softmax(-1) @ v[:, :, None]
        return mixed.view(q.shape[0], 4, *q.shape[2:])

    return Spelling(name, attend, kind, model={"heads": 4, "kv_heads": 2})


def shared(
    name: str, of_keys: Callable[[Tensor], Tensor], of_values: Callable[[Tensor], Tensor], kind: Kind
) -> Spelling:
    """Attend with five dimensions to of_keys(k), [B, ., ., D, S], and of_values(v), [B, ., ., S, D]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
        a = q.view(q.shape[0], 2, 2, *q.shape[2:]) @ of_keys(k) / 3 + hidden(i, j)
        return (a.softmax(-1) @ of_values(v)).view(q.shape)

    return Spelling(name, attend, kind, model={"heads": 4, "kv_heads": 2})


SHARED = [
    shared("by-groups", lambda k: k.unsqueeze(2).mT, lambda v: v.unsqueeze(2), "held"),
    shared("one-after-the-other", lambda k: k.mT.unsqueeze(1), lambda v: v.unsqueeze(1), "refused"),
    shared("by-a-view", lambda k: k.mT.reshape(k.shape[0], 1, 2, 8, -1), lambda v: v[:, None], "refused"),
    shared("keys-alone", lambda k: k.mT.unsqueeze(1), lambda v: v.unsqueeze(2), "refused"),
    shared("values-alone", lambda k: k.unsqueeze(2).mT, lambda v: v.unsqueeze(1), "refused"),
]


@pytest.mark.few(2)
@parameters(SHARED)
def test_heads_in_two_dimensions_share_keys_by_groups(spelling: Spelling) -> None:
    """Check that both products compare their operands' dimensions, so that a view does not lose the map of heads."""
    spelling.check()


SLOPES = torch.tensor([0.0, -0.5, 0.25, 1.0])
VIEWED = [
    grouped("five-and-a-mask-of-two", lambda a, i, j: a + hidden(i, j)),
    grouped("five-and-a-mask-of-four", lambda a, i, j: a + hidden(i, j)[None, None]),
    grouped("five-and-a-mask-of-five", lambda a, i, j: a + hidden(i, j) + SLOPES.view(2, 2, 1, 1) * (j - i)),
    grouped("five-and-groups", lambda a, i, j: a + hidden(i, j) + SLOPES[:2].view(2, 1, 1) * (j - i)),
    grouped("five-and-kv-heads", lambda a, i, j: a + hidden(i, j) + SLOPES[:2].view(2, 1, 1, 1) * (j - i)),
    spelled("rows-and-heads-joined", lambda a, i, j: back(a.flatten(0, 1) + hidden(i, j), a)),
    spelled("joined-and-slopes", lambda a, i, j: back(a.flatten(0, 1) + sloped(i, j, 1), a)),
    spelled("rows-as-heads", lambda a, i, j: back(a.reshape(1, -1, *a.shape[-2:]) + sloped(i, j, 1), a), "refused"),
    spelled("heads-as-rows", lambda a, i, j: back(a.reshape(-1, 1, *a.shape[-2:]) + sloped(i, j, 2), a), "refused"),
    spelled("more-dimensions", lambda a, i, j: (a.flatten(0, 1) + hidden(i, j)[None, None])[0].view_as(a), "refused"),
    spelled("padding-along-heads", lambda a, i, j, p: back(a[:, :, None] + crossed(p, i, j), a), "refused", **PADDED),
]


def back(a: Tensor, like: Tensor) -> Tensor:
    return a.reshape(like.shape)


def sloped(i: Tensor, j: Tensor, more: int) -> Tensor:
    """Return a bias [B * H, q, S], with further dimensions after the first."""
    return SLOPES.view(-1, *[1] * (more + 1)) * (j - i) + hidden(i, j)


def crossed(p: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return a mask [B, 1, 1, S] for logits [B, H, 1, q, S], so that rows align with heads."""
    return hidden(i, j) + torch.zeros(()).masked_fill(keys(p) == 0, -1e9)


@pytest.mark.few(2)
@parameters(VIEWED)
def test_masks_are_read_along_the_axes_of_their_logits(spelling: Spelling) -> None:
    """Check that each mask is aligned with the shape of its logits, and compared with rows and heads."""
    spelling.check()


LONG = (253, 1, 3, 4)
COUNTED = [
    spelled("bfloat16", lambda a, i, j: a + hidden(i, j) + 0.1 * (counted(j, torch.bfloat16) - i), pieces=LONG),
    spelled("float16", lambda a, i, j: a + hidden(i, j) + 0.1 * (counted(j, torch.float16) - i), pieces=(2046, 1, 3)),
    spelled("int8", lambda a, i, j: a + hidden(i, j) + 0.01 * counted(j, torch.int8), pieces=(126, 1, 3, 1)),
    spelled("uint8", lambda a, i, j: a + hidden(i, j) + 0.01 * counted(j, torch.uint8), pieces=LONG),
    spelled("cast", lambda a, i, j: a + hidden(i, j) + 0.1 * (j.bfloat16() - i.bfloat16()), pieces=LONG),
    spelled("sum-int8", lambda a, i, j, p: summed(a, i, j, p, torch.int8), pieces=(126, 1, 3, 1),
            inputs={"p": seen(REAL)}),
    spelled("sum-bfloat16", lambda a, i, j, p: summed(a, i, j, p, torch.bfloat16), pieces=LONG,
            inputs={"p": seen(REAL)}),
    spelled("queries-bfloat16", lambda a, i, j: a + hidden(i, j) + 0.1 * (j - of_queries(a)), pieces=(253, 1, 1, 1)),
    spelled("queries-in-a-chunk", lambda a, i, j: a + hidden(i, j) + 0.1 * (j - of_queries(a)), "refused", pieces=LONG),
]  # fmt: skip


def counted(j: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.arange(j.shape[0], dtype=dtype)


def summed(a: Tensor, i: Tensor, j: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a bias by the number of real tokens, counted in a dtype."""
    return a.masked_fill((j > i) | (keys(p) == 0), LOWEST) + 0.05 * keys(p.cumsum(-1, dtype=dtype)).float()


def of_queries(a: Tensor) -> Tensor:
    return torch.arange(a.shape[-1] - a.shape[-2], a.shape[-1], dtype=torch.bfloat16)[:, None]


@pytest.mark.few(1)
@parameters(COUNTED)
def test_an_index_keeps_its_dtype(spelling: Spelling) -> None:
    """Check that a key's index is converted like the model's arange; dtypes that round sums use the model's code."""
    spelling.check()
