"""Test prompts in chunks against the reference with the same chunks, in bounded memory and few graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvpass
from kvpass.decoding.prefill import chunk_lengths
from kvpass.runtime import cache_changes, kv_store
from tests import on_reference
from tests.models import breaks, build, graphs, prompt
from tests.strategies import MODEL_SPECIFIC, ROWS
from tests.test_invariants import settings
from tests.traces import Traced

each_policy = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "h2o" else pytest.mark.slow) for name in ROWS]
)


def layers_for(name: str) -> int:
    return 2 if name in MODEL_SPECIFIC else 1  # their weights are for two layers


def compiled(name: str, inner: Any, **more: Any) -> Any:
    given = {**settings(name, "Llama", 8), **more, "inner": inner}
    return torch.compile(build("Llama", layers=layers_for(name)), backend=on_reference.backend(**given))


def cached_positions(cache: Any) -> list[Tensor]:
    return [layer.positions for layer in kvpass.inspect(cache).layers]


@given(tokens=st.integers(1, 999), chunk=st.integers(1, 99), first=st.booleans())
def test_chunks_are_all_tokens_in_few_lengths(tokens: int, chunk: int, first: bool) -> None:
    found = chunk_lengths(tokens, chunk, first)
    assert sum(found) == tokens
    assert set(found[1:]) <= {chunk}
    assert found[0] < 2 * chunk
    assert first or found[0] <= chunk + 1
    assert 1 not in found or chunk == 1 or tokens == 1


@each_policy
def test_equal_to_the_reference_fed_the_same_chunks(name: str) -> None:
    model = Traced(build("Llama", layers=layers_for(name)))
    ours, literal = (
        on_reference.backend(**settings(name, "Llama", 8), inner=inner) for inner in ("eager", "reference")
    )

    @given(
        tokens=st.integers(2, 26),
        chunk=st.sampled_from([1, 5]),
        padding=st.sampled_from([(0, 0, 0), (3, 1, 0), (7, 0, 2)]),
    )
    @example(tokens=8, chunk=1, padding=(3, 1, 0))  # some rows begin with a chunk of padding
    @example(tokens=23, chunk=5, padding=(11, 1, 0))
    @example(tokens=11, chunk=1, padding=(7, 0, 2))  # rows that compact at different steps
    @profile(max_examples=2)
    def compare(tokens: int, chunk: int, padding: tuple[int, ...]) -> None:
        ids, mask = prompt(3, tokens, padding)
        runs = (kvpass.prefill(model.under(x), ids, mask, chunk=chunk, logits="all") for x in (ours, literal))
        one, other = runs
        assert all(torch.equal(a, b) for a, b in zip(cached_positions(one), cached_positions(other), strict=True))
        real = mask.bool()
        torch.testing.assert_close(one.logits[real], other.logits[real], atol=1e-4, rtol=1e-4)

    compare()


def generated(name: str, inner: str, chunk: int, tokens: int) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, (ids, mask) = build("Llama"), prompt(3, tokens, (3, 1, 0))
    on_reference.compile(model, **settings(name, "Llama", 8), inner=inner)
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1,
            prefill_chunk_size=chunk, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk", "tokens", "count"),
    [
        ("h2o", 8, 24, 3),  # a prompt, a chunk and a step
        ("d2o", 5, 17, 4),  # and a last chunk of another length
        ("cascade", 1, 10, 5),
        ("streaming", 40, 20, 2),
    ],
)
def test_generate_is_equal_to_the_reference(name: str, chunk: int, tokens: int, count: int) -> None:
    ours = generated(name, "eager", chunk, tokens)
    assert graphs() <= count
    assert breaks() == 0
    theirs = generated(name, "reference", chunk, tokens)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(
        torch.equal(a, b)
        for a, b in zip(cached_positions(ours.past_key_values), cached_positions(theirs.past_key_values), strict=True)
    )
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_uncompiled_model_until_something_is_evicted() -> None:
    ids, mask = prompt(2, 23, (9, 0))
    model = build("Llama", layers=1)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=position).logits
    run = torch.compile(model, backend=kvpass.backend("streaming", budget=32, inner="eager"))
    got = kvpass.prefill(run, ids, mask, chunk=6, logits="all")
    assert torch.allclose(got.logits[mask.bool()], expected[mask.bool()], atol=1e-4)
    assert graphs() == 2  # one for prompts and one for chunks of any length
    last = kvpass.prefill(run, ids, mask, chunk=6)
    assert torch.allclose(last.logits, expected[:, -1:], atol=1e-4)
    first = kvpass.prefill(run, ids[:, :15], mask[:, :15], chunk=6)  # and continue
    rest = kvpass.prefill(run, ids[:, 15:], mask, chunk=6, past_key_values=first.past_key_values)
    assert torch.allclose(rest.logits, expected[:, -1:], atol=1e-4)
    assert graphs() == 4


class Largest(TorchDispatchMode):
    """Records the bytes of the largest floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor) and made.is_floating_point() and type(made) is Tensor:
                self.found = max(self.found, made.untyped_storage().nbytes())
        return out


def watching(function: Callable[..., Any], watched: Largest) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        with watched:
            return function(*arguments, **named)

    return run


def test_memory_is_that_of_the_budget_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, most = Largest(), []
    for module in (kv_store, cache_changes):
        monkeypatch.setattr(module, "admit", watching(module.admit, watched))
    run = compiled("h2o", lambda gm, examples: watching(gm.forward, watched))
    for tokens in (48, 640):
        watched.found = 0
        out = kvpass.prefill(run, prompt(1, tokens, ())[0], chunk=16)
        most.append(watched.found)
        assert kvpass.inspect(out.past_key_values).layers[0].seen == tokens
        assert kvpass.inspect(out.past_key_values).layers[0].capacity == 9
    assert 0 < most[0] == most[1]


