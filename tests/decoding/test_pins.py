"""Test that pinned tokens stay, through `prefill`, `DecodeLoop` and requests, whatever happens to the cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.backend import Backend
from kvpass.cache.model_cache import caches_in
from kvpass.errors import BudgetError, CacheHandleError, PolicyError, RequestError
from tests import on_reference
from tests.models import build, model_with_unequal_layers, prompt
from tests.traces import Traced

BUDGET = 12


pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model(shared_traces: None) -> Traced:
    return Traced(build("Llama", layers=1))


@pytest.fixture(scope="module")
def layered(shared_traces: None) -> Traced:
    """Return a model whose layers get different budgets under d2o."""
    return Traced(model_with_unequal_layers(3))


def chosen(policy: str = "h2o", inner: str = "eager", **more: Any) -> Backend:
    return on_reference.backend(policy, **{"budget": BUDGET, **more}, inner=inner)


def pinned(cache: Any) -> list[list[int]]:
    """Return the pinned tokens of each row, and check that all heads and layers agree."""
    found = [layer.pinned for layer in kvpass.inspect(cache).layers]
    assert all(torch.equal(each, found[0][:, :1].expand_as(each)) for each in found)
    return [[index for index in row if index >= 0] for row in found[0][:, 0].tolist()]


def cached_positions(cache: Any) -> Tensor:
    return kvpass.inspect(cache).layers[0].positions


@torch.no_grad()
def stepped(model: Any, cache: Any, count: int, mask: Tensor | None = None) -> Any:
    """Run this many steps with fixed tokens, and return the last output."""
    rows, seen = caches_in(cache)[0].layout.batch, caches_in(cache)[0].length
    mask = torch.ones(rows, seen, dtype=torch.int64) if mask is None else mask
    for step in range(count):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        ids = torch.full((rows, 1), 5 + step)
        position = mask.sum(-1, keepdim=True) - 1
        out = model(ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    return out


@pytest.mark.few(2)
@pytest.mark.parametrize("on_top", [False, True])
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_chunks_turns_and_steps_are_the_references(model: Traced, policy: str, on_top: bool) -> None:
    ids, mask = prompt(3, 30, (3, 1, 0))
    first, second = [[(0, 2)], [(1, 3), (8, 9)], []], torch.zeros(3, 7, dtype=torch.bool)
    second[0, 2] = second[2, 6] = True
    runs = []
    for inner in ("eager", "reference"):
        under = model.under(chosen(policy, inner))
        out = kvpass.prefill(under, ids[:, :23], mask[:, :23], chunk=5, pin=first, on_top=on_top, logits="all")
        logits = [out.logits[mask[:, :23].bool()]]
        cache = stepped(under, out.past_key_values, 3, mask[:, :23]).past_key_values
        whole = torch.cat([mask[:, :23], torch.ones(3, 10, dtype=torch.int64)], 1)
        out = kvpass.prefill(under, ids[:, 23:], whole, chunk=3, cache=cache, pin=second, on_top=on_top, logits="all")
        last = stepped(under, out.past_key_values, 9, whole)
        logits += [out.logits.flatten(0, 1), last.logits.flatten(0, 1)]
        runs.append((cached_positions(last.past_key_values), pinned(last.past_key_values), torch.cat(logits)))
    (ours, marks, logits), (theirs, expected_marks, expected) = runs
    assert torch.equal(ours, theirs)
    assert marks == expected_marks == [[3, 4, 28], [2, 3, 9], [32]]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    counts = (ours >= 0).sum(-1).tolist()
    assert counts == ([[15] * 2, [15] * 2, [13] * 2] if on_top else [[12] * 2] * 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"skip_layers": (1,)}], ids=str)
def test_layers_with_budgets_of_their_own_raise_each(layered: Traced, options: dict[str, Any]) -> None:
    """Test d2o, which merges, gives layers different budgets, and may leave layers complete."""
    ids, mask = prompt(2, 30, (3, 0))
    cached_positions, logits = [], []
    for inner in ("eager", "reference"):
        under = layered.under(chosen("d2o", inner, **options))
        out = kvpass.prefill(under, ids, mask, chunk=30, pin=[(1, 4)], on_top=True)
        out = stepped(under, out.past_key_values, 8, mask)
        layers = kvpass.inspect(out.past_key_values).layers
        marks = [layer.pinned[:, 0].tolist() for layer in layers]
        assert marks == [[[], []] if "skip_layers" in options and i == 1 else [[4, 5, 6], [1, 2, 3]] for i in range(3)]
        cached_positions.append([layer.positions for layer in layers])
        logits.append(out.logits)
    assert all(torch.equal(a, b) for a, b in zip(*cached_positions, strict=True))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["random", "knorm", "window"])
@pytest.mark.parametrize("on_top", [False, True])
def test_tokens_that_come_one_by_one_can_be_pinned(model: Traced, policy: str, on_top: bool) -> None:
    """Pin tokens in steps, which then must evict another token than the new one."""
    ids, _ = prompt(2, 24, ())
    under = model.under(chosen(policy, budget=6))
    out = kvpass.prefill(under, ids, chunk=1, pin=[(0, 1), (12, 14), (20, 21)], on_top=on_top)
    assert pinned(stepped(under, out.past_key_values, 8).past_key_values) == [[0, 12, 13, 20]] * 2


def test_rows_copies_crops_and_formats_keep_pins(model: Traced) -> None:
    ids, _ = prompt(2, 20, ())
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 3] = mask[1, [5, 11]] = True
    for kv_dtype in (None, "int8"):
        under = model.under(chosen(crop=6, kv_dtype=kv_dtype))
        cache = kvpass.prefill(under, ids, chunk=20, pin=mask, on_top=True).past_key_values
        other = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert pinned(cache) == [[5, 11], [3]]
        cache = stepped(under, cache, 4).past_key_values
        cache.crop(-3)
        assert pinned(stepped(under, cache, 5).past_key_values) == [[5, 11], [3]]
        assert [layer.row_budgets for layer in caches_in(cache)] == [(BUDGET + 2, BUDGET + 1)]
        more, _ = prompt(2, 6, ())
        other = kvpass.prefill(under, more, chunk=6, cache=other, pin=[(1, 2), (4, 6)], on_top=True).past_key_values
        assert pinned(other) == [[3, 21, 24, 25], [5, 11, 21, 24, 25]]
        other.crop(-3)  # two of these tokens were pinned
        assert pinned(stepped(under, other, 3).past_key_values) == [[3, 21], [5, 11, 21]]
        assert [layer.row_budgets for layer in caches_in(other)] == [(BUDGET + 2, BUDGET + 3)]


def test_a_turn_may_bring_the_first_pins(model: Traced) -> None:
    ids, _ = prompt(2, 20, ())
    under = model.under(chosen(crop=4))
    cache = stepped(under, kvpass.prefill(under, ids, chunk=20).past_key_values, 2).past_key_values
    cache = kvpass.prefill(under, ids[:, :5], chunk=5, cache=cache).past_key_values
    cache = kvpass.prefill(under, ids[:, :5], chunk=5, cache=cache, pin=[(0, 2)]).past_key_values
    assert pinned(stepped(under, cache, 9).past_key_values) == [[27, 28]] * 2


def test_pins_that_leave_too_little_are_refused_before_anything_runs(model: Traced) -> None:
    ids, _ = prompt(1, 30, ())
    for inner in ("eager", "reference"):
        under = model.under(chosen(inner=inner))
        with pytest.raises(BudgetError, match="20 tokens are to stay, which leaves 0 of it"):
            kvpass.prefill(under, ids, chunk=30, pin=[(0, 20)])
        cache = kvpass.prefill(under, ids, chunk=30, pin=[(0, 5)]).past_key_values
        with pytest.raises(BudgetError, match=r"11 tokens are to stay, which leaves 1 of it .* on_top=True"):
            kvpass.prefill(under, ids, chunk=5, cache=cache, pin=[(1, 2), (20, 25)])  # the last are in a later chunk
        assert pinned(stepped(under, cache, 3).past_key_values) == [[0, 1, 2, 3, 4]]  # the conversation continues


@pytest.mark.parametrize("policy", ["full", "snapkv", "cascade"])
def test_policies_without_pins_say_why(model: Traced, policy: str) -> None:
    under = model.under(chosen(policy, budget=200))
    with pytest.raises(PolicyError, match=f"pin: has no effect under policy '{policy}'"):
        kvpass.prefill(under, prompt(1, 9, ())[0], chunk=9, pin=[(0, 2)])


def test_an_uncompiled_model_cannot_pin() -> None:
    with pytest.raises(CacheHandleError, match="pin: LlamaForCausalLM returned no cache of kvpass"):
        kvpass.prefill(build("Llama", layers=1), prompt(1, 9, ())[0], chunk=9, pin=[(0, 2)])


def test_prompts_of_many_lengths_share_one_step(model: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that slots for pins on top are powers of two, with dynamic sizes from the second on."""
    compiled = []
    original = Backend.compile_step
    monkeypatch.setattr(Backend, "compile_step", lambda *args: compiled.append(args) or original(*args))
    under, counts = model.under(chosen()), []
    for tokens in (3, 4, 9, 13, 30, 60):
        ids, _ = prompt(1, tokens + 20, ())
        out = kvpass.prefill(under, ids, chunk=ids.shape[1], pin=[(0, tokens)], on_top=True)
        assert kvpass.inspect(out.past_key_values).layers[0].capacity == BUDGET + 1 + (1 << (tokens - 1).bit_length())
        assert pinned(stepped(under, out.past_key_values, 2).past_key_values) == [[*range(tokens)]]
        counts.append(len(compiled))
    assert 0 < counts[0] == counts[1] < counts[2]
    assert counts[2:] == [counts[2]] * 4


