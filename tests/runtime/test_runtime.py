"""Compare rewritten models with the uncompiled model and the eager reference, beyond evictions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import EagerAndRecordGraphs

import kvpass
import tests.strategies  # noqa: F401  loads the Hypothesis profile
from tests.models import build, prompt, teacher_forced, traced
from tests.traces import Traced


def assert_equal_runs(model: Traced, steps: list[int], padding: tuple[int, ...], **backend: object) -> None:
    ids, mask = prompt(3, sum(steps), padding)
    lowered = teacher_forced(model, ids, mask, steps, inner="eager", **backend)
    literal = teacher_forced(model, ids, mask, steps, inner="reference", **backend)
    for ours, theirs in zip(lowered.positions, literal.positions, strict=True):
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"layer {layer} held {a} where the reference holds {b}"
    real = mask.bool()
    assert torch.allclose(lowered.logits[real], literal.logits[real], atol=1e-4, rtol=1e-4)


@given(
    policy=st.sampled_from(["window", "streaming", "h2o", "random"]),
    positions=st.sampled_from(["absolute", "cache", None]),
    budget=st.integers(6, 14),
    offset=st.integers(-1, 1),
    chunk=st.sampled_from([0, 4]),
    padding=st.sampled_from([(0, 0, 0), (3, 1, 0), (0, 5, 2)]),
)
@settings(max_examples=3)
def test_model_equals_reference(
    policy: str, positions: str | None, budget: int, offset: int, chunk: int, padding: tuple[int, ...]
) -> None:
    first = budget + offset
    steps = [first, *([chunk] if chunk else []), *[1] * 8]
    assert_equal_runs(traced("Llama", layers=1), steps, padding, policy=policy, budget=budget, positions=positions)


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["GPTNeoX", "Cohere", "GPT2"])
def test_other_rotary_embeddings_equal_the_reference(architecture: str) -> None:
    assert_equal_runs(traced(architecture, layers=1), [12, 3, *[1] * 6], (3, 1, 0), policy="streaming", budget=8)


@torch.no_grad()
def bare(model: object, ids: torch.Tensor, **backend: object) -> torch.Tensor:
    """Return the logits of a loop that passes only ids and the cache."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend(**backend))
    out = compiled(ids[:, :5], use_cache=True)
    logits = [out.logits]
    for t in range(5, ids.shape[1]):
        out = compiled(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_bare_loop_counts_tokens_seen(architecture: str) -> None:
    """Check derived position ids: the model counts the tokens seen, not the slots held."""
    model = build(architecture, layers=1)
    ids, mask = prompt(2, 24, ())
    ours = bare(model, ids, policy="window", budget=8, inner="eager")
    expected_logits = teacher_forced(model, ids, mask, [5, *[1] * 19], policy="window", budget=8, inner="eager").logits
    assert torch.allclose(ours, expected_logits, atol=1e-5)


@pytest.mark.slow
def test_prompt_of_one_token() -> None:
    model = build("Llama", layers=1)
    ids, mask = prompt(2, 12, ())
    with torch.no_grad():
        expected = model(ids).logits
    run = teacher_forced(model, ids, mask, [1] * 12, policy="h2o", budget=16, inner="eager")
    assert torch.allclose(run.logits, expected, atol=1e-4)


def test_adopts_a_prompt_that_ran_uncompiled() -> None:
    model = build("Llama", layers=1)
    ids, _ = prompt(2, 20, ())
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=32, inner="eager"))

    def step(t: int) -> None:
        out = compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        assert torch.allclose(out.logits[:, 0], expected[:, t], atol=1e-4)

    with torch.no_grad():
        expected = model(ids).logits
        cache = model(ids[:, :8], use_cache=True).past_key_values
        with pytest.warns(kvpass.KVPassWarning, match="h2o knows no attention of this prompt"):
            step(8)
        for t in range(9, 20):
            step(t)
    assert "adopted" in kvpass.inspect(cache).layers[0].notes[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "buzz"])
def test_an_adopted_prompt_keeps_its_absolute_positions(policy: str, recwarn: pytest.WarningsRecorder) -> None:
    """Check an adopted prompt: its keys are rotated already, so cache positions cannot apply."""
    model = build("Llama", layers=1)
    ids, _ = prompt(2, 20, ())
    with torch.no_grad():
        expected = model(ids).logits
        cache = model(ids[:, :8], use_cache=True).past_key_values
        compiled = torch.compile(model, backend=kvpass.backend(policy, budget=32, inner="eager"))
        for t in range(8, 20):
            out = compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            assert torch.allclose(out.logits[:, 0], expected[:, t], atol=1e-4)
    assert kvpass.inspect(cache).layers[0].positions[0, 0].tolist() == list(range(20))
    warned = [str(each.message) for each in recwarn if "knows no attention" in str(each.message)]
    assert len(warned) == (policy == "buzz")  # streaming reads no attention


