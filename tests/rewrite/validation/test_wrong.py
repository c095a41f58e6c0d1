"""Test validation in lockstep: wrong rewrites of every kind are refused, and a chaotic model is not.

Attention of both graphs starts from equal inputs and is compared with the same call in double precision. Masks are
compared bit by bit, and the conversations reach both sides of every constant of the graph. So no wrong mask, position,
scale, head or row passes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache import chunk_step
from kvpass.cache import step as layer_step
from kvpass.capture import canonical, capture
from kvpass.fx import walk
from kvpass.rewrite.mask_subgraph import MaskSubgraph
from kvpass.rewrite.passes import attention, interface, positions
from kvpass.runtime.recorder import Recorder
from tests.adversary.models import DIM, Small, heads, keys, logits, plain, sdpa, seen
from tests.adversary.oracle import Case, judge
from tests.models import build
from tests.rewrite.test_validate import Rounded, notes, run
from tests.traces import Traced

NOT_THE_MODELS = "is not the model's"
PADDED = seen([[1] * 16, [0] + [1] * 15])


def refused(model: Small, policy: str = "streaming", inputs: Any = None, pieces: Any = (5, 1), **settings: Any) -> bool:
    """True if validation refuses a case."""
    case = Case(model, inputs or {}, pieces=pieces, real=(inputs or {}).get("p"))
    verdict = judge(case, policy, **settings)
    assert verdict.kind == "held" or NOT_THE_MODELS in verdict.detail, verdict
    return verdict.kind == "refused"


def causal(i: Tensor, j: Tensor, **_: Any) -> Tensor:
    return (j <= i)[None, None]


def windowed(i: Tensor, j: Tensor, **_: Any) -> Tensor:
    return ((j <= i) & (j > i - 6))[None, None]


def with_padding(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    return (j <= i) & keys(p).bool()


def with_bias(a: Tensor, i: Tensor, j: Tensor, **_: Any) -> Tensor:
    return a + (j - i) * torch.tensor([0.5, 0.25])[None, :, None, None] + torch.zeros(()).masked_fill(j > i, -1e9)


def with_sink(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, sink: Tensor, **_: Any) -> Tensor:
    a = (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill((j > i)[None, None], -1e9)
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    return torch.cat([a, column], -1).softmax(-1)[..., :-1] @ v


GROUPED = heads(lambda x: x.repeat_interleave(2, 1))


# -- wrong rewrites ------------------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def changed_site(**change: Any) -> Patch:
    """Return a patch that misreads a part of an attention call in rewritten steps, but not in the canonical graph."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        found = capture._site
        monkeypatch.setattr(capture, "_site", lambda *args: dataclasses.replace(found(*args), **change))

    return patch


def mask_of_the_next_key(monkeypatch: pytest.MonkeyPatch) -> None:
    right = MaskSubgraph.on_slots
    monkeypatch.setattr(MaskSubgraph, "on_slots", lambda self, index, *rest: right(self, index + 1, *rest))


def replace_mask(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    """Replace the function that combines masks in steps and chunks."""
    for module in (layer_step, chunk_step):
        monkeypatch.setattr(module, "with_mask", wrong)


def free_slots_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer_step.with_mask
    replace_mask(monkeypatch, lambda live, *others: right(torch.ones_like(live), *others))


def query_heads_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._group_operands

    def exchanged(tensors: Any, counts: Any) -> Any:
        given = right(tensors, counts)
        given["new"][0] = given["new"][0].flip(1)
        return given

    monkeypatch.setattr(attention, "_group_operands", exchanged)


def one_later(made: fx.Node) -> fx.Node:
    with made.graph.inserting_after(made):
        later = made.graph.call_function(operator.add, (made, 1))
    later.meta["example_value"] = walk.example_value(made)
    return later


def length_counts_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    right = interface._length
    monkeypatch.setattr(interface, "_length", lambda step: one_later(right(step)))


def queries_stand_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    right = positions._rank_of_first
    monkeypatch.setattr(positions, "_rank_of_first", lambda step: one_later(right(step)))


WRONG = [
    pytest.param(Small(plain), changed_site(scale=0.4), {}, id="scale"),
    pytest.param(Small(plain, dtype=torch.bfloat16), changed_site(scale=0.4), {}, id="scale-bfloat16"),
    pytest.param(Small(sdpa(windowed)), changed_site(mask=None), {}, id="no mask"),
    pytest.param(Small(sdpa(windowed)), mask_of_the_next_key, {}, id="window off by one"),
    pytest.param(Small(logits(with_bias)), mask_of_the_next_key, {}, id="bias off by one"),
    pytest.param(Small(plain), free_slots_are_seen, {}, id="free slots"),
    pytest.param(Small(GROUPED, heads=4, kv_heads=2), query_heads_exchanged, {}, id="heads"),
    pytest.param(Small(plain, rotary="[q, 1]"), length_counts_one_more, {}, id="position"),
    pytest.param(
        Small(sdpa(with_padding), rotary="[B, 1, q, 1]"),
        queries_stand_one_later,
        dict(positions="cache", inputs={"p": PADDED}),
        id="rank",
    ),
    pytest.param(
        Small(with_sink, tables={"sink": torch.tensor([1.0, 3.0])}), changed_site(sink_logit=None), {}, id="no sink"
    ),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "patch", "settings"), WRONG)