def test_a_prompt_that_stays_can_be_on_top(model: Traced) -> None:
    ids, _ = prompt(1, 20, ())
    under = model.under(chosen(keep_prompt=True))
    with pytest.raises(BudgetError, match="20 tokens are to stay"):
        kvpass.prefill(under, ids, chunk=20)
    cache = kvpass.prefill(under, ids, chunk=7, pin=[(0, 1)], on_top=True).past_key_values
    cache = stepped(under, cache, 20).past_key_values
    assert pinned(cache) == [[*range(20)]]
    assert int((cached_positions(cache)[0, 0] >= 0).sum()) == 20 + BUDGET


def test_generate_goes_on_from_pins(model: Traced) -> None:
    """Prefill all tokens of the prompt but the last with pins, because `generate` takes no pins."""
    ids, mask = prompt(2, 20, (3, 0))
    under = model.under(chosen(budget=9))
    how = dict(attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=-1)
    with torch.no_grad():
        out = kvpass.prefill(under, ids[:, :-1], mask[:, :-1], chunk=8, pin=[(2, 5)])
        got = under.generate(
            ids, past_key_values=out.past_key_values, max_new_tokens=12, return_dict_in_generate=True, **how
        )
    assert pinned(got.past_key_values) == [[5, 6, 7], [2, 3, 4]]
    assert got.sequences.shape == (2, 32)


