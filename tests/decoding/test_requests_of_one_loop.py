"""Test all kinds of requests on one loop: each equals a single request, and nothing is traced again."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvpass
from kvpass import GenerationOutput
from kvpass.decoding import request_batch, scheduler
from kvpass.decoding.scheduler import RequestScheduler
from tests.decoding.test_requests import LENGTHS, MOST, alone, ended, prompts, serving_loop
from tests.decoding.test_stepping import interrupting
from tests.models import build


@dataclasses.dataclass(frozen=True)
class Served:
    """A loop, and its answers to single prompts by length."""

    loop: kvpass.DecodeLoop
    said: dict[int, list[int]]


@pytest.fixture(scope="module")
def compiled_once(shared_traces: None) -> Served:
    model = build("Llama", layers=1)
    loop = serving_loop(model, prefill_chunk=8)
    return Served(loop, as_alone(model, loop))


@pytest.fixture
def served(compiled_once: Served) -> Iterator[Served]:
    """Return the loop of all tests here, and check that no test leaves a request or needs another graph."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield compiled_once
    assert compiled_once.loop.pending == 0
    cached = kvpass.inspect(compiled_once.loop).layers[0]
    assert (cached.positions.shape[0], cached.capacity) == (3, 9)


def as_alone(model: Any, loop: kvpass.DecodeLoop) -> dict[int, list[int]]:
    """Return 14 tokens after each prompt alone; the first prompt is also checked in a plain loop."""
    said = {}
    for ids in prompts():
        said[len(ids)] = next(iter(loop.generate_batch([ids], max_new_tokens=14).values())).generated_tokens
    first = prompts()[1]
    assert said[len(first)] == alone(model, first, 14, prefill_chunk=8)
    return said


def test_requests_together(served: Served) -> None:
    loop, said = served.loop, served.said
    names = [loop.add(ids, max_new_tokens=most) for ids, most in zip(prompts(), MOST, strict=True)]
    assert loop.pending == len(names)
    done = ended(loop)
    for name, length, most in zip(names, LENGTHS, MOST, strict=True):
        assert done[name].generated_tokens == said[length][:most]
    assert loop.pending == 0


def test_stops(served: Served) -> None:
    loop, said = served.loop, served.said
    ids, other = prompts((9, 5))
    end = said[9][4]
    one, two = loop.add(ids, max_new_tokens=12, stop=[1, end]), loop.add(torch.tensor([other]), max_new_tokens=3)
    three = loop.add(ids, max_new_tokens=12, stop=[said[9][0]])
    done = ended(loop)
    end_index = said[9].index(end)
    assert (done[one].generated_tokens, done[one].finish_reason) == (said[9][: end_index + 1], "stop")
    assert (done[two].generated_tokens, done[two].finish_reason) == (said[5][:3], "length")
    assert (done[three].generated_tokens, done[three].finish_reason) == (said[9][:1], "stop")


SAMPLED: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=0.95)


def test_a_seed_gives_the_same_tokens_whoever_else_is_there(served: Served) -> None:
    loop = served.loop
    all_ids = prompts((9, 5, 4, 9))
    by_itself = loop.generate_batch([all_ids[0]], max_new_tokens=10, seed=5, **SAMPLED)
    (expected,) = (output.generated_tokens for output in by_itself.values())
    loop.add(all_ids[1], max_new_tokens=4)
    loop.add(all_ids[2], max_new_tokens=20, temperature=1.5, seed=1)
    seen = loop.step()
    mine = loop.add(all_ids[0], max_new_tokens=10, seed=5, **SAMPLED)
    another = loop.add(all_ids[3], max_new_tokens=10, seed=6, **SAMPLED)
    done = ended(loop, seen)
    assert done[mine].generated_tokens == expected
    assert done[another].generated_tokens != expected


def test_cancelling(served: Served) -> None:
    loop, said = served.loop, served.said
    running, *others, waiting = (loop.add(ids, max_new_tokens=9) for ids in prompts((9, 5, 5, 17, 12)))
    seen = loop.step()
    while not seen:
        seen = loop.step()
    assert [output.request_id for output in seen] == [running]
    assert loop.cancel(running)
    assert loop.cancel(waiting)
    assert not loop.cancel("nobody")
    assert loop.pending == 5
    assert {output.request_id for output in loop.step()} >= {running, waiting}
    assert not loop.cancel(running)
    done = {output.request_id: output for output in loop if output.is_finished()}
    assert done.keys() == set(others)
    assert [done[name].generated_tokens for name in others] == [said[n][:9] for n in (5, 5, 17)]