@pytest.mark.parametrize("settings", [{"policy": "streaming", "positions": "cache"}, {"policy": "cascade"}])
def test_a_prompt_that_cannot_be_adopted_is_refused(settings: dict[str, str]) -> None:
    model = build("Llama", layers=1)
    ids, _ = prompt(1, 9, ())
    compiled = torch.compile(model, backend=kvpass.backend(**settings, budget=32, inner="eager"))
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        with pytest.raises(kvpass.UnsupportedGraph, match="ran uncompiled"):
            compiled(ids[:, 8:], past_key_values=cache, use_cache=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("query_len", [1, 7, 149])
def test_full_without_budget_doubles_its_slots(monkeypatch: pytest.MonkeyPatch, query_len: int) -> None:
    monkeypatch.setattr("kvpass.user_budget.SPARE", 30)
    model = build("Llama", layers=1)
    ids, mask = prompt(2, 300, ())
    with torch.no_grad():
        expected = model(ids).logits
    pieces = [2, *[query_len] * (298 // query_len)]
    run = teacher_forced(model, ids, mask, pieces, inspect=False, policy="full", inner="eager")
    count = sum(pieces)
    assert torch.allclose(run.logits, expected[:, :count], atol=1e-4)
    layers = kvpass.inspect(run.cache).layers
    assert all(layer.capacity > count for layer in layers)
    assert all((layer.positions >= 0).sum(-1).unique().tolist() == [count] for layer in layers)


def test_budget_as_a_share_of_the_prompt() -> None:
    model = build("Llama", layers=1)
    ids, mask = prompt(2, 26, ())
    run = teacher_forced(model, ids, mask, [20, *[1] * 6], policy="window", budget=0.35, inner="eager")
    assert run.positions[-1][0][0, 0].tolist() == list(range(19, 26))  # exactly 0.35 * 20 = 7 tokens


@pytest.mark.slow
def test_interleaved_conversations_do_not_touch_each_other() -> None:
    model = Traced(build("Llama", layers=1))
    (a, mask), (b, _) = prompt(2, 24, ()), prompt(2, 25, ())
    b = b[:, :24]
    alone = [
        teacher_forced(model, ids, mask, [6, *[1] * 18], policy="h2o", budget=8, inner="eager").logits for ids in (a, b)
    ]
    compiled = torch.compile(build("Llama", layers=1), backend=kvpass.backend("h2o", budget=8, inner="eager"))
    with torch.no_grad():
        outs = [compiled(ids[:, :6], use_cache=True) for ids in (a, b)]
        for t in range(6, 24):
            outs = [
                compiled(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
                for ids, out in zip((a, b), outs, strict=True)
            ]
            for out, expected in zip(outs, alone, strict=True):
                assert torch.allclose(out.logits[:, 0], expected[:, t], atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_bfloat16(traced: Callable[..., Traced], policy: str) -> None:
    model = traced("Llama", dtype=torch.bfloat16, layers=1)
    ids, mask = prompt(2, 20, ())
    with torch.no_grad():
        expected = build("Llama", torch.bfloat16, layers=1)(ids).logits
    run = teacher_forced(model, ids, mask, [8, *[1] * 12], policy=policy, budget=32, inner="eager")
    assert run.logits.dtype == torch.bfloat16
    assert torch.allclose(run.logits.float(), expected.float(), atol=0.05)


def test_memory_is_what_the_layout_says() -> None:
    model = build("Llama", layers=1)
    ids, mask = prompt(2, 60, ())
    run = teacher_forced(model, ids, mask, [30, *[1] * 30], inspect=False, policy="window", budget=16, inner="eager")
    report = kvpass.inspect(run.cache)
    rows, heads, slots, dim, layers = 2, 2, 17, 16, 1
    keys_and_values = 2 * rows * heads * slots * dim * 4
    metadata = rows * slots * 3 * 8 + rows * 3 * 8  # position, index and rank of each slot; free, seen and length
    assert report.nbytes == layers * (keys_and_values + metadata)
    assert report.full_nbytes == layers * 2 * rows * heads * 60 * dim * 4


def tail(ids: torch.Tensor, t: int) -> torch.Tensor:
    """Return the last token so far, as a slice whose strides and offset grow."""
    return torch.cat([ids[:, :t], ids[:, t : t + 1]], 1)[:, -1:]


def from_a_longer_text(ids: torch.Tensor, t: int) -> torch.Tensor:
    return torch.cat([ids, ids], 1)[:, ids.shape[1] + t :][:, :1]


@pytest.mark.few(1)
@pytest.mark.parametrize("take", [tail, from_a_longer_text])
@torch.no_grad()
def test_the_strides_of_a_token_compile_nothing(take: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    torch._dynamo.reset()
    ids, inner = prompt(2, 20, ())[0], EagerAndRecordGraphs()
    model = build("Llama", layers=1)
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=32, inner=inner))
    out = compiled(ids[:, :5], use_cache=True)
    logits = [out.logits]
    for t in range(5, 20):
        out = compiled(take(ids, t), past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    assert len(inner.graphs) == 2  # prompt and step
    assert torch.allclose(torch.cat(logits, 1), model(ids).logits, atol=1e-4)