@pytest.fixture(scope="module")
def small(shared_traces: None) -> Any:
    return build("Llama", layers=1)


def test_a_loop_pins_in_every_turn(small: Any) -> None:
    ids, mask = prompt(2, 20, (4, 0))
    loop = kvpass.DecodeLoop(small, "h2o", budget=BUDGET, inner="eager", prefill_chunk=8)
    loop.prompt(ids, mask, pin=[[(0, 2)], [(3, 4)]])
    loop.generate(9)
    loop.prompt(ids[:, :6], pin=[(2, 4)], on_top=True)  # counted from the last token of the answer
    loop.generate(20)
    assert pinned(loop) == [[4, 5, 31, 32], [3, 31, 32]]
    assert "pinned" in str(kvpass.inspect(loop))
    with pytest.raises(BudgetError, match="tokens are to stay"):
        loop.prompt(ids, pin=[(0, 20)])
    assert loop.generate(3).shape == (2, 3)


def test_requests_with_pins_are_as_alone(small: Any) -> None:
    """Mix requests with and without pins; the first has none, and rows grow when needed."""
    lengths = (9, 15, 30, 22, 12, 40)
    ids = [prompt(1, n, ())[0][0] for n in lengths]
    pins: list[dict[str, Any]] = [
        {}, {"pin": [(0, 4)]}, {"pin": [(2, 20)], "on_top": True}, {"pin": torch.arange(22) < 5},
        {}, {"pin": [(0, 33)], "on_top": True},
    ]  # fmt: skip
    how: dict[str, Any] = dict(policy="h2o", budget=BUDGET, inner="eager", prefill_chunk=8)
    loop = kvpass.DecodeLoop(small, **how, rows=3, read_interval=4)
    names = [loop.add(x, max_new_tokens=14, **pin) for x, pin in zip(ids, pins, strict=True)]
    done = {output.request_id: output for output in loop if output.is_finished()}
    assert all(done[name].finish_reason == "length" for name in names)
    single = kvpass.DecodeLoop(small, **how)
    for name, x, pin in zip(names, ids, pins, strict=True):
        single.reset()
        single.prompt(x[None], **{k: v[None] if isinstance(v, Tensor) else v for k, v in pin.items()})
        assert done[name].generated_tokens == single.generate(14)[0].tolist(), name
    with pytest.raises(RequestError, match=r"request 'x': .* 11 tokens are to stay, which leaves 1"):
        loop.add(ids[2], pin=[(0, 11)], request_id="x")
    with pytest.raises(PolicyError, match=r"span \(0, 11\) of row 0 is not within its 9 tokens"):
        loop.add(ids[0], pin=[(0, 11)])