def counting() -> tuple[Callable[..., Any], list[Sequence[Any]]]:
    """Return an inner compiler, and the list of its inputs."""
    given: list[Sequence[Any]] = []

    def inner(gm: Any, examples: Sequence[Any]) -> Any:
        given.append(examples)
        return gm.forward

    return inner, given


def test_a_chunk_is_compiled_when_its_length_comes_again() -> None:
    inner, given = counting()
    run = compiled("window", inner)
    cache = kvpass.prefill(run, prompt(1, 10, ())[0], chunk=10).past_key_values
    assert len(given) == 1  # the prompt
    for chunk, count in ((3, 1), (4, 1), (3, 2), (3, 2), (4, 3), (1, 4)):
        kvpass.prefill(run, prompt(1, chunk, ())[0], chunk=chunk, past_key_values=cache)
        cache = kvpass.prefill(run, prompt(1, 10, ())[0], chunk=10).past_key_values
        assert len(given) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "cascade"])
def test_compiled_by_inductor(name: str) -> None:
    ids, mask = prompt(2, 43, (9, 0))
    ours = kvpass.prefill(compiled(name, "inductor"), ids, mask, chunk=8, logits="all")
    theirs = kvpass.prefill(compiled(name, "reference"), ids, mask, chunk=8, logits="all")
    assert all(
        torch.equal(a, b)
        for a, b in zip(cached_positions(ours.past_key_values), cached_positions(theirs.past_key_values), strict=True)
    )
    torch.testing.assert_close(ours.logits[mask.bool()], theirs.logits[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_loop_feeds_prompts_in_chunks() -> None:
    given = dict(policy="h2o", budget=8, inner="eager")
    model, (ids, mask) = build("Llama", layers=1), prompt(2, 19, (7, 0))
    loop = kvpass.DecodeLoop(model, **given, prefill_chunk=5)
    loop.prompt(ids, mask)
    before = cached_positions(loop)
    said = loop.generate(4)
    out = kvpass.prefill(torch.compile(model, backend=kvpass.backend(**given)), ids, mask, chunk=5)
    assert torch.equal(said[:, 0], out.logits[:, -1].argmax(-1))
    assert all(torch.equal(a, b) for a, b in zip(before, cached_positions(out.past_key_values), strict=True))
    loop.prompt(ids, mask)  # a further prompt
    assert kvpass.inspect(loop).layers[0].seen == 2 * 19 + 4
    assert loop.generate(3).shape == (2, 3)


def test_bad_input() -> None:
    run, (ids, mask) = compiled("h2o", "eager"), prompt(2, 9, (2, 0))
    for wrong in (dict(chunk=0), dict(chunk=2, logits="some"), dict(chunk=2, attention_mask=mask[:, 1:])):
        name = [key for key in wrong if key != "chunk"] or ["chunk"]
        with pytest.raises(kvpass.PolicyError, match=name[0]):
            kvpass.prefill(run, ids, **wrong)
    with pytest.raises(kvpass.PolicyError, match="ids"):
        kvpass.prefill(run, ids[:, :0], chunk=2)
    with pytest.raises(kvpass.LookupRangeError, match="ids: token 999999 is not in the vocabulary"):
        kvpass.prefill(run, ids.masked_fill(ids == ids[0, 3], 999999), chunk=2)
    with pytest.raises(kvpass.CacheHandleError, match="no kvpass cache"):
        kvpass.prefill(run, ids, chunk=2, past_key_values=[torch.zeros(2, 1, 3, 4)])
    with pytest.raises(kvpass.BudgetError, match="share"):
        kvpass.prefill(compiled("h2o", "eager", budget=0.5), ids, chunk=2)
    with pytest.raises(kvpass.PolicyError, match="prefill_chunk"):
        kvpass.DecodeLoop(build("Llama"), "window", budget=8, prefill_chunk=0)
    with pytest.raises(kvpass.BudgetError, match="share"):
        kvpass.DecodeLoop(build("Llama"), "window", budget=0.5, prefill_chunk=2)


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_an_uncompiled_model_is_refused(returns_tuple: bool) -> None:
    model: Any = TupleModel() if returns_tuple else build("Llama", layers=1)
    with pytest.raises(kvpass.CacheHandleError, match="returned an ordinary cache, which grows: pass the model after"):
        kvpass.prefill(model, prompt(1, 9, ())[0], chunk=3)


class TupleModel(torch.nn.Module):
    """A model that returns its logits and its keys and values in a tuple."""

    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        new = torch.zeros(len(ids), 1, ids.shape[1], 4)
        return torch.zeros(*ids.shape, 128), ((new, new),)


@torch.no_grad()
def test_padding_of_a_prefix_is_known_from_its_cache() -> None:
    """Continue a prefix with padding, with the whole mask and without a mask."""
    ids, mask = prompt(2, 20, (4, 0))
    run = compiled("h2o", "eager")
    made = []
    for so_far in (torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], 1), None):
        prefix = kvpass.prefill(run, ids, mask, chunk=10).past_key_values
        made.append(kvpass.prefill(run, ids[:, :5], so_far, chunk=5, cache=prefix))
    assert torch.equal(made[0].logits, made[1].logits)
    with pytest.raises(kvpass.CacheHandleError, match="a prompt of 1 rows after a prefix of 2"):
        kvpass.prefill(run, ids[:1, :5], chunk=5, cache=made[0])