def test_a_wrong_step_is_refused(
    model: Small, patch: Patch, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the case passes without the patch and is refused with it."""
    assert not refused(model, **settings)
    patch(monkeypatch)
    assert refused(model, **settings)


def test_padding_that_is_attended_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small(sdpa(with_padding))
    assert not refused(model, inputs={"p": PADDED})
    free_slots_are_seen(monkeypatch)
    assert refused(model, inputs={"p": PADDED})


def test_a_prompt_whose_heads_are_exchanged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the operator of the canonical graph, which no comparison of canonical graphs would show."""
    monkeypatch.setattr(
        canonical, "_repeat_heads", lambda rows, query: rows.repeat(1, query.shape[1] // rows.shape[1], 1, 1)
    )
    assert refused(Small(GROUPED, heads=4, kv_heads=2), pieces=(5,))


@pytest.mark.parametrize("name", ["scale", "cap"])
def test_a_prompt_that_is_read_wrongly_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the canonical graph is compared with Dynamo's."""
    right = torch.ops.kvpass.attention.default
    from kvpass.capture import capture

    def wrong(graph: fx.Graph, call: Any, attended: Any) -> fx.Node:
        return made(graph, dataclasses.replace(call, **{name: 0.5}), attended)

    made = capture._attend
    monkeypatch.setattr(capture, "_attend", wrong)
    assert refused(Small(logits(lambda a, i, j, **_: a + torch.zeros(()).masked_fill(j > i, -1e9))), pieces=(5,))
    assert right is canonical.ATTENTION


def test_a_window_that_is_wrong_behind_64_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the conversation is longer than the constant 64 and than the slots."""
    model = Small(sdpa(lambda i, j: ((j <= i) & (j > i - 64))[None, None]))
    assert not refused(model)
    right = MaskSubgraph.on_slots

    def wrong(self: MaskSubgraph, index: Tensor, *rest: Any) -> Tensor:
        return right(self, torch.where((index > 0) & (index < 8), index + 1, index), *rest)

    monkeypatch.setattr(MaskSubgraph, "on_slots", wrong)
    assert refused(model)


# -- queries that see no key ---------------------------------------------------------------------------------------


def in_blocks(i: Tensor, j: Tensor, **_: Any) -> Tensor:
    """Mask for earlier tokens in the same block of three."""
    return (j < i) & (j // 3 == i // 3)


def in_pairs(i: Tensor, j: Tensor, **_: Any) -> Tensor:
    return (j < i) & (j // 2 == i // 2)


def in_segments(i: Tensor, j: Tensor, s: Tensor) -> Tensor:
    return (j < i) & (keys(s) == s[:, None, -i.shape[0] :, None])


def in_blocks_and_no_padding(i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    return in_blocks(i, j) & keys(p).bool()


def filled(allowed: Callable[..., Tensor], low: float) -> Any:
    return logits(lambda a, i, j, **inputs: a.masked_fill(~allowed(i, j, **inputs), low))


def added(allowed: Callable[..., Tensor], low: float) -> Any:
    return logits(lambda a, i, j, **inputs: a + torch.zeros(()).masked_fill(~allowed(i, j, **inputs), low))


def by_library(allowed: Callable[..., Tensor], low: float | None = None) -> Any:
    if low is None:
        return sdpa(lambda i, j, **inputs: allowed(i, j, **inputs).view(-1, 1, i.shape[0], j.shape[0]))
    return sdpa(
        lambda i, j, **inputs: (
            torch.zeros(()).masked_fill(~allowed(i, j, **inputs), low).view(-1, 1, i.shape[0], j.shape[0])
        )
    )


def hidden_keys_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return zeros or NaN for a query without visible keys, where the model averages over hidden keys."""
    right = layer_step.with_mask

    def wrong(live: Tensor, mask: Tensor | None, hidden: float | None) -> Any:
        mask, bias = right(live, mask, hidden)
        return (mask, None) if bias is None else (mask & (bias > -1e4), bias)

    replace_mask(monkeypatch, wrong)


def hidden_keys_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Average over hidden keys, where the model returns zeros or NaN."""
    right = layer_step.with_mask

    def wrong(live: Tensor, mask: Tensor | None, hidden: float | None) -> Any:
        mask, bias = right(live, mask, hidden)
        left = torch.where(mask, 0.0 if bias is None else bias, -1e32).clamp_min(-1e32)
        return live, left

    replace_mask(monkeypatch, wrong)


LOWEST = torch.finfo(torch.float32).min
SEGMENTS = {"s": seen([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]])}
BLIND = [
    pytest.param(filled(in_blocks, LOWEST), hidden_keys_are_left_out, {}, id="filled"),
    pytest.param(filled(in_blocks, -1e4), hidden_keys_are_left_out, {}, id="filled-1e4"),
    pytest.param(added(in_blocks, LOWEST), hidden_keys_are_left_out, {}, id="added"),
    pytest.param(added(in_blocks, -1e9), hidden_keys_are_left_out, {}, id="added-1e9"),
    pytest.param(added(in_blocks, -1e4), hidden_keys_are_left_out, {}, id="added-1e4"),
    pytest.param(by_library(in_blocks), hidden_keys_are_averaged, {}, id="library"),
    pytest.param(by_library(in_blocks, -torch.inf), hidden_keys_are_averaged, {}, id="library-infinite"),
    pytest.param(by_library(in_blocks, LOWEST), hidden_keys_are_left_out, {}, id="library-lowest"),
    pytest.param(by_library(in_pairs), hidden_keys_are_averaged, {}, id="library-pairs"),
    pytest.param(by_library(in_segments), hidden_keys_are_averaged, SEGMENTS, id="library-segments"),
    pytest.param(filled(in_segments, -1e9), hidden_keys_are_left_out, SEGMENTS, id="filled-segments"),
    pytest.param(filled(in_blocks_and_no_padding, LOWEST), hidden_keys_are_left_out, {"p": PADDED}, id="padded"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("pieces", [(5, 1), (4, 2)], ids=["step", "chunk"])
@pytest.mark.parametrize(("attend", "patch", "inputs"), BLIND)
def test_a_wrong_answer_to_a_query_that_sees_no_key_is_refused(
    attend: Any, patch: Patch, inputs: Any, pieces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the refusal before such a query occurs: usually tokens after the prompt see others."""
    model = Small(attend)
    assert not refused(model, "full", inputs=inputs, pieces=pieces)
    patch(monkeypatch)
    assert refused(model, "full", inputs=inputs, pieces=pieces)


# -- right rewrites ------------------------------------------------------------------------------------------------


def chaotic(dtype: torch.dtype, layers: int = 6) -> Any:
    """Return a model whose activations are rounded to few values, and whose weights are large."""
    model = build("Llama", layers=layers)
    for module in list(model.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                rounded = Rounded(child.in_features, child.out_features, bias=False)
                rounded.weight = torch.nn.Parameter(child.weight * 6)
                setattr(module, name, rounded)
    return model.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_a_chaotic_model_is_accepted(dtype: torch.dtype, policy: str) -> None:
    recorder = Recorder()
    run(Traced(chaotic(dtype)), recorder, policy=policy, budget=12)
    assert len(notes(recorder)) == 2
    assert all("passed" in note for note in notes(recorder))
