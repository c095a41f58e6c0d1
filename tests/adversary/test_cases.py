"""Test models that once gave wrong results, one row each: a small model and its calls, held or refused.

The letters: A inputs for each token, B padding, C tokens that do not attend to themselves, D chunks, E operations over
keys, F operations on logits, G maps of heads, H handles and numbers, I exceptions that are not kvpass's, J documented
behaviour, K models that always worked and keep the judge honest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass
from tests.adversary import verdicts
from tests.adversary.models import (
    DIM,
    INDICES,
    Attend,
    Small,
    additive,
    always,
    causal,
    heads,
    keys,
    later,
    logits,
    new,
    plain,
    queries,
    sdpa,
    seen,
)
from tests.adversary.oracle import ROOM, Case, Edit, judge
from tests.models import build, prompt


@dataclasses.dataclass(frozen=True)
class Row:
    """A case by name; `held` means that the model must work, otherwise it may be refused too."""

    name: str
    make: Callable[[], Case]
    held: bool = False
    slow: bool = False


def row(name: str, attend: Attend | list[Attend], *, held: bool = False, model: Any = None, **how: Any) -> Row:
    """Return a row for a model of functions; `model` has settings of `Small`, and the rest goes to `Case`."""
    return Row(name, lambda: Case(Small(attend, **(model or {})), **how), held)


def masked(name: str, mask: Callable[..., Tensor], **how: Any) -> Row:
    return row(name, sdpa(mask), **how)


def weighted(name: str, bias: Callable[[Tensor], Tensor], **how: Any) -> Row:
    """Return a row with a bias [B, S] that is computed from one number for each key, [B, S]."""
    how = {"inputs": {"w": seen(WEIGHTS)}, "pieces": STEPS, **how}
    return masked(name, lambda i, j, w: additive(causal(i, j)) + keys(bias(w)), **how)


def padded(name: str, mask: Callable[..., Tensor], **how: Any) -> Row:
    """Return a row with a mask from p, int64 [B, S], which is 0 for padding on the left."""
    return masked(name, mask, **{"inputs": {"p": seen(LEFT)}, "real": seen(LEFT), **how})


# -- inputs: two rows of eleven tokens ---------------------------------------------------------------------

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 11])
RIGHT = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 11])
BETWEEN = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
ONCE = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
SECOND = torch.tensor([[1] * 11, [1, 0] + [1] * 9])
NONE = torch.ones(2, 11, dtype=torch.int64)
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]])
WEIGHTS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]]) / 5
TYPES = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]])
BLOCKS = torch.tensor([[-1, 0, 0, -1, -1, -1, -1, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1, -1, -1, 1, 1, -1]])
PREFIX = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
BEGINS = torch.tensor([[1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0]])
TABLE = torch.tensor([[0.0, 2.0, -1.0, 0.5, 1.0, -2.0], [1.0, -1.0, 3.0, 0.0, -0.5, 2.0]])
SLOPES = torch.tensor([0.5, 0.125])[:, None, None]
PICKED = torch.tensor([0, 2, 3])
STEPS = (5, 1, 1)
TWO_PADDINGS = {"p": seen(LEFT), "s": seen(BETWEEN)}
ONE_ROW = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1])


def of_all_rows(start: int, stop: int) -> Tensor:
    """Return a padding mask [S] that all rows share."""
    return ONE_ROW[:stop].contiguous()


def two_paddings(i: Tensor, j: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """Return a mask that hides a token if one of two inputs does."""
    return causal(i, j) & keys(p).bool() & keys(s).bool()


def to_places(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    """Return an ALiBi mask whose distances use positions [B, S] from the caller."""
    return additive(causal(i, j)) + SLOPES * (keys(p) - queries(p, i))


def one_by_one(i: Tensor, j: Tensor, b: Tensor) -> Tensor:
    """Return a mask [B, 1, q, S] by torch.vmap: tokens of one block in b [B, S] are visible."""

    def one(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | ((b[row, query] == b[row, key]) & (b[row, query] >= 0))

    keyed = torch.vmap(one, in_dims=(None, None, 0))
    rows = torch.vmap(torch.vmap(keyed, in_dims=(None, 0, None)), in_dims=(0, None, None))
    return rows(torch.arange(b.shape[0]), i[:, 0], j)[:, None]


PER_TOKEN = [
    masked("A-blocks-see-each-other-one-by-one", one_by_one, inputs={"b": seen(BLOCKS)}, held=True),
    masked(
        "A-segment-ids-in-the-mask",
        lambda i, j, s: causal(i, j) & (keys(s) == queries(s, i)),
        inputs={"s": seen(SEGMENTS)},
        held=True,
    ),
    masked(
        "A-document-ids-of-queries-and-of-keys",
        lambda i, j, own, s: causal(i, j) & (keys(s) == own[:, None, :, None]),
        inputs={"own": new(SEGMENTS), "s": seen(SEGMENTS)},
        held=True,
    ),
    masked(
        "A-document-ids-looked-up-by-index",
        lambda i, j, s: causal(i, j) & (s[:, j][:, None, None] == s[:, i[:, 0]][:, None, :, None]),
        inputs={"s": seen(SEGMENTS)},
        held=True,
    ),
    masked(
        "A-document-ids-additive",
        lambda i, j, s: additive(causal(i, j) & (keys(s) == queries(s, i)), -1e9),
        inputs={"s": seen(SEGMENTS)},
        held=True,
    ),
    masked(
        "A-segments-and-padding",
        lambda i, j, s, p: causal(i, j) & (keys(s) == queries(s, i)) & keys(p).bool(),
        inputs={"s": seen(SEGMENTS), "p": seen(LEFT)},
        real=seen(LEFT),
        held=True,
    ),
    masked(
        "A-segment-zero-is-padding",
        lambda i, j, s: causal(i, j) & (keys(s) == queries(s, i)) & (keys(s) > 0),
        inputs={"s": seen(SEGMENTS * LEFT)},
        real=seen((SEGMENTS * LEFT) > 0),
    ),
    weighted("A-weights-added-per-key", lambda w: w, held=True),
    weighted("A-log-weights-added-per-key", lambda w: (w + 0.1).log(), held=True),
    row(
        "A-weights-added-to-the-logits",
        logits(lambda a, i, j, w: (a + keys(w)).masked_fill(~causal(i, j), -torch.inf)),
        inputs={"w": seen(WEIGHTS)},
        held=True,
    ),
    masked(
        "A-weights-per-key-and-distance",
        lambda i, j, w: additive(causal(i, j)) + keys(w) * (j - i),
        inputs={"w": seen(WEIGHTS)},
        held=True,
    ),
    masked("A-alibi-by-key-positions", to_places, inputs={"p": seen(WEIGHTS.cumsum(-1))}, held=True),
    masked(
        "A-token-types-see-each-other",
        lambda i, j, t: causal(i, j) | ((keys(t) == 1) & (queries(t, i) == 1) & (j // 5 == i // 5)),
        inputs={"t": seen(TYPES)},
        held=True,
    ),
    masked(
        "A-token-types-in-a-bias",
        lambda i, j, t, table: additive(causal(i, j)) + keys(table[0][t]),
        model={"tables": {"table": TABLE}},
        inputs={"t": seen(TYPES)},
        held=True,
    ),
    masked(
        "A-token-types-of-both-in-a-bias",
        lambda i, j, t, table: additive(causal(i, j)) + table[queries(t, i), keys(t)],
        model={"tables": {"table": TABLE}},
        inputs={"t": seen(TYPES)},
        held=True,
    ),
    masked("A-prefix-lm", lambda i, j, p: causal(i, j) | keys(p).bool(), inputs={"p": seen(PREFIX)}, held=True),
    masked(
        "A-prefix-lm-by-its-length",
        lambda i, j, n: causal(i, j) | (j < n[:, :, None, None]),
        inputs={"n": always(PREFIX.sum(-1, keepdim=True))},
        held=True,
    ),
    masked(
        "A-prefix-lm-with-a-window",
        lambda i, j, p: (causal(i, j) & (i - j < 3)) | keys(p).bool(),
        inputs={"p": seen(PREFIX)},
        held=True,
    ),
    masked(
        "A-prefix-lm-with-a-window-by-its-length",
        lambda i, j, n: (causal(i, j) & (i - j < 3)) | (j < n[:, :, None, None]),
        inputs={"n": always(PREFIX.sum(-1, keepdim=True))},
        held=True,
    ),
    masked("A-prefix-lm-additive", lambda i, j, p: additive(causal(i, j) | (keys(p) > 0)), inputs={"p": seen(PREFIX)}),
    masked(
        "A-documents-counted-by-cumsum",
        lambda i, j, b: causal(i, j) & (keys(b.cumsum(-1)) == queries(b.cumsum(-1), i)),
        inputs={"b": seen(BEGINS)},
    ),
    masked(
        "A-weights-summed-by-cumsum",
        lambda i, j, w: additive(causal(i, j)) + keys(w.cumsum(-1)),
        inputs={"w": seen(WEIGHTS)},
    ),
    padded(
        "A-two-inputs-mark-padding",
        two_paddings,
        inputs=TWO_PADDINGS,
        real=seen(LEFT * BETWEEN),
        held=True,
    ),
    row(
        "A-two-inputs-mark-padding-in-one-of-two-layers",
        [sdpa(lambda i, j, p, s: causal(i, j) & keys(p).bool()), sdpa(two_paddings)],
        inputs=TWO_PADDINGS,
        real=seen(LEFT * BETWEEN),
        held=True,
    ),
    masked(
        "A-one-padding-for-all-rows",
        lambda i, j, s: causal(i, j) & s.bool(),
        inputs={"s": of_all_rows},
        real=seen(ONE_ROW.expand(2, -1)),
        held=True,
    ),
    padded(
        "A-padding-for-all-rows-and-for-each-row",
        lambda i, j, p, s: causal(i, j) & keys(p).bool() & s.bool(),
        inputs={"p": seen(LEFT), "s": of_all_rows},
        real=seen(LEFT * ONE_ROW),
        held=True,
    ),
    padded(
        "A-padding-in-one-row-for-all-rows-and-for-each-row",
        lambda i, j, p, s: additive(causal(i, j) & keys(p).bool()) + (1.0 - keys(s).float()) * -1e9,
        inputs={"p": seen(LEFT), "s": seen(ONE_ROW[None])},
        real=seen(LEFT * ONE_ROW),
        held=True,
    ),
    row(
        "A-padding-for-all-rows-and-for-each-row-in-two-layers",
        [sdpa(lambda i, j, p, s: causal(i, j) & keys(p).bool()), sdpa(lambda i, j, p, s: causal(i, j) & s.bool())],
        inputs={"p": seen(LEFT), "s": of_all_rows},
        real=seen(LEFT * ONE_ROW),
        held=True,
    ),
    padded("A-one-means-hidden", lambda i, j, p: causal(i, j) & ~keys(p).bool(), inputs={"p": seen(1 - LEFT)}),
    padded("A-two-means-visible", lambda i, j, p: causal(i, j) & (keys(p) == 2), inputs={"p": seen(2 * LEFT)}),
    padded("A-padding-that-weighs", lambda i, j, p: additive(causal(i, j)) + (keys(p) - 1) * 3.0),
    padded("A-padding-hidden-from-odd-queries", lambda i, j, p: causal(i, j) & (keys(p).bool() | (i % 2 == 0))),
    padded(
        "A-other-zeros-later",
        lambda i, j, p: causal(i, j) & keys(p).bool(),
        inputs={"p": later(LEFT, torch.tensor([[0, 0, 1, 0, 1] + [1] * 6, [1, 0, 0] + [1] * 8]), 6)},
        real=None,
        late=True,
        pieces=(5, 1, 1, 1, 3),
    ),
    padded(
        "A-one-in-the-prompt-zero-later",
        lambda i, j, p: causal(i, j) & keys(p).bool(),
        inputs={"p": later(NONE, torch.tensor([[0] * 5 + [1] * 6, [1] * 11]), 5)},
        real=None,
        late=True,
    ),
    padded(
        "A-zero-in-the-prompt-one-later",
        lambda i, j, p: causal(i, j) & keys(p).bool(),
        inputs={"p": later(LEFT, NONE, 5)},
        real=later(LEFT, NONE, 5),
        late=True,
    ),
    padded(
        "A-hidden-for-one-step",
        lambda i, j, p: causal(i, j) & keys(p).bool(),
        inputs={"p": lambda start, stop: (ONCE if stop == 7 else NONE)[:, :stop].contiguous()},
        real=None,
        late=True,
    ),
    masked(
        "A-weights-that-change",
        lambda i, j, w: additive(causal(i, j)) + keys(w),
        inputs={"w": later(WEIGHTS, 2 - WEIGHTS, 6)},
        late=True,
    ),
    masked(
        "A-segments-that-change",
        lambda i, j, s: causal(i, j) & (keys(s) == queries(s, i)),
        inputs={"s": later(SEGMENTS, BEGINS, 6)},
        late=True,
    ),
]


def adopting(name: str, mask: Callable[..., Tensor], **how: Any) -> Row:
    """Return a row whose prompt runs uncompiled."""
    return padded(name, mask, uncompiled=1, **how)


PADDING = [
    padded("B-additive-1e4", lambda i, j, p: additive(causal(i, j) & keys(p).bool(), -1e4), held=True),
    padded("B-additive-1e9", lambda i, j, p: additive(causal(i, j) & keys(p).bool(), -1e9), held=True),
    padded("B-additive-65504", lambda i, j, p: additive(causal(i, j) & keys(p).bool(), -65504.0), held=True),
    padded("B-additive-inf", lambda i, j, p: additive(causal(i, j) & keys(p).bool(), -torch.inf) + 0, real=seen(LEFT)),
    padded("B-product-1e9", lambda i, j, p: additive(causal(i, j), -1e9) + (1.0 - keys(p).float()) * -1e9, held=True),
    padded(
        "B-product-1e4-on-the-right",
        lambda i, j, p: additive(causal(i, j), -1e4) + (1.0 - keys(p).float()) * -1e4,
        inputs={"p": seen(RIGHT)},
        real=seen(RIGHT),
        held=True,
    ),
    row(
        "B-masked-fill-1e4",
        logits(lambda a, i, j, p: a.masked_fill(~(causal(i, j) & keys(p).bool()), -1e4)),
        inputs={"p": seen(LEFT)},
        real=seen(LEFT),
        held=True,
    ),
    row(
        "B-where-1e9",
        logits(lambda a, i, j, p: torch.where(causal(i, j) & keys(p).bool(), a, -1e9)),
        inputs={"p": seen(LEFT)},
        real=seen(LEFT),
        held=True,
    ),
    padded("B-or-eye", lambda i, j, p: (causal(i, j) & keys(p).bool()) | (i == j), held=True),
    padded(
        "B-or-eye-additive",
        lambda i, j, p: additive((causal(i, j) & keys(p).bool()) | (i == j)),
        inputs={"p": seen(RIGHT)},
        real=seen(RIGHT),
        held=True,
    ),
    padded("B-or-eye-in-a-chunk", lambda i, j, p: (causal(i, j) & keys(p).bool()) | (i == j), pieces=(3, 6, 1, 1)),
    adopting("B-adopted-padded", lambda i, j, p: causal(i, j) & keys(p).bool()),
    adopting("B-adopted-padded-additive", lambda i, j, p: additive(causal(i, j) & keys(p).bool()), pieces=(5, 3, 1)),
    adopting("B-adopted-segments", lambda i, j, p: causal(i, j) & (keys(p) == queries(p, i))),
    row("B-adopted-plain", plain, uncompiled=1, held=True),
]


def by_head(*masks: Callable[..., Tensor]) -> Attend:
    """Attend with a different mask for each head."""
    return sdpa(lambda i, j, **inputs: torch.cat([mask(i, j, **inputs) for mask in masks], 1))


UNSEEN = [
    masked("C-strictly-before", lambda i, j: ((j < i) | (j == 0))[None, None]),
    masked("C-strictly-before-additive", lambda i, j: additive(((j < i) | (j == 0))[None, None])),
    row("C-first-head-strictly-before", by_head(lambda i, j: ((j < i) | (j == 0))[None, None], causal)),
    row("C-second-head-strictly-before", by_head(causal, lambda i, j: ((j < i) | (j == 0))[None, None])),
    masked(
        "C-padding-for-the-first-head-only",
        lambda i, j, p: causal(i, j) & (keys(p).bool() | (torch.arange(2)[:, None, None] == 1)),
        inputs={"p": seen(LEFT)},
        real=seen(LEFT),
    ),
    masked(
        "C-padding-for-the-second-head-only",
        lambda i, j, p: causal(i, j) & (keys(p).bool() | (torch.arange(2)[:, None, None] == 0)),
        inputs={"p": seen(LEFT)},
        real=seen(LEFT),
    ),
    masked(
        "C-first-head-sees-only-the-first-token",
        lambda i, j: causal(i, j) & ((j == 0) | (torch.arange(2)[:, None, None] == 1)),
    ),
    masked("C-even-queries-do-not-see-themselves", lambda i, j: causal(i, j) & ((i != j) | (i % 2 == 1) | (i == 0))),
    padded("C-strictly-before-padded", lambda i, j, p: ((j < i) | (j == 2))[None, None] & keys(p).bool()),
]


def unmasked(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal_prompt(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attend causally in the prompt only: a chunk attends to all of itself."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])


CHUNKS = [
    row("D-no-mask", unmasked),
    row("D-no-mask-after-a-causal-prompt", causal_prompt),
    row("D-no-mask-spelled-out", logits(lambda a, i, j: a)),
    row("D-no-mask-without-chunks", unmasked, pieces=STEPS, held=True),
    masked("D-block-causal", lambda i, j: (j // 4 <= i // 4)[None, None]),
    masked("D-block-causal-additive", lambda i, j: additive((j // 4 <= i // 4)[None, None])),
    row("D-block-causal-filled", logits(lambda a, i, j: a.masked_fill(j // 3 > i // 3, -1e9))),
    masked(
        "D-image-in-a-second-turn",
        lambda i, j, t: causal(i, j) | ((keys(t) == 1) & (queries(t, i) == 1)),
        inputs={"t": seen(TYPES)},
    ),
    masked("D-all-of-the-chunk", lambda i, j: (j < i[-1:] + 1)[None, None].expand(1, 1, i.shape[0], -1)),
    masked("D-only-itself-of-the-chunk", lambda i, j: ((j < i[:1]) | (j == i))[None, None]),
    masked("D-backwards-in-the-chunk", lambda i, j: ((j < i[:1]) | (j >= i))[None, None]),
    row("D-is-causal-with-a-past", lambda q, k, v, i, j: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    padded("D-block-causal-padded", lambda i, j, p: (j // 4 <= i // 4)[None, None] & keys(p).bool()),
    masked("D-window", lambda i, j: causal(i, j) & (i - j < 3), held=True),
]


def places_of(w: Tensor) -> Tensor:
    """Return positions [1, S]."""
    return torch.arange(w.shape[1])[None]


def smoothed(w: Tensor) -> Tensor:
    return F.conv1d(w[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]


OVER_KEYS = [
    padded("E-argmax", lambda i, j, p: causal(i, j) & (j >= p.argmax(-1)[:, None, None, None])),
    padded("E-max-with-a-dim", lambda i, j, p: causal(i, j) & (j >= p.max(-1).indices[:, None, None, None])),
    padded(
        "E-count-nonzero",
        lambda i, j, p: causal(i, j) & (j >= p.shape[1] - p.count_nonzero(-1)[:, None, None, None]),
    ),
    padded("E-sum-of-the-padding", lambda i, j, p: causal(i, j) & (j >= p.shape[1] - p.sum(-1)[:, None, None, None])),
    weighted("E-argmax-of-the-weights", lambda w: (places_of(w) >= w.argmax(-1, keepdim=True)) * 2.0),
    weighted("E-argmin", lambda w: (places_of(w) > w.argmin(-1, keepdim=True)) * 2.0),
    weighted("E-count-nonzero-of-the-weights", lambda w: w * (w > 1).count_nonzero(-1)[:, None]),
    weighted("E-sum-of-the-weights", lambda w: w * w.sum(-1, keepdim=True) / 20),
    weighted("E-max-of-the-weights", lambda w: w * w.max(-1, keepdim=True).values),
    weighted("E-min-with-a-dim", lambda w: w * (1 + w.min(-1, keepdim=True).values)),
    weighted("E-amax", lambda w: w * w.amax(-1, keepdim=True)),
    weighted("E-norm", lambda w: w / w.norm(dim=-1, keepdim=True)),
    weighted("E-normalize", lambda w: F.normalize(w, dim=-1)),
    weighted("E-std", lambda w: w * w.std(-1, keepdim=True)),
    weighted("E-var", lambda w: w * w.var(-1, keepdim=True, correction=0)),
    weighted("E-nansum", lambda w: w / w.nansum(-1, keepdim=True)),
    weighted("E-prod", lambda w: w * w.prod(-1, keepdim=True).tanh()),
    weighted("E-median", lambda w: w * w.median(-1, keepdim=True).values),
    weighted("E-logsumexp", lambda w: w * w.logsumexp(-1, keepdim=True)),
    weighted("E-select", lambda w: w * w.select(-1, 0)[:, None]),
    weighted("E-first-column", lambda w: w * w[:, :1]),
    weighted("E-last-column", lambda w: w * w[:, -1:]),
    weighted("E-one-column-by-number", lambda w: w * w[:, 1][:, None]),
    weighted("E-unbind", lambda w: w * w.unbind(0)[0][:1]),
    weighted("E-cummax", lambda w: w.cummax(-1).values),
    weighted("E-logcumsumexp", lambda w: w.logcumsumexp(-1)),
    weighted("E-conv1d", smoothed),
    weighted("E-max-pool", lambda w: F.max_pool1d(w[:, None], 3, 1, 1)[:, 0]),
    weighted("E-avg-pool", lambda w: F.avg_pool1d(w[:, None], 3, 1, 1)[:, 0]),
    weighted("E-adaptive-pool", lambda w: w * F.adaptive_avg_pool1d(w, 1)),
    weighted("E-fft", lambda w: torch.fft.fft(w).real),
    weighted("E-layer-norm", lambda w: F.layer_norm(w, w.shape[-1:])),
    weighted("E-rms-norm", lambda w: F.rms_norm(w, w.shape[-1:])),
    weighted("E-softmax", lambda w: 4 * w.softmax(-1)),
    weighted("E-log-softmax", lambda w: w.log_softmax(-1).exp() * 4),
    weighted("E-flip", lambda w: w.flip(-1)),
    weighted("E-roll", lambda w: w.roll(1, -1)),
    weighted("E-shifted", lambda w: F.pad(w[:, :-1], (1, 0))),
    weighted("E-rows-exchanged", lambda w: w[[1, 0]]),
    weighted("E-rows-flipped", lambda w: w.flip(0)),
    weighted("E-first-row-for-all", lambda w: w[:1]),
    weighted("E-sum-over-the-rows", lambda w: w.sum(0, keepdim=True)),
]


def after(change: Callable[[Tensor], Tensor]) -> Attend:
    """Change the logits, and then apply an ordinary causal mask."""
    return logits(lambda a, i, j: change(a).masked_fill(~causal(i, j), -torch.inf))


def of_probabilities(change: Callable[..., Tensor]) -> Attend:
    """Apply change(probabilities, allowed) between an ordinary softmax and the product with the values."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = causal(i, j)
        a = (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~allowed, -torch.inf)
        return change(a.softmax(-1), allowed) @ v

    return attend