def test_other_requests_are_kept(served: Served) -> None:
    loop = served.loop
    first = loop.add(prompts((5,))[0], max_new_tokens=3)
    done = loop.generate_batch(prompts((9, 17)), max_new_tokens=6)
    assert first not in done
    with pytest.raises(kvpass.RequestError, match="exists already"):  # its last output is not delivered yet
        loop.add(prompts((5,))[0], max_new_tokens=3, request_id=first)
    later = [output for output in loop.step() if output.request_id == first]
    assert later[-1].is_finished()
    assert [token for output in later for token in output.new_tokens] == later[-1].generated_tokens


def test_other_requests_survive_an_error(served: Served) -> None:
    loop = served.loop
    assert isinstance(loop.driver, RequestScheduler)
    first, step = loop.add(prompts((5,))[0], max_new_tokens=1), loop.driver.step

    def failing() -> list[GenerationOutput]:
        if first not in loop.driver.known:
            raise ZeroDivisionError("the machine")
        return step()

    loop.driver.step = failing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="the machine"):
        loop.generate_batch(prompts((9,)), max_new_tokens=6)
    del loop.driver.step  # type: ignore[method-assign]
    assert ended(loop)[first].is_finished()


def test_bad_input(served: Served) -> None:
    loop = served.loop
    assert loop.add(prompts((5,))[0], max_new_tokens=3, request_id="mine") == "mine"
    for wrong, match in (
        (dict(ids=[]), "empty"),
        (dict(ids=[3, 128]), "token 128"),
        (dict(ids=[-1]), "token -1"),
        (dict(ids=[1.5]), "whole numbers"),
        (dict(ids=torch.zeros(2, 3, dtype=torch.int64)), "one prompt"),
        (dict(ids=[3], request_id="mine"), "already"),
        (dict(ids=[3], max_new_tokens=0), "max_new_tokens=0"),
        (dict(ids=[3], stop=range(9)), "stop"),
    ):
        with pytest.raises(kvpass.RequestError, match=match):
            loop.add(**wrong)  # type: ignore[arg-type]
    with pytest.raises(kvpass.PolicyError, match="temperature"):
        loop.add([3], temperature=-1.0)
    done = [*loop.generate_batch([[5, 6], [], [300], [7]], max_new_tokens=2).values()]
    assert [output.status.name for output in done] == ["FINISHED", "FAILED", "FAILED", "FINISHED"]
    assert "empty" in str(done[1].error)
    assert "300" in str(done[2].error)
    assert {output.request_id for output in loop} == {"mine"}


def test_a_row_holds_its_own_request_alone(served: Served) -> None:
    """Check that the slots of a row contain only its current request."""
    loop = served.loop
    assert isinstance(loop.driver, RequestScheduler)
    held = []
    for lengths in ((7,), (30, 3, 11), (7,)):
        loop.generate_batch(prompts(lengths), max_new_tokens=1)
        batch = loop.driver.batch
        assert batch is not None
        slots = batch.caches[0].slots
        rows = (*slots.key.parts, *slots.value.parts)
        held.append(
            [x[0].clone() for x in (*rows, slots.position, slots.free, slots.seen, slots.rank, *slots.state.values())]
        )
    assert all(torch.equal(a, b) for a, b in zip(held[0], held[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(held[0], held[1], strict=True))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (scheduler.RequestScheduler, "_start"),
        (scheduler, "caches_in"),
        (request_batch.RequestBatch, "insert"),
        (request_batch.RequestBatch, "advance"),
        (request_batch.RequestBatch, "cached_tokens"),
    ],
)
def test_requests_go_on_after_an_interrupt(
    owner: Any, name: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, said = served.loop, served.said
    names = [loop.add(ids, max_new_tokens=most) for ids, most in zip(prompts(), MOST, strict=True)]
    seen: list[GenerationOutput] = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupting(getattr(owner, name), 2))
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            seen.extend(loop)
    for _ in range(50):  # each step of a loop that has lost a request would do nothing
        seen += loop.step()
    assert loop.pending == 0
    done = {output.request_id: output.generated_tokens for output in seen if output.is_finished()}
    assert done == {name: said[n][:most] for name, n, most in zip(names, LENGTHS, MOST, strict=True)}
    for request, tokens in done.items():
        assert tokens == [token for output in seen if output.request_id == request for token in output.new_tokens]


