"""Test decoding without kvpass, the contents of a cache, and measurements of time and memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpass
from kvpass.apps.evaluation.session import PositionRecorder, Session, UncompiledLoop
from kvpass.apps.evaluation.speed import Speed, cache_bytes
from kvpass.apps.models import LoadedModel
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import CacheHandleError
from tests.models import build

IDS = torch.tensor([[5, 9, 77, 31, 8, 40, 41, 42, 43, 44, 50]])


def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """Decode greedily without a cache."""
    made: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.cat([ids, torch.tensor([made], dtype=torch.int64)], 1), use_cache=False).logits
            made.append(int(logits[0, -1].argmax()))
    return made


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_plain_loop_says_what_the_model_says_in_every_turn(chunk: int | None) -> None:
    model = build("Llama", layers=1)
    loop = UncompiledLoop(model, chunk)
    loop.prompt(IDS)
    first = loop.generate(3)[0].tolist()
    assert first == greedy(model, IDS, 3)
    first += loop.generate(2)[0].tolist()
    assert first == greedy(model, IDS, 5)
    more = torch.tensor([[17, 3]])
    loop.prompt(more)
    so_far = torch.cat([IDS, torch.tensor([first]), more], 1)
    assert loop.generate(4)[0].tolist() == greedy(model, so_far, 4)
    assert loop.cache.get_seq_length() == so_far.shape[1] + 3


def test_a_plain_loop_keeps_rows_apart_and_ends_when_all_have_stopped() -> None:
    model = build("Llama", layers=1)
    alone = greedy(model, IDS[:, 4:], 4)
    ids, mask = torch.cat([IDS, IDS]), torch.ones(2, 11, dtype=torch.int64)
    ids[1, :4], mask[1, :4] = 0, 0
    loop = UncompiledLoop(model, None)
    loop.prompt(ids, mask)
    assert loop.generate(4)[1].tolist() == alone
    ending = UncompiledLoop(model, None, stop=[alone[1]])
    ending.prompt(IDS[:, 4:])
    assert ending.generate(4)[0].tolist() == alone[: alone.index(alone[1]) + 1]


def test_a_plain_loop_without_a_prompt_says_what_to_do() -> None:
    with pytest.raises(CacheHandleError, match=r"call prompt\(ids\)"):
        UncompiledLoop(build("Llama", layers=1), None).generate(1)


def session(loop: Any, model: Any) -> Session:
    tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1)
    return Session(LoadedModel("stub", model, tokenizer, None, False), loop, {"a": [*range(2, 60)]}, "chunk", 8, 12)


def test_cached_positions_are_recorded_while_a_text_is_scored() -> None:
    model, held = build("Llama", layers=2), PositionRecorder(layer=1)
    loop = DecodeLoop(model, "streaming", budget=8, prefill_chunk=4, inner="eager")
    with_watch = Session(LoadedModel("stub", model, None, None, False), loop, {}, "chunk", 4, 8, watch=held)
    with_watch.score([[2]], [[*range(3, 22)]])
    assert [snapshot.step for snapshot in held.snapshots] == [7, 11, 15, 19]
    assert held.snapshots[-1].positions == [0, 1, 2, 3, 15, 16, 17, 18]


@pytest.mark.parametrize("budget", [None, 6])
def test_heads_that_hold_all_of_some_positions_are_counted(budget: int | None) -> None:
    model = build("Llama", layers=2)
    loop: Any = DecodeLoop(model, "streaming", budget=budget, inner="eager") if budget else UncompiledLoop(model, None)
    session = Session(LoadedModel("stub", None, None, None, False), loop, {}, "whole", None, budget)
    session.prompt([IDS[0].tolist(), IDS[0, 3:].tolist()])
    # four sinks and the last two tokens, of 11 tokens, and of 8 after three of padding
    wanted = [(0, [0, 3]), (0, [3, 9]), (0, [3, 4]), (1, [3, 9]), (1, [6, 7])]
    assert [session.share_of_heads(row, span) for row, span in wanted] == ([1, 1, 0, 1, 0] if budget else [1] * 5)


def test_bytes_are_those_of_the_slots_and_of_a_growing_cache() -> None:
    model = build("Llama", layers=2)
    plain, loop = UncompiledLoop(model, None), DecodeLoop(model, "window", budget=8, inner="eager")
    for each in (plain, loop):
        each.prompt(IDS)
    keys = plain.cache.layers[0].keys
    assert cache_bytes(plain.cache) == 4 * keys.nbytes
    assert keys.shape[2] == 11
    assert cache_bytes(loop.cache) == kvpass.inspect(loop).nbytes


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("ended", [0, 3, 6])
def test_speed_decodes_all_tokens_whatever_they_are(plain: bool, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with a loop that stops at the first token, or at one of those before or in the timed ones."""
    model, measure = build("Llama", layers=1), Speed(24, new=4, times=1)
    how: dict[str, Any] = dict(budget=12, prefill_chunk=8, inner="eager")
    prompt = torch.tensor([session(UncompiledLoop(model, 8), model).filler(0, 24)])

    def loop_of(stop: list[int]) -> Any:
        return UncompiledLoop(model, 8, stop) if plain else DecodeLoop(model, "window", **how, stop=stop)

    free = loop_of([])
    free.prompt(prompt)
    loop = loop_of([int(free.generate(9)[0, ended])])
    counts, generate = [], type(loop).generate

    def count(loop: Any, tokens: int) -> torch.Tensor:
        found = generate(loop, tokens)
        counts.append(found.shape[1])
        return found

    monkeypatch.setattr(type(loop), "generate", count)
    (row,) = measure.rows(session(loop, model))
    assert counts[-2:] == [4, 4]
    assert row["ms a step"] == pytest.approx(1e3 / row["tokens a second"])
    loop.reset()
    loop.prompt(prompt)
    assert generate(loop, 9).shape[1] == ended + 1  # the loop stops again


@pytest.mark.parametrize("plain", [True, False])
def test_speed_times_no_prompt_in_which_something_was_compiled(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", layers=1)
    loop = UncompiledLoop(model, 8) if plain else DecodeLoop(model, "window", budget=12, prefill_chunk=8, inner="eager")
    seconds = iter([2.0] if plain else [100.0, 50.0, 50.0, 50.0])

    def timed(loop: Any, ids: torch.Tensor) -> float:
        loop.reset()
        loop.prompt(ids)
        loop.generate(1)
        return next(seconds)

    monkeypatch.setattr("kvpass.apps.evaluation.speed._timed_prompt", timed)
    (row,) = Speed(24, new=4, times=1).rows(session(loop, model))
    assert row["time to first token, s"] == (2.0 if plain else 50.0)
    assert row["tokens a second"] > 0
    assert row["of a full one"] == pytest.approx(1.0 if plain else kvpass.inspect(loop.cache).ratio)