def over_queries(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    a = (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~causal(i, j), -1e9)
    return a.softmax(-2) @ v


def given(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, m: Tensor, **_: Any) -> Tensor:
    """Attend with a mask of four dimensions from the caller."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def whole(start: int, stop: int) -> Tensor:
    """Return a causal mask, bool [1, 1, q, S], as callers make it."""
    return torch.ones(stop, stop, dtype=torch.bool).tril()[None, None, start:].contiguous()


def biased(start: int, stop: int) -> Tensor:
    """Return a mask, float [1, 1, q, S], with a bias and no hidden key."""
    return whole(start, stop).float()


def grown_bias(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, b: Tensor, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b)


def negative(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    a = (q @ k.transpose(-1, -2)) * -(DIM**-0.5)
    return a.masked_fill(~causal(i, j), -torch.inf).softmax(-1) @ v


RELATIVE = torch.randn(17, DIM, generator=torch.Generator().manual_seed(0))


def relative_to_the_query(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Attend with a bias that is a product of the query and a vector for each distance, as Shaw et al. do."""
    bias = torch.einsum("bhqd,qkd->bhqk", q, RELATIVE[(i - j).clamp(-8, 8) + 8])
    return (q @ k.transpose(-1, -2) * DIM**-0.5 + bias).masked_fill(j > i, -torch.inf).softmax(-1) @ v


def relative_and_turned(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Attend with such a bias to queries that are rotated by complex numbers, and a product that hides keys."""
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(i.shape), i.float())).flatten(-2)
    bias = torch.einsum("bhqd,qkd->bhqk", turned, RELATIVE[(i - j).clamp(-8, 8) + 8])
    a = q @ k.transpose(-1, -2) * DIM**-0.5 + bias + (1.0 - causal(i, j).float()) * -1e9
    return a.softmax(-1) @ v


ZERO = torch.zeros(())

LOGITS = [
    row("F-clamp-both-sides", after(lambda a: a.clamp(-0.1, 0.1))),
    row("F-clamp-both-sides-by-name", after(lambda a: a.clamp(min=-0.1, max=0.1))),
    row("F-clamp-below", after(lambda a: a.clamp(min=-0.1))),
    row("F-clamp-min", after(lambda a: a.clamp_min(0.0))),
    row("F-clamp-above", after(lambda a: a.clamp(max=0.1))),
    row("F-maximum-with-zero", after(lambda a: torch.maximum(a, ZERO.to(a.dtype)))),
    row("F-max-with-zero", after(lambda a: torch.max(a, torch.zeros_like(a)))),
    row("F-relu", after(lambda a: a.relu())),
    row("F-where-zero", logits(lambda a, i, j: torch.where(causal(i, j), a, 0.0))),
    row("F-where-minus-one", logits(lambda a, i, j: torch.where(causal(i, j), a, -1.0))),
    row("F-where-of-a-tensor", logits(lambda a, i, j: torch.where(causal(i, j), a, torch.zeros(())))),
    row("F-where-turned-round", logits(lambda a, i, j: torch.where(j > i, -torch.inf, a)), held=True),
    row(
        "F-where-lower-than-bfloat16-goes",
        logits(lambda a, i, j: torch.where(causal(i, j), a, torch.finfo(torch.float32).min)),
        model={"dtype": torch.bfloat16},
        held=True,
    ),
    row("F-masked-fill-zero", logits(lambda a, i, j: a.masked_fill(j > i, 0.0))),
    row("F-masked-fill-high", logits(lambda a, i, j: a.masked_fill(j > i, 5.0))),
    row("F-add-alpha", logits(lambda a, i, j: a.add(additive(causal(i, j), -1e9) + (j - i) * 0.1, alpha=3))),
    row("F-torch-add-alpha", logits(lambda a, i, j: torch.add(a, additive(causal(i, j), -1e9) - j * 0.2, alpha=2))),
    row("F-bias-before-the-factor", logits(lambda a, i, j: (a + additive(causal(i, j), -1e9) - j * 0.2) * 2)),
    row("F-less-the-maximum-of-the-columns", after(lambda a: a - a.amax(-2, keepdim=True))),
    row("F-less-the-maximum-of-the-heads", after(lambda a: a - a.amax(1, keepdim=True))),
    row("F-less-twice-the-maximum", after(lambda a: a - 2 * a.amax(-1, keepdim=True)), held=False),
    row("F-maximum-less", after(lambda a: a.amax(-1, keepdim=True) - a)),
    row(
        "F-less-the-maximum",
        logits(lambda a, i, j: (lambda m: m - m.amax(-1, keepdim=True))(a.masked_fill(j > i, -1e9))),
        held=True,
    ),
    row("F-less-the-mean", after(lambda a: a - a.mean(-2, keepdim=True))),
    row("F-softmax-over-queries", over_queries),
    row("F-softmax-over-heads", logits(lambda a, i, j: a.masked_fill(j > i, -1e9).softmax(1))),
    row("F-divided-by-the-norm", after(lambda a: a / a.norm(dim=-1, keepdim=True))),
    row("F-squared", after(lambda a: a.square())),
    row("F-negative", negative),
    row("F-divided-the-other-way", after(lambda a: 1 / (a + 9))),
    row("F-capped", after(lambda a: 2 * (a / 2).tanh()), held=True),
    row("F-capped-twice", after(lambda a: 2 * (a / 2).tanh().tanh())),
    row("F-rounded-to-bfloat16", after(lambda a: a.bfloat16().float())),
    row("F-cast-to-int", after(lambda a: (4 * a).to(torch.int32).float())),
    row("F-probabilities-masked", of_probabilities(lambda p, m: p * (p > 0.2)), pieces=STEPS),
    row("F-probabilities-normalised-again", of_probabilities(lambda p, m: p / (p.sum(-1, keepdim=True) + 0.5))),
    row("F-probabilities-scaled", of_probabilities(lambda p, m: p * 0.5)),
    row("F-probabilities-rounded", of_probabilities(lambda p, m: p.bfloat16().float())),
    row(
        "F-is-causal-and-one-query",
        lambda q, k, v, i, j: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        pieces=STEPS,
    ),
    row("F-a-bool-and-a-float-mask", [given, grown_bias], inputs={"m": whole, "b": biased}, pieces=STEPS),
    row(
        "F-a-float-and-a-bool-mask",
        [given, grown_bias],
        inputs={"m": biased, "b": whole},
        pieces=(5, 1, 1, 1),
    ),
    row(
        "F-masks-of-a-fixed-length",
        [given, grown_bias],
        inputs={"m": whole, "b": biased},
        pieces=(5, 1),
    ),
    row("F-a-mask-from-the-caller", given, inputs={"m": whole}, held=True),
    row("F-positions-relative-to-the-query", relative_to_the_query, held=True),
    row("F-positions-relative-to-the-query-and-turned", relative_and_turned, held=True),
    row("F-mask-added-twice", logits(lambda a, i, j: a + additive(causal(i, j), -1e9) - 0.1 * j - 0.1 * j)),
]


def both_ways(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Attend twice on one cache, the second time with keys and values exchanged."""
    return plain(q, k, v, i, j) + plain(q, v, k, i, j)


def exchanged(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return plain(q, v, k, i, j)


def values_only(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return plain(q, k, k, i, j) + 0 * plain(q, k, v, i, j)


def second_call_on_other_heads(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return plain(q, k, v, i, j) + plain(q, k[:, [1, 0]], v[:, [1, 0]], i, j)


def grouped(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(i, j), enable_gqa=True)


def by_groups(order: str) -> Attend:
    """Return attention that splits query heads into groups, in an order of "bhgqd", by equations with shared keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sizes = (k.shape[1], -1) if order.index("h") < order.index("g") else (-1, k.shape[1])
        read = order[:-1] + "s"
        a = torch.einsum(f"{order},bhsd->{read}", (q * DIM**-0.5).unflatten(1, sizes), k)
        probs = torch.where(causal(i, j)[0], a, -1e4).softmax(-1)
        return torch.einsum(f"{read},bhsd->{order}", probs, v).flatten(1, 2)

    return attend


def without_the_first(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:], attn_mask=causal(i, j[1:]))


def mixed(x: Tensor) -> Tensor:
    """Mix heads and tokens by a view."""
    rows, count, tokens, dim = x.shape
    return x.reshape(rows, tokens, count, dim).transpose(1, 2)


def spread(x: Tensor) -> Tensor:
    """Repeat heads from [B, 2, S, D] to [B, 4, S, D], as many models do."""
    rows, count, tokens, dim = x.shape
    return x[:, :, None].expand(rows, count, 2, tokens, dim).reshape(rows, 2 * count, tokens, dim)


def tiled(x: Tensor) -> Tensor:
    """Tile heads from [B, 2, S, D] to [B, 4, S, D]."""
    rows, count, tokens, dim = x.shape
    return x[:, None].expand(rows, 2, count, tokens, dim).reshape(rows, 2 * count, tokens, dim)


GROUPED = {"heads": 4, "kv_heads": 2}

HEADS = [
    row("G-heads-exchanged", heads(lambda x: x[:, [1, 0]])),
    row("G-heads-exchanged-by-a-tensor", heads(lambda x: x[:, torch.tensor([1, 0])])),
    row("G-heads-exchanged-by-index-select", heads(lambda x: x.index_select(1, torch.tensor([1, 0])))),
    row("G-heads-flipped", heads(lambda x: x.flip(1))),
    row("G-heads-rolled", heads(lambda x: x.roll(1, 1))),
    row("G-heads-joined-the-other-way", heads(lambda x: torch.cat([x[:, 1:], x[:, :1]], 1))),
    row("G-first-head-for-all", heads(lambda x: x[:, :1].expand(-1, 2, -1, -1))),
    row("G-last-head-for-all", heads(lambda x: x[:, 1:].expand(-1, 2, -1, -1))),
    row("G-every-second-head", heads(lambda x: x[:, ::2].repeat_interleave(2, 1)), model={"heads": 4}),
    row("G-tiled-by-repeat", heads(lambda x: x.repeat(1, 2, 1, 1)), model=GROUPED),
    row("G-tiled-by-expand", heads(tiled), model=GROUPED),
    row("G-tiled-by-cat", heads(lambda x: torch.cat([x, x], 1)), model=GROUPED),
    row("G-uneven-groups", heads(lambda x: x[:, [0, 0, 0, 1]]), model=GROUPED),
    row("G-even-groups-by-a-list", heads(lambda x: x[:, [0, 0, 1, 1]]), model=GROUPED),
    row(
        "G-uneven-groups-by-repeats",
        heads(lambda x: x.repeat_interleave(torch.tensor([3, 1]), 1, output_size=4)),
        model=GROUPED,
    ),
    row("G-rows-exchanged", heads(lambda x: x[[1, 0]])),
    row(
        "G-rows-exchanged-that-hold-different-tokens",
        lambda q, k, v, i, j, p: sdpa(lambda i, j: causal(i, j) & keys(p).bool())(q, k[[1, 0]], v[[1, 0]], i, j),
        inputs={"p": seen(SECOND)},
        real=seen(SECOND),
        pieces=(1, 1, 1),
    ),
    row("G-first-row-for-all", heads(lambda x: x[:1].expand(2, -1, -1, -1))),
    row("G-heads-and-tokens-mixed", heads(mixed)),
    row("G-keys-and-values-exchanged", exchanged),
    row("G-keys-and-values-exchanged-in-a-second-call", both_ways),
    row("G-heads-exchanged-in-a-second-call", second_call_on_other_heads),
    row("G-keys-as-values", values_only),
    row("G-cast-to-int-and-back", heads(lambda x: x.to(torch.int32).to(torch.float32))),
    row("G-cast-to-bfloat16-and-back", heads(lambda x: x.bfloat16().float())),
    row("G-dims-exchanged", lambda q, k, v, i, j: plain(q, k[..., [4, 5, 6, 7, 0, 1, 2, 3]], v, i, j)),
    row("G-without-the-first-token", without_the_first, real=new(torch.tensor([[0] + [1] * 10] * 2))),
    row("G-interleaved", heads(lambda x: x.repeat_interleave(2, 1)), model=GROUPED, held=True),
    row("G-expanded-and-reshaped", heads(spread), model=GROUPED, held=True),
    row("G-one-head-expanded", heads(lambda x: x.expand(-1, 4, -1, -1)), model={"heads": 4, "kv_heads": 1}, held=True),
    row("G-enable-gqa", grouped, model=GROUPED, held=True),
    row("G-groups-by-equations", by_groups("bhgqd"), model=GROUPED, held=True),
    row("G-groups-by-equations-of-other-heads", by_groups("bghqd"), model=GROUPED),
    row("G-groups-by-equations-of-one-head", by_groups("bhgqd"), model={"heads": 4, "kv_heads": 1}, held=True),
]


def broken(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Break the graph after attention."""
    out = plain(q, k, v, i, j)
    torch._dynamo.graph_break()
    return out * 2


def broken_before(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Break the graph between the cache update and attention."""
    torch._dynamo.graph_break()
    return plain(q, k, v, i, j)


class Broken(Small):
    """A model with a graph break after the layers, after which it makes the cache."""

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, **inputs)
        torch._dynamo.graph_break()
        return x * 2, present


@torch.compiler.disable
def stored(past: Any, k: Tensor, v: Tensor) -> Any:
    """Append to the cache outside graphs."""
    return (k, v) if past is None else (torch.cat([past[0], k], -2), torch.cat([past[1], v], -2))


class StoredElsewhere(Small):
    """A model that attends to its cache and the new tokens, and stores them after a graph break."""

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        out, k, v = self.attended(ids, past)
        return out, [stored(past and past[0], k, v)]

    def attended(self, ids: Tensor, past: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the new keys and values."""
        x, count = self.embed(ids), ids.shape[1]
        q, k, v = self.project[0](x).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        all_k, all_v = (k, v) if past is None else (torch.cat([past[0][0], k], -2), torch.cat([past[0][1], v], -2))
        i = torch.arange(all_k.shape[2] - count, all_k.shape[2])[:, None]
        out = plain(q, all_k, all_v, i, torch.arange(all_k.shape[2]))
        return out.transpose(1, 2).flatten(2), k, v


class StoredLate(StoredElsewhere):
    """A model that stores in a compiled frame, with a graph break only before that frame."""

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        out, k, v = self.attended(ids, past)
        torch._dynamo.graph_break()
        kept = (k, v) if past is None else (torch.cat([past[0][0], k], -2), torch.cat([past[0][1], v], -2))
        return out, [kept]


class BrokenBefore(Small):
    """A model with a graph break before the cache update, and with padded attention."""

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        x, count = self.embed(ids), ids.shape[1]
        q, k, v = self.project[0](x).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        torch._dynamo.graph_break()
        if past is not None:
            k, v = torch.cat([past[0][0], k], -2), torch.cat([past[0][1], v], -2)
        i = torch.arange(k.shape[2] - count, k.shape[2])[:, None]
        out = self.attends[0](q, k, v, i, torch.arange(k.shape[2]), **inputs)
        return out.transpose(1, 2).flatten(2), [(k, v)]


class BrokenInALayer(Small):
    """A model with a graph break after attention, inside a layer that another frame calls."""

    def layer(self, x: Tensor, past: Any, **inputs: Any) -> Any:
        q, k, v = self.project[0](x).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        if past is not None:
            k, v = torch.cat([past[0][0], k], -2), torch.cat([past[0][1], v], -2)
        i = torch.arange(k.shape[2] - x.shape[1], k.shape[2])[:, None]
        out = self.attends[0](q, k, v, i, torch.arange(k.shape[2]), **inputs)
        torch._dynamo.graph_break()
        return out.transpose(1, 2).flatten(2) * 2, [(k * 1, v * 1)]

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        return self.layer(self.embed(ids), past, **inputs)


class KeptAs(Small):
    """A model with one layer whose cache has another layout: pack(k, v) returns tensors that grow along `dim`."""

    def __init__(self, pack: Any, unpack: Any, dim: int, broken: bool = False) -> None:
        super().__init__(plain)
        self.pack, self.unpack, self.dim, self.broken = pack, unpack, dim, broken

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        x, count = self.embed(ids), ids.shape[1]
        q, k, v = self.project[0](x).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(3, 1)
        kept = self.pack(k, v)
        if past is not None:
            kept = tuple(torch.cat([old, new], self.dim) for old, new in zip(past[0], kept, strict=True))
        k, v = self.unpack(kept)
        j = torch.arange(k.shape[2])
        out = plain(q, k, v, j[-count:, None], j)
        if self.broken:
            torch._dynamo.graph_break()
        return out.transpose(1, 2).flatten(2), [tuple(part * 1 for part in kept) if self.broken else kept]


class Stacked(Small):
    """A model that stacks K and V of a layer in one tensor after attention."""

    broken = False

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        x, present = super().forward(ids, past and [tuple(layer) for layer in past], **inputs)
        if self.broken:
            torch._dynamo.graph_break()
        return x, [torch.stack(pair) for pair in present]


class StackedAfterABreak(Stacked):
    """A model that stacks K and V in another graph."""

    broken = True


def kept_as(name: str, *how: Any, held: bool = False) -> Row:
    return Row(name, lambda: Case(KeptAs(*how)), held=held)


def of_class(name: str, kind: type[Small], attend: Attend = plain, **how: Any) -> Row:
    return Row(name, lambda: Case(kind(attend), **how))


def hidden(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    return causal(i, j) & keys(p).bool()


def swapped(past: Any) -> Any:
    return [(v, k) for k, v in past]


def first_for_all(past: Any) -> Any:
    return [past[0] for _ in past]


def layers_exchanged(past: Any) -> Any:
    return past[::-1]


HANDLES = [
    row("H-float64", plain, model={"dtype": torch.float64}),
    row("H-bfloat16", plain, model={"dtype": torch.bfloat16}, held=True),
    row("H-graph-break-after-attention", broken),
    row("H-graph-break-before-attention", broken_before),
    of_class("H-graph-break-before-the-end", Broken),
    of_class("H-graph-break-before-the-cache", BrokenBefore),
    of_class("H-graph-break-padded", BrokenBefore, sdpa(hidden), inputs={"p": seen(LEFT)}, real=seen(LEFT)),
    of_class("H-graph-break-in-a-layer", BrokenInALayer),
    of_class("H-cache-stacked", Stacked),
    of_class("H-cache-stacked-after-a-graph-break", StackedAfterABreak),
    kept_as("H-cache-in-one-tensor", lambda k, v: (torch.cat([k, v], -1),), lambda kept: kept[0].chunk(2, -1), -2),
    kept_as("H-cache-heads-in-one-tensor", lambda k, v: (torch.cat([k, v], 1),), lambda kept: kept[0].chunk(2, 1), 2),
    kept_as(
        "H-cache-of-transposed-keys",
        lambda k, v: (k.mT, v.mT),
        lambda kept: (kept[0].mT, kept[1].mT),
        -1,
    ),
    kept_as(
        "H-cache-with-heads-last",
        lambda k, v: (k.transpose(1, 2), v.transpose(1, 2)),
        lambda kept: (kept[0].transpose(1, 2), kept[1].transpose(1, 2)),
        1,
        held=True,
    ),
    kept_as(
        "H-cache-of-three-dimensions",
        lambda k, v: (k.flatten(0, 1), v.flatten(0, 1)),
        lambda kept: tuple(part.unflatten(0, (2, -1)) for part in kept),
        1,
    ),
    kept_as(
        "H-cache-of-joined-heads",
        lambda k, v: (k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)),
        lambda kept: tuple(part.unflatten(2, (2, -1)).transpose(1, 2) for part in kept),
        1,
    ),
    kept_as("H-cache-changed-after-a-graph-break", lambda k, v: (k, v), lambda kept: kept, 2, True),
    of_class("H-cache-grown-outside-of-graphs", StoredElsewhere),
    of_class("H-cache-grown-after-a-graph-break", StoredLate),
    row("H-graph-break-in-two-layers", broken, model={"layers": 2}),
    row("H-keys-and-values-handed-over-exchanged", plain, edits={2: Edit(swapped)}, late=True),
    row(
        "H-first-layer-for-both",
        plain,
        model={"layers": 2},
        edits={2: Edit(first_for_all)},
        late=True,
    ),
    row("H-layers-exchanged", plain, model={"layers": 2}, edits={2: Edit(layers_exchanged)}, late=True),
    row(
        "H-keys-of-one-layer-and-values-of-another",
        plain,
        model={"layers": 2},
        edits={2: Edit(lambda past: [(past[0][0], past[1][1]), (past[1][0], past[0][1])])},
        late=True,
    ),
]


def in_autocast(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(i, j)).float()


def model_in_autocast(model: Any) -> Callable[..., Any]:
    def call(*args: Any, **inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*args, **inputs)

    return call


def scaled_values(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return plain(q, k, v * (1 + 0.1 * j)[:, None], i, j)


def half_of_the_keys(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[..., :4], k[..., :4], v, attn_mask=causal(i, j))


def half_of_the_values(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return F.pad(F.scaled_dot_product_attention(q, k, v[..., :4], attn_mask=causal(i, j)), (0, 4))


def filled(a: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return a.masked_fill(mask=j > i, value=-torch.inf)


def einsum(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
    a = torch.einsum("bhqd,bhkd->bhqk", q, k) * DIM**-0.5
    return torch.einsum("bhqk,bhkd->bhqd", a.masked_fill(j > i, -torch.inf).softmax(-1), v)


WIDE_TABLE = torch.linspace(-1, 1, 16).repeat(2, 1) * torch.tensor([[1.0], [2.0]])

OTHERS = [
    masked("I-mask-of-two-dimensions", lambda i, j: j <= i, held=True),
    masked("I-mask-of-three-dimensions", lambda i, j: (j <= i)[None], held=True),
    masked(
        "I-mask-of-three-dimensions-by-head", lambda i, j: (j <= i) & (i - j < torch.tensor([3, 99])[:, None, None])
    ),
    masked("I-additive-mask-of-two-dimensions", lambda i, j: additive(j <= i), held=True),
    row("I-mask-of-two-dimensions-spelled-out", logits(lambda a, i, j: a + additive(j <= i, -torch.inf)), held=True),
    row("I-masked-fill-by-name", logits(filled), held=True),
    row("I-softmax-of-torch", logits(lambda a, i, j: a.masked_fill(j > i, -torch.inf) * 1), held=True),
    row("I-einsum", einsum),
    row("I-values-scaled-by-position", scaled_values),
    row("I-half-of-the-head-dim-of-keys", half_of_the_keys),
    row("I-half-of-the-head-dim-of-values", half_of_the_values),
    row("I-autocast-inside", in_autocast, within=torch.bfloat16),
    row("I-autocast-outside", plain, wrap=model_in_autocast, within=torch.bfloat16),
    masked(
        "I-bias-table-of-the-size-of-a-column",
        lambda i, j, table: additive(causal(i, j)) + table[:, (i - j).clamp(0, 5)],
        model={"tables": {"table": TABLE}},
    ),
    masked(
        "I-bias-table-by-key",
        lambda i, j, table: additive(causal(i, j)) + table[:, j][:, None],
        model={"tables": {"table": WIDE_TABLE}},
    ),
    masked(
        "I-bias-table-cut-to-the-keys",
        lambda i, j, table: additive(causal(i, j)) + table[:, None, : j.shape[0]],
        model={"tables": {"table": WIDE_TABLE}},
    ),
    weighted("I-topk", lambda w: (w >= w.topk(3, -1).values[:, -1:]).float() * 2),
    weighted("I-sort", lambda w: w.sort(-1).values),
    weighted("I-argsort", lambda w: w.argsort(-1).float() * 0.2),
    masked(
        "I-searchsorted",
        lambda i, j: causal(i, j) & (torch.searchsorted(PICKED, j, right=True) > 0),
    ),
    masked("I-bucketize", lambda i, j: additive(causal(i, j)) + torch.bucketize(i - j, PICKED) * 0.3),
    masked(
        "I-gather",
        lambda i, j, w: additive(causal(i, j)) + keys(w.gather(1, (j // 2).expand(2, -1))),
        inputs={"w": seen(WEIGHTS)},
    ),
    masked(
        "I-gather-at-the-key",
        lambda i, j, w: additive(causal(i, j)) + keys(w.gather(1, j.expand(2, -1))),
        inputs={"w": seen(WEIGHTS)},
    ),
    masked(
        "I-index-select",
        lambda i, j, w: additive(causal(i, j)) + keys(w.index_select(1, j // 2)),
        inputs={"w": seen(WEIGHTS)},
    ),
    masked(
        "I-index-select-at-the-key",
        lambda i, j, w: additive(causal(i, j)) + keys(w.index_select(1, j)),
        inputs={"w": seen(WEIGHTS)},
    ),
    masked(
        "I-looked-up-at-half-the-key",
        lambda i, j, w: additive(causal(i, j)) + keys(w[:, j // 2]),
        inputs={"w": seen(WEIGHTS)},
    ),
    masked(
        "I-take-along-dim",
        lambda i, j, w: additive(causal(i, j)) + keys(torch.take_along_dim(w, (j // 2)[None], 1)),
        inputs={"w": seen(WEIGHTS)},
    ),
    masked("I-one-hot", lambda i, j: additive(causal(i, j)) + F.one_hot(j % 3, 3)[:, 1] * 0.7),
    masked("I-tril", lambda i, j: torch.ones(j.shape[0], j.shape[0], dtype=torch.bool).tril()[-i.shape[0] :]),
    masked("I-triu-diagonal", lambda i, j: torch.ones(i.shape[0], j.shape[0]).triu(j.shape[0] - i.shape[0] + 1) == 0),
]


def rows_of(pick: Callable[[Tensor], Tensor], rows: tuple[int, ...]) -> dict[str, Any]:
    """Pick rows of a cache after the second call."""
    return {"edits": {2: Edit(lambda past: [(pick(k), pick(v)) for k, v in past], rows)}, "model": {"layers": 2}}


class Crossed(Small):
    """A model that attends to an encoder's output [B, E, H * D] after attention to the cache."""

    def __init__(self, attend: Attend, **how: Any) -> None:
        super().__init__(attend, **how)
        self.cross = torch.nn.Linear(self.heads * DIM, 2 * self.heads * DIM)

    def forward(self, ids: Tensor, past: Any = None, *, encoded: Tensor, visible: Tensor, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, **inputs)
        k, v = self.cross(encoded).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(2, 1)
        q = x.unflatten(-1, (-1, DIM)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :].bool())
        return x + seen.transpose(1, 2).flatten(2), present


class CrossedFirst(Crossed):
    """A model that attends to the encoder first, with one mask for both."""

    def forward(self, ids: Tensor, past: Any = None, *, encoded: Tensor, visible: Tensor, **inputs: Any) -> Any:
        x = self.embed(ids)
        k, v = self.cross(encoded).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(2, 1)
        q = x.unflatten(-1, (-1, DIM)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :].bool())
        y, present = super().forward(ids, past, encoded=encoded, visible=visible, **inputs)
        return y + seen.transpose(1, 2).flatten(2), present


class CrossedCached(Crossed):
    """A model that keeps the projected encoder output next to the cache, like encoder-decoder models."""

    def forward(self, ids: Tensor, past: Any = None, *, encoded: Tensor, visible: Tensor, **inputs: Any) -> Any:
        x, present = Small.forward(self, ids, past and past[:1], **inputs)
        k, v = past[1] if past else self.cross(encoded).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(2, 1)
        q = x.unflatten(-1, (-1, DIM)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :].bool())
        return x + seen.transpose(1, 2).flatten(2), [*present, (k, v)]


class CrossedCachedOpen(Crossed):
    """A model that keeps the projected encoder output and hides none of it."""

    def forward(self, ids: Tensor, past: Any = None, *, encoded: Tensor, visible: Tensor, **inputs: Any) -> Any:
        x, present = Small.forward(self, ids, past and past[:1], **inputs)
        k, v = past[1] if past else self.cross(encoded).unflatten(-1, (-1, DIM)).transpose(1, 2).chunk(2, 1)
        q = x.unflatten(-1, (-1, DIM)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), [*present, (k, v)]


def crossed(name: str, kind: type[Crossed], length: int, pieces: tuple[int, ...] = (5, 1, 1, 1)) -> Row:
    """Return a row with cross-attention to as many tokens as are seen at some step."""

    def make() -> Case:
        model = kind(sdpa(lambda i, j, p: causal(i, j) & keys(p).bool()))
        encoded = torch.randn(2, length, 2 * DIM, generator=torch.Generator().manual_seed(1))
        visible = torch.ones(2, length, dtype=torch.int64)
        visible[1, -2:] = 0
        inputs = {"encoded": always(encoded), "visible": always(visible), "p": seen(LEFT)}
        return Case(model, inputs, pieces, real=seen(LEFT), grown=1)

    return Row(name, make, held=True)


PROMISED = [
    row("J-rows-by-a-slice", plain, **rows_of(lambda x: x[0:1], (0,)), held=True),
    row("J-rows-by-a-slice-from-behind", plain, **rows_of(lambda x: x[-1:], (1,)), held=True),
    row("J-rows-by-a-slice-and-all-else", plain, **rows_of(lambda x: x[0:1, :, :], (0,)), held=True),
    row("J-rows-by-a-list", plain, **rows_of(lambda x: x[[1, 0]], (1, 0)), held=True),
    row("J-rows-by-a-longer-list", plain, **rows_of(lambda x: x[[1, 0, 1]], (1, 0, 1)), held=True),
    row("J-rows-by-a-boolean-mask", plain, **rows_of(lambda x: x[torch.tensor([False, True])], (1,)), held=True),
    row("J-rows-by-booleans", plain, **rows_of(lambda x: x[[True, False]], (0,)), held=True),
    row("J-rows-by-an-index-made-anew", plain, **rows_of(lambda x: x[torch.tensor([1, 1])], (1, 1)), held=True),
    row(
        "J-rows-by-index-select-made-anew",
        plain,
        **rows_of(lambda x: x.index_select(0, torch.tensor([1, 0])), (1, 0)),
        held=True,
    ),
    row(
        "J-rows-by-the-function-made-anew",
        plain,
        **rows_of(lambda x: torch.index_select(x, 0, torch.tensor([1])), (1,)),
        held=True,
    ),
    row("J-rows-repeated", plain, **rows_of(lambda x: x.repeat_interleave(2, 0), (0, 0, 1, 1)), held=True),
    row(
        "J-rows-repeated-by-a-tensor",
        plain,
        **rows_of(lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0), (0, 1, 1)),
        held=True,
    ),
    crossed("J-cross-attention-as-long-as-a-step", Crossed, 6),
    crossed("J-cross-attention-as-long-as-the-next-step", Crossed, 7),
    crossed("J-cross-attention-as-long-as-the-prompt", Crossed, 5),
    crossed("J-cross-attention-cached-as-long-as-the-prompt", CrossedCached, 5),
    crossed("J-cross-attention-cached-as-long-as-a-step", CrossedCached, 6),
    crossed("J-cross-attention-cached-and-open", CrossedCachedOpen, 5),
    crossed("J-cross-attention-cached-of-another-length", CrossedCached, 4),
    crossed("J-cross-attention-first", CrossedFirst, 6),
    crossed("J-cross-attention-as-long-as-a-chunk", Crossed, 9, (5, 1, 3, 1)),
]


# -- models of transformers --------------------------------------------------------------------------------


def llama(model: Any) -> Callable[..., Any]:
    """Wrap a language model of transformers as a call."""

    def call(ids: Tensor, past: Any, **inputs: Any) -> Any:
        out = model(ids, past_key_values=past, use_cache=True, **inputs)
        return out.logits, out.past_key_values

    return call


def of_llama(name: str, *, held: bool = False, **how: Any) -> Row:
    def make() -> Case:
        return Case(build("Llama"), **{"wrap": llama, "vocabulary": 128, "pieces": (5, 1, 1, 1), **how})

    return Row(name, make, held)


def real_positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def on_layers(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """Change each layer of a cache."""

    def apply(cache: Any) -> Any:
        for layer in cache.layers:
            layer.keys, layer.values = change(layer.keys, layer.values)
        return cache

    return apply


def one_layer_for_all(cache: Any) -> Any:
    for layer in cache.layers[1:]:
        layer.keys, layer.values = cache.layers[0].keys, cache.layers[0].values
    return cache


def broken_llama(where: str) -> Case:
    """Return a case with a graph break before a part of each layer."""
    model = build("Llama")
    for layer in model.model.layers:
        layer.get_submodule(where).register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    return Case(model, pieces=(5, 1, 1, 1), wrap=llama, vocabulary=128)


HIDDEN = torch.tensor([[1, 0, 0] + [1] * 8, [0, 1, 1, 0] + [1] * 7])

OF_THEIRS = [
    of_llama(
        "K-llama-padded",
        inputs={"attention_mask": seen(LEFT), "position_ids": new(real_positions(LEFT))},
        real=seen(LEFT),
        held=True,
    ),
    of_llama("A-llama-hides-held-tokens-later", inputs={"attention_mask": later(NONE, HIDDEN, 6)}, late=True),
    of_llama(
        "A-llama-hides-a-whole-prompt-later",
        inputs={"attention_mask": later(NONE, torch.tensor([[0] * 5 + [1] * 6, [1] * 11]), 5)},
        late=True,
    ),
    of_llama(
        "A-llama-shows-padding-later",
        inputs={"attention_mask": later(LEFT, NONE, 6), "position_ids": new(real_positions(LEFT))},
        real=later(LEFT, NONE, 6),
        late=True,
    ),
    of_llama(
        "A-llama-hides-and-goes-on-in-a-chunk",
        inputs={"attention_mask": later(NONE, HIDDEN, 6)},
        pieces=(5, 1, 3, 1),
        late=True,
    ),
    of_llama("H-llama-keys-and-values-exchanged", edits={2: Edit(on_layers(lambda k, v: (v, k)))}, late=True),
    of_llama("H-llama-one-layer-for-both", edits={2: Edit(one_layer_for_all)}, late=True),
    Row("H-llama-graph-break-in-mlp", lambda: broken_llama("mlp"), slow=True),
    Row("H-llama-graph-break-in-o-proj", lambda: broken_llama("self_attn.o_proj"), slow=True),
    of_llama("J-llama-rows-by-a-slice", edits={2: Edit(on_layers(lambda k, v: (k[0:1], v[0:1])), (0,))}, held=True),
    of_llama(
        "J-llama-rows-by-a-list", edits={2: Edit(on_layers(lambda k, v: (k[[1, 0]], v[[1, 0]])), (1, 0))}, held=True
    ),
    of_llama("B-llama-adopted-padded", inputs={"attention_mask": seen(LEFT)}, real=seen(LEFT), uncompiled=1),
]

KEPT = [
    row("K-plain", plain, held=True),
    row("K-plain-two-layers", plain, model={"layers": 2}, held=True),
    row("K-rotary", plain, model={"rotary": "[q, 1]"}, held=True),
    row("K-one-token-prompt", plain, pieces=(1, 1, 1, 3), held=True),
    padded("K-padding-on-the-left", lambda i, j, p: causal(i, j) & keys(p).bool(), held=True),
    padded("K-padding-greater-than-zero", lambda i, j, p: causal(i, j) & (keys(p) > 0), held=True),
    padded("K-padding-not-zero", lambda i, j, p: causal(i, j) & (keys(p) != 0), held=True),
    padded("K-padding-is-one", lambda i, j, p: causal(i, j) & (keys(p) == 1), held=True),
    padded("K-padding-looked-up", lambda i, j, p: causal(i, j) & p[:, j][:, None, None].bool(), held=True),
    padded("K-padding-additive", lambda i, j, p: additive(causal(i, j) & keys(p).bool()), held=True),
    padded(
        "K-padding-on-the-right",
        lambda i, j, p: causal(i, j) & keys(p).bool(),
        inputs={"p": seen(RIGHT)},
        real=seen(RIGHT),
        held=True,
    ),
    padded(
        "K-padding-in-a-chunk",
        lambda i, j, p: causal(i, j) & keys(p).bool(),
        inputs={"p": seen(BETWEEN)},
        real=seen(BETWEEN),
        held=True,
    ),
    masked("K-alibi", lambda i, j: additive(causal(i, j)) + SLOPES * (j - i), held=True),
]

ROWS = [
    *PER_TOKEN, *PADDING, *UNSEEN, *CHUNKS, *OVER_KEYS, *LOGITS, *HEADS, *HANDLES, *OTHERS, *PROMISED, *OF_THEIRS, *KEPT
]  # fmt: skip


HELD = verdicts.recorded()


def parameter(case: Row) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])


@pytest.mark.few(18)  # `make slow` runs the others
@pytest.mark.some(48)
@pytest.mark.parametrize("case", [parameter(row) for row in ROWS])
def test_held_or_refused(case: Row) -> None:
    """Check the verdict of each row; one that is equal and was not before belongs into the record."""
    verdict = judge(case.make())
    assert verdict.kind == ("held" if case.held or case.name in HELD else "refused"), verdict


@pytest.mark.slow
@pytest.mark.some(8)
@pytest.mark.parametrize("case", [parameter(row) for row in ROWS])
def test_held_or_refused_under_other_policies(case: Row) -> None:
    policy = ("streaming", "h2o")[ROWS.index(case) % 2]
    verdict = judge(case.make(), policy, positions="absolute")
    assert verdict.kind in (("held",) if case.held else ("held", "refused")), verdict


LATE_START = torch.tensor([[1] * 11, [0] + [1] * 10])


@pytest.mark.few(2)
@pytest.mark.parametrize("padding", [NONE, LATE_START], ids=["unpadded", "padded"])
@pytest.mark.parametrize("pieces", [(5, 1, 3), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("shape", INDICES)
def test_ranks_instead_of_indices_of_any_shape(shape: str, pieces: tuple[int, ...], padding: Tensor) -> None:
    """Check B: ranks are counted in each row, so an index must have a dimension for rows."""
    model = Small(sdpa(lambda i, j, p: causal(i, j) & keys(p).bool()), rotary=shape)
    verdict = judge(Case(model, {"p": seen(padding)}, pieces, real=seen(padding)), "streaming", positions="cache")
    # If a row begins with a call of padding only, the first position of its first real token is unknown.
    begins_late = shape == "[1, 1, q, 1]" and padding is LATE_START and pieces[0] == 1
    held = shape in ("[1, 1, q, 1]", "[B, 1, q, 1]") and not begins_late
    assert verdict.kind == ("held" if held else "refused"), verdict


def masked_in_prompts(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    return causal(i, j) & keys(p).bool() if i.shape[0] > 1 else causal(i, j)


def test_padding_that_a_prompt_hides_and_a_step_shows() -> None:
    """Check B with LED's decoder: its next token attends to padding that the cache omits."""
    verdict = judge(Case(Small(sdpa(masked_in_prompts)), {"p": seen(LATE_START)}, (5, 1, 1), real=seen(LATE_START)))
    assert verdict.kind == "refused", verdict
    assert "hides it too" in verdict.detail


# -- other checks than comparing two runs ------------------------------------------------------------------

OWN_POSITIONS = {
    "doubled": torch.arange(11)[None] * 2,
    "from-five": torch.arange(11)[None] + 5,
    "begun-anew": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]),
    "backwards": 20 - torch.arange(11)[None],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("real_positions", OWN_POSITIONS)
def test_position_ids_of_the_user_are_not_replaced(real_positions: str) -> None:
    """Check H: the user's position ids hold while nothing is evicted, even if they are not ranks."""
    inputs = {"position_ids": new(OWN_POSITIONS[real_positions].expand(2, -1))}
    case = Case(build("Llama"), inputs, (5, 1, 1, 3), wrap=llama, vocabulary=128)
    verdict = judge(case, "streaming", positions="cache")
    assert verdict.kind in ("held", "refused"), str(verdict)


@pytest.mark.slow  # the default run has another case in tests/runtime/test_sizes.py
@torch.no_grad()
def test_guidance_after_beams_on_a_padded_model() -> None:
    """Check J: `generate` with guidance_scale, on a model that beams have run on."""
    ids, mask = prompt(2, 6, (2, 0))
    ours, theirs = kvpass.compile(build("Llama"), "full", inner="eager"), build("Llama")
    made = []
    for model in (ours, theirs):
        model.generation_config.eos_token_id = None
        how = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
            beams = model.generate(ids, num_beams=2, **how)
            made.append((beams, model.generate(ids, guidance_scale=1.5, **how)))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


# -- the judge itself --------------------------------------------------------------------------------------


def test_the_judge_finds_a_wrong_number() -> None:
    """Judge a model that computes something else when it is compiled."""

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return plain(q, k, v, i, j) * (1.001 if torch.compiler.is_compiling() else 1.0)

    verdict = judge(Case(Small(attend)))
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith("call 0: off by")


def test_the_judge_finds_an_error_of_others() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return plain(q, k, v, i, j) + (torch.zeros(()) if not torch.compiler.is_compiling() else torch.zeros(99))

    assert judge(Case(Small(attend))).kind == "foreign"


def test_the_judge_takes_a_refusal_that_names_its_line() -> None:
    verdict = judge(Case(Small(plain, grow=lambda past, new: torch.cat([past.flip(-2), new.flip(-2)], -2).flip(-2))))
    assert verdict.kind == "refused"
    assert "adversary/models.py:" in verdict.detail


def test_names_are_unique() -> None:
    assert len({case.name for case in ROWS}) == len(ROWS)


def test_every_case_fits_the_largest_budget() -> None:
    assert all(sum(case.make().pieces) < ROOM for case in ROWS)
