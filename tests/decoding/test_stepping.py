"""Test which decode steps a loop repeats, and which it runs through the model or refuses."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.decoding import stepping
from kvpass.decoding.conversations import Conversations
from kvpass.decoding.sampling import Sampling
from kvpass.runtime import step_execution
from tests.models import build, discard_compiled_code, prompt

TOKENS = 8


class Broken(torch.nn.Module):
    """A model whose graph breaks behind what it makes of its token ids."""

    def __init__(self, model: Any, what: str) -> None:
        super().__init__()
        self.model, self.config, self.what = model, model.config, what
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        named: dict[str, Any]
        if self.what == "the ids":
            named = dict(input_ids=input_ids)
        elif self.what == "other ids":
            named = dict(input_ids=input_ids + 0)
        elif self.what == "embeddings":
            named = dict(inputs_embeds=self.model.get_input_embeddings()(input_ids))
        else:
            named = dict(input_ids=input_ids, position_ids=self.positions(input_ids, past_key_values))
        torch._dynamo.graph_break()
        return self.model(**named, past_key_values=past_key_values, use_cache=use_cache)

    @torch._dynamo.disable
    def positions(self, input_ids: Tensor, cache: Any) -> Tensor:
        before = 0 if cache is None else cache.get_seq_length()
        return torch.arange(before, before + input_ids.shape[1])[None]


def greedy(model: torch.nn.Module, ids: Tensor) -> list[int]:
    with torch.no_grad():
        out, made = model(ids), []
        for _ in range(TOKENS):
            made.append(int(out.logits[:, -1].argmax(-1)))
            out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values)
    return made


def decoded(model: torch.nn.Module, ids: Tensor, rows: int | None) -> list[int]:
    settings: dict[str, Any] = {} if rows is None else dict(rows=rows)
    loop = kvpass.DecodeLoop(model, "full", budget=48, inner="eager", **settings)
    if rows is not None:
        [output] = loop.generate_batch([ids[0]], max_new_tokens=TOKENS).values()
        if output.cause is not None:
            raise output.cause
        return list(output.generated_tokens)
    loop.prompt(ids)
    made: list[int] = loop.generate(TOKENS)[0].tolist()
    return made


@pytest.mark.parametrize(
    ("what", "rows"),
    [("the ids", None), ("other ids", None), ("embeddings", None), ("embeddings", 2), ("positions", None)],
)
def test_an_argument_that_code_outside_of_the_graph_computes_is_not_repeated(what: str, rows: int | None) -> None:
    """Check that no later step gets the ids, embeddings or positions of an earlier one."""
    discard_compiled_code()
    model, (ids, _) = Broken(build("Llama", layers=1), what), prompt(1, 20, ())
    expected = greedy(model, ids)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", kvpass.KVPassWarning)
        assert decoded(model, ids, rows) == expected
    warned = any("outside of the graph of its decode step" in str(each.message) for each in found)
    assert warned == (what != "the ids")


@pytest.mark.parametrize(
    ("where", "rows", "message"),
    [
        ("lm_head", None, "logits of this model are not computed in the graph"),
        ("lm_head", 2, "logits of this model are not computed in the graph"),
        ("model.layers.1", None, "ran its decode step in 2 graphs"),
    ],
)
def test_a_break_within_the_step_is_refused(where: str, rows: int | None, message: str) -> None:
    discard_compiled_code()
    model, (ids, _) = build("Llama"), prompt(1, 20, ())
    model.get_submodule(where).register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(kvpass.UnsupportedGraph, match=message):
        decoded(model, ids, rows)


def test_an_export_of_a_model_that_embeds_outside_of_its_graph_is_refused(tmp_path: Path) -> None:
    discard_compiled_code()
    model = Broken(build("Llama", layers=1), "embeddings")
    with pytest.raises(kvpass.UnsupportedGraph, match="its token ids are not read in its graph"):
        kvpass.export(model, tmp_path / "exported", "streaming", budget=16)


@functools.cache
def loop_on(policy: str, budget: int) -> kvpass.DecodeLoop:
    model = build("Llama", layers=1)
    return kvpass.DecodeLoop(model, policy, budget=budget, inner="eager", read_interval=4, prefill_chunk=4)


def uninterrupted(loop: kvpass.DecodeLoop, ids: torch.Tensor) -> list[int]:
    loop.reset()
    loop.prompt(ids)
    tokens: list[int] = loop.generate(12)[0].tolist()
    return tokens


def interrupting(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return a function that raises KeyboardInterrupt once it has done its work so many times."""
    count = itertools.count(1)

    def interrupted(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        if next(count) == calls:
            raise KeyboardInterrupt("by the user")
        return result

    return interrupted


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize(
    ("owner", "name", "is_whole"),
    [
        (Sampling, "sample", False),
        (step_execution, "advance_counts", False),
        (stepping.DecodeState, "check_not_interrupted", True),
        (stepping.DecodeState, "unread_tokens", True),
    ],
)
def test_an_interrupted_step_loses_no_token_or_is_noticed(
    owner: Any, name: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, (ids, _) = loop_on("h2o", 8), prompt(1, 9, ())
    expected = uninterrupted(loop, ids)
    loop.reset()
    loop.prompt(ids)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupting(getattr(owner, name), 3))
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            loop.generate(12)
    if is_whole:
        assert loop.generate(12)[0].tolist() == expected
    for use in (lambda: loop.generate(12), lambda: loop.prompt(ids)) if not is_whole else ():
        with pytest.raises(kvpass.CacheHandleError, match="interrupted by an error"):
            use()
    assert uninterrupted(loop, ids) == expected


def too_long(loop: kvpass.DecodeLoop, ids: torch.Tensor) -> None:
    with pytest.raises(kvpass.BudgetError, match="is full"):
        loop.prompt(ids.repeat(1, 3))


def continued_outside(loop: kvpass.DecodeLoop, ids: torch.Tensor) -> None:
    with torch.no_grad():
        loop.compiled(ids, past_key_values=loop.cache)


def behind_a_prefix(loop: kvpass.DecodeLoop, ids: torch.Tensor) -> None:
    loop.branch(loop.cache)
    too_long(loop, ids)


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize("change", [too_long, continued_outside, behind_a_prefix])
def test_a_cache_that_went_on_by_part_of_a_prompt_is_noticed(change: Callable[..., None]) -> None:
    """Check that no token comes from a cache that holds the first chunks of a turn that failed, or another call's."""
    loop, (ids, _) = loop_on("full", 32), prompt(1, 8, ())
    expected = uninterrupted(loop, ids)
    loop.reset()
    loop.prompt(ids)
    loop.generate(4)
    change(loop, ids)
    assert isinstance(loop.driver, Conversations)
    with pytest.raises(kvpass.CacheHandleError, match="interrupted by an error"):
        loop.prompt(ids) if loop.driver.state is None else loop.generate(4)
    assert uninterrupted(loop, ids) == expected
