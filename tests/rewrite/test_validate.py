"""Test translation validation: misread graphs are refused, and correct graphs stay unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpass
from kvpass.capture import capture, decomposed_attention
from kvpass.capture.rotary import Rotary
from kvpass.errors import OUT_OF_MEMORY
from kvpass.policies import Policy
from kvpass.policies.buzz import Buzz
from kvpass.policies.sage import Sage
from kvpass.rewrite.validation import lockstep
from kvpass.runtime.recorder import Recorder
from tests.adversary.models import Small, sdpa, seen
from tests.adversary.oracle import Case, judge
from tests.architectures import zoo
from tests.models import build, prompt
from tests.traces import Traced

POLICIES = {"full": None, "streaming": 12, "h2o": 12, "cascade": 12, "d2o": 12}


@torch.no_grad()
def run(model: Traced, recorder: Recorder | None = None, cache: Any = None, **settings: Any) -> Tensor:
    """Return the logits of a padded prompt of nine tokens, two steps and a chunk of three.

    An empty cache may be given.
    """
    backend = kvpass.backend(**{"inner": "eager", **settings})
    backend = dataclasses.replace(backend, recorder=recorder) if recorder else backend
    compiled = model.under(backend)
    ids, mask = prompt()
    ids, mask = torch.cat([ids, ids[:, :5]], 1), torch.cat([mask, torch.ones_like(mask[:, :5])], 1)
    position, done, logits = (mask.cumsum(-1) - 1).clamp(min=0), 0, []
    for count in (9, 1, 1, 3):
        now = slice(done, done + count)
        done += count
        given = dict(attention_mask=mask[:, :done].contiguous(), position_ids=position[:, now].contiguous())
        out = compiled(ids[:, now].contiguous(), past_key_values=cache, use_cache=True, **given)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def notes(recorder: Recorder) -> list[str]:
    return [note for note in recorder.notes if "validation of the step" in note]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=pytest.mark.slow if p == "cascade" else []) for p in POLICIES]
)
@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_a_right_rewrite_passes_and_random_state_stays(
    traced: Callable[..., Traced], architecture: str, policy: str
) -> None:
    model = traced(architecture)  # the first call seeds the generator
    recorder, state = Recorder(), torch.get_rng_state()
    checked = run(model, recorder, policy=policy, budget=POLICIES[policy])
    assert torch.equal(torch.get_rng_state(), state)
    assert notes(recorder)
    assert all("passed" in note for note in notes(recorder))
    plain = run(model, policy=policy, budget=POLICIES[policy], validate=False)
    torch.testing.assert_close(checked, plain, rtol=0, atol=0)


def test_keys_that_are_rotated_at_read_are_held_against_the_models_own() -> None:
    recorder = Recorder()
    run(Traced(build("GPTNeoX")), recorder, policy="streaming", budget=12, positions="cache")
    assert len(notes(recorder)) == 2  # steps and chunks
    assert all("passed" in note for note in notes(recorder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(Sage(share="private"), id="private"),
        pytest.param(Sage(share="concat"), id="concat"),
        pytest.param(Buzz(log_n=True), id="log_n"),
    ],
)
def test_policies_that_change_logits_are_held_against_the_model_without_that(
    traced: Callable[..., Traced], policy: Policy
) -> None:
    recorder = Recorder()
    checked = run(traced("Llama"), recorder, policy=policy, budget=24)
    assert len(notes(recorder)) == 2  # steps and chunks
    assert all("passed" in note for note in notes(recorder))
    plain = run(traced("Llama"), policy=policy, budget=24, validate=False)
    torch.testing.assert_close(checked, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_layers_that_store_their_last_tokens_only(name: str) -> None:
    recorder = Recorder()
    run(Traced(zoo.build(name)), recorder, DynamicCache(config=zoo.config(name)), policy="h2o", budget=24)
    assert len(notes(recorder)) >= 2
    assert all("passed" in note for note in notes(recorder))


@pytest.mark.slow
def test_a_layers_own_window_may_be_longer_than_there_are_slots() -> None:
    """Check that validation passes when tokens of its conversation are evicted."""
    recorder = Recorder()
    run(Traced(zoo.build("mistral")), recorder, DynamicCache(config=zoo.config("mistral")), policy="h2o", budget=5)
    assert len(notes(recorder)) >= 2
    assert all("passed" in note for note in notes(recorder))


def other_scale(
    found: Callable[..., decomposed_attention.AttentionCall],
) -> Callable[..., decomposed_attention.AttentionCall]:
    return lambda *args: dataclasses.replace(found(*args), scale=found(*args).scale * 1.2)


def without_mask(found: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: dataclasses.replace(found(*args), mask=None)


def values_for_keys(found: Callable[..., Any]) -> Callable[..., Any]:
    def swapped(*args: Any) -> Any:
        site = found(*args)
        return dataclasses.replace(site, value=site.key)

    return swapped


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (decomposed_attention, "_sdpa_call", other_scale),
        (capture, "_site", without_mask),
        (capture, "_site", values_for_keys),
    ],
)
def test_a_call_that_is_read_wrongly_is_refused_by_its_line(
    traced: Callable[..., Traced], where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = traced("Llama")
    monkeypatch.setattr(where, name, wrong(getattr(where, name)))
    with pytest.raises(kvpass.UnsupportedGraph, match=r"sdpa_attention\.py:\d+.*is not the model's"):
        run(model, policy="full")
    run(model, policy="full", validate=False)  # no other check notices


class Rounded(torch.nn.Linear):
    """A linear layer that rounds its input to integers, so that a difference in the last place can grow."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 30
        return super().forward((x / scale).round() * scale)