@pytest.mark.parametrize("taken", [1, 2, 4])
def test_an_iteration_that_is_left_early_loses_no_output(taken: int, served: Served) -> None:
    loop = served.loop
    names = [loop.add(ids, max_new_tokens=1) for ids in prompts((5, 9, 5))]  # the second and third end in one step
    names += [loop.add(ids, max_new_tokens=6) for ids in prompts((9, 5))]
    seen = list(itertools.islice(loop, taken))
    while loop.pending:
        seen += itertools.islice(loop, taken)
    done = [output.request_id for output in seen if output.is_finished()]
    assert sorted(done) == sorted(names)
    for name in names:
        parts = [output for output in seen if output.request_id == name]
        assert [token for output in parts for token in output.new_tokens] == parts[-1].generated_tokens


def test_requests_of_several_threads_have_names_and_seeds_of_their_own(served: Served) -> None:
    loop, names = served.loop, list[str]()
    threads = [threading.Thread(target=lambda: names.append(loop.add([5, 6], temperature=0.9))) for _ in range(4)]
    with loop.lock:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.1)  # until it waits for its turn
    for thread in threads:
        thread.join()
    assert isinstance(loop.driver, RequestScheduler)
    seeds = {loop.driver.known[name].sampling.seed for name in names}
    for name in names:
        loop.cancel(name)
    assert len(list(loop)) == len(seeds) == 4


def test_an_interrupted_batch_is_withdrawn(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a batch of which one request has ended, some are in rows, and some wait."""
    loop, said = served.loop, served.said
    other = loop.add(prompts((5,))[0], max_new_tokens=14)
    with monkeypatch.context() as patch:
        patch.setattr(request_batch.RequestBatch, "run", interrupting(request_batch.RequestBatch.run, 2))
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            loop.generate_batch(prompts((9, 17, 9, 3)), max_new_tokens=5)
    assert loop.pending == 1
    outputs = list(loop)
    assert {output.request_id for output in outputs} == {other}
    assert outputs[-1].generated_tokens == said[5][:14]
    (again,) = loop.generate_batch(prompts((9,)), max_new_tokens=6).values()
    assert again.generated_tokens == said[9][:6]


def test_an_interrupted_thread_withdraws_only_its_own_batch(served: Served) -> None:
    """Fail in the third step of one thread, while the requests of the other are in rows too."""
    loop, said, found = served.loop, served.said, dict[str, list[list[int]]]()
    assert isinstance(loop.driver, RequestScheduler)
    step, failing, calls = loop.driver.step, threading.current_thread(), itertools.count(1)

    def step_of() -> list[GenerationOutput]:
        if threading.current_thread() is failing and next(calls) == 3:
            raise ZeroDivisionError("the machine")
        return step()

    def ask() -> None:
        outputs = loop.generate_batch(prompts((3, 9)), max_new_tokens=7)
        found["other"] = [output.generated_tokens for output in outputs.values()]

    other = threading.Thread(target=ask)
    with loop.lock:
        other.start()
        loop.driver.step = step_of  # type: ignore[method-assign]
    try:
        with pytest.raises(ZeroDivisionError, match="the machine"):
            loop.generate_batch(prompts((17, 5)), max_new_tokens=7)
    finally:
        del loop.driver.step  # type: ignore[method-assign]
    other.join(60)
    assert loop.pending == 0
    assert found == {"other": [said[3][:7], said[9][:7]]}


def test_threads_take_turns(served: Served) -> None:
    loop, said = served.loop, served.said
    found: dict[int, list[list[int]]] = {}

    def ask(thread: int) -> None:
        outputs = loop.generate_batch(prompts((5, 9, 3)), max_new_tokens=7)
        found[thread] = [output.generated_tokens for output in outputs.values()]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == {thread: [said[n][:7] for n in (5, 9, 3)] for thread in range(3)}