def rounding() -> Any:
    """Return a model whose outputs change by about 0.001 if its past changes in the last place."""
    model = build("Llama", layers=1)
    for module in list(model.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                rounded = Rounded(child.in_features, child.out_features, bias=False)
                rounded.weight = child.weight
                setattr(module, name, rounded)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, values_for_keys])
def test_rounding_in_the_model_itself_is_no_difference(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all graphs continue with the model's own attention, so that rounding is equal to the last bit."""
    recorder = Recorder()
    if wrong is None:
        run(Traced(rounding()), recorder, policy="full")
        assert all("passed" in note for note in notes(recorder))
    else:
        monkeypatch.setattr(capture, "_site", wrong(capture._site))
        with pytest.raises(kvpass.UnsupportedGraph, match="is not the model's"):
            run(Traced(rounding()), recorder, policy="full")


class Drawing(Small):
    """A model that adds noise to its attention, and draws a channel for each row."""

    def forward(self, ids: Tensor, past: Any = None, **inputs: Any) -> Any:
        x, present = super().forward(ids, past, **inputs)
        x = x + torch.randn_like(x)
        return torch.multinomial(x[:, -1].softmax(-1), 1), present


def test_random_numbers_that_the_model_draws_are_no_difference() -> None:
    model, ids = Drawing(sdpa(lambda i, j: j <= i)), torch.arange(10).view(2, 5)

    def drawn(call: Any) -> Tensor:
        torch.manual_seed(1)
        channel, past = call(ids)
        channels = [channel]
        for _ in range(4):
            channel, past = call(channel, past)
            channels.append(channel)
        return torch.cat(channels, 1)

    with torch.no_grad():
        compiled = torch.compile(model, backend=kvpass.backend("full", inner="eager"))
        assert torch.equal(drawn(compiled), drawn(model))


def test_validate_is_a_setting_of_the_backend() -> None:
    assert kvpass.backend("full").validate
    assert kvpass.backend("full") != kvpass.backend("full", validate=False)


def scaled_afterwards(past: Tensor, new: Tensor) -> Tensor:
    """Append the new tokens, and then write to their source tensor."""
    grown = torch.cat([past, new], -2)
    new.mul_(2)
    return grown


def test_new_tokens_that_are_written_to_after_they_were_stored() -> None:
    model = Small(sdpa(lambda i, j: j <= i), grow=scaled_afterwards)
    for validate in (True, False):
        verdict = judge(Case(model, pieces=(5, 1)), validate=validate)
        assert verdict.kind == "refused"
        assert "after they were stored" in verdict.detail


@pytest.mark.parametrize("pieces", [(5, 1), (1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("shape", ["[1, q, 1]", "[q, 1]"])
def test_ranks_are_held_against_the_models_own_where_rows_are_padded_differently(
    shape: str, pieces: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a prompt of one token too, with ranks treated as if one index served all rows."""
    monkeypatch.setattr(Rotary, "rows_share_positions", lambda *_: False)
    model = Small(sdpa(lambda i, j, p: (j <= i) & p[:, None, None].bool()), rotary=shape)
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    verdict = judge(Case(model, {"p": seen(padding)}, pieces, real=seen(padding)), "streaming", positions="cache")
    assert verdict.kind == "refused", verdict


def test_a_failure_of_validation_itself_is_noted_and_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such size")

    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(lockstep, "attend_exactly", fails)
        run(Traced(build("Llama", layers=1)), recorder, policy="h2o", budget=12)
    assert notes(recorder)
    assert all("not possible: " in note and "RuntimeError: no such size" in note for note in notes(recorder))


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_validation_without_memory_refuses_nothing(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise kind("no memory left")

    monkeypatch.setattr(lockstep, "attend_exactly", fails)
    recorder = Recorder()
    run(Traced(build("Llama", layers=1)), recorder, policy="h2o", budget=12)
    assert notes(recorder)
    assert all("not possible: " in note and "no memory left" in note for note in notes(recorder))
