"""Requests on one decode graph: the tokens of each are those that it gets alone, whatever happens to the others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import kvpass
from kvpass import GenerationOutput, RequestStatus, stepping
from kvpass import requests as serving
from tests.models import build, graphs, prompt
from tests.strategies import TABLE
from tests.test_invariants import settings

LENGTHS = (3, 17, 9, 1, 12, 30, 5)
MOST = (6, 3, 14, 9, 1, 7, 12)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [prompt(1, n, ())[0][0].tolist() for n in lengths]


def serving_loop(model: Any = None, **given: Any) -> kvpass.DecodeLoop:
    settings = {"policy": "h2o", "budget": 8, "inner": "eager", "rows": 3, "every": 4, **given}
    return kvpass.DecodeLoop(build("Llama", layers=1) if model is None else model, **settings)


def alone(model: Any, ids: list[int], most: int, **given: Any) -> list[int]:
    """What a loop of one conversation says."""
    loop = kvpass.DecodeLoop(model, **{"policy": "h2o", "budget": 8, "inner": "eager", **given})
    loop.prompt(torch.tensor([ids]))
    return loop.generate(most)[0].tolist()


def ended(loop: kvpass.DecodeLoop) -> dict[str, GenerationOutput]:
    """The last output of each request; what came in between adds up to it."""
    done: dict[str, GenerationOutput] = {}
    parts: dict[str, list[int]] = {}
    for output in loop:
        assert output.request_id not in done
        parts.setdefault(output.request_id, []).extend(output.new_tokens)
        assert parts[output.request_id] == output.generated_tokens
        if output.is_finished():
            done[output.request_id] = output
    return done


@pytest.mark.parametrize(
    "name",
    [pytest.param(row.name, marks=[] if row.name in ("h2o", "streaming") else pytest.mark.slow) for row in TABLE],
)
def test_each_request_gets_what_it_gets_alone(name: str) -> None:
    given = {**settings(name, "Llama", 8), "inner": "eager"}
    model = build("Llama", layers=2 if name == "kv_align" else 1)
    loop = kvpass.DecodeLoop(model, **given, rows=3, every=4, prefill_chunk=8)
    names = [loop.add(ids, max_new_tokens=most) for ids, most in zip(prompts(), MOST, strict=True)]
    before = graphs()
    assert before == 0
    done = ended(loop)
    single = kvpass.DecodeLoop(model, **given, prefill_chunk=8)
    for request, ids, most in zip(names, prompts(), MOST, strict=True):
        single.state = None
        single.prompt(torch.tensor([ids]))
        assert done[request].generated_tokens == single.generate(most)[0].tolist()
        assert (done[request].finish_reason, done[request].status) == ("length", RequestStatus.FINISHED)
        assert done[request].prompt_ids == ids


def test_one_decode_graph_and_nothing_compiled_later() -> None:
    loop = serving_loop(prefill_chunk=8)
    loop.generate_batch(prompts((3, 30, 9)), max_new_tokens=5)
    count = graphs()
    with torch.compiler.set_stance("fail_on_recompile"):
        done = loop.generate_batch(prompts((5, 31, 2, 44, 17)), max_new_tokens=9)
    assert graphs() == count
    assert all(len(output.generated_tokens) == 9 for output in done.values())
    shape = kvpass.inspect(loop).layers[0]
    assert (shape.positions.shape[0], shape.capacity) == (3, 9)


def test_a_row_that_ends_leaves_nothing_behind() -> None:
    """The slots of a row are those of the prompt alone, up to places in the padded sequence."""
    loop = serving_loop(rows=2)
    for length in (30, 3, 11):
        loop.add(prompts((length,))[0], max_new_tokens=5)
        ended(loop)
    loop.add(prompts((7,))[0], max_new_tokens=1)
    ended(loop)
    fresh = serving_loop(rows=1)
    fresh.add(prompts((7,))[0], max_new_tokens=1)
    ended(fresh)
    assert loop.requests is not None
    assert fresh.requests is not None
    used, new = loop.requests.batch, fresh.requests.batch
    assert used is not None
    assert new is not None
    for one, other in zip(used.caches, new.caches, strict=True):
        for name in ("key", "value", "position", "free", "seen", "rank"):
            assert torch.equal(getattr(one.slots, name)[:1], getattr(other.slots, name))
        for name, state in other.slots.state.items():
            assert torch.equal(one.slots.state[name][:1], state)


def test_stops_and_lengths() -> None:
    model, (ids, other) = build("Llama", layers=1), prompts((9, 5))
    said = alone(model, ids, 12)
    loop = serving_loop(model, stop=[said[4]])
    one, two = loop.add(ids, max_new_tokens=12), loop.add(torch.tensor([other]), max_new_tokens=3, stop=[])
    three = loop.add(ids, max_new_tokens=12, stop=[said[0]])
    done = ended(loop)
    place = said.index(said[4])
    assert (done[one].generated_tokens, done[one].finish_reason) == (said[: place + 1], "stop")
    assert (done[two].generated_tokens, done[two].finish_reason) == (alone(model, other, 3), "length")
    assert (done[three].generated_tokens, done[three].finish_reason) == (said[:1], "stop")


SAMPLED: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=0.95)


def test_a_seed_gives_the_same_tokens_whoever_else_is_there() -> None:
    model, all_ids = build("Llama", layers=1), prompts((9, 5, 4, 9))
    by_itself = serving_loop(model, rows=3).generate_batch([all_ids[0]], max_new_tokens=10, seed=5, **SAMPLED)
    (expected,) = (output.generated_tokens for output in by_itself.values())
    loop = serving_loop(model, rows=3)
    loop.add(all_ids[1], max_new_tokens=4)
    loop.add(all_ids[2], max_new_tokens=20, temperature=1.5, seed=1)
    loop.step()
    mine = loop.add(all_ids[0], max_new_tokens=10, seed=5, **SAMPLED)
    another = loop.add(all_ids[3], max_new_tokens=10, seed=6, **SAMPLED)
    done = ended(loop)
    assert done[mine].generated_tokens == expected
    assert done[another].generated_tokens != expected


def test_rows_draw_by_their_own_settings() -> None:
    shares = torch.tensor([0.05, 0.05, 0.25, 0.65])
    rows = [(dict(temperature=0.0), [3]), (dict(temperature=1.0, top_k=2), [2, 3])]
    rows += [(dict(temperature=1.0, top_p=0.7), [2, 3]), (dict(temperature=1.0), [0, 1, 2, 3])]
    sampling = kvpass.sampling.RowSampling.of(len(rows), torch.device("cpu"))
    counts = torch.zeros(len(rows), 4)
    for row, (given, _) in enumerate(rows):
        sampling.put(row, kvpass.sampling.Sampling(**given, seed=row))
    for made in range(4000):
        drawn = sampling.choose(shares.log().expand(len(rows), 4), torch.full((len(rows),), made))
        counts[torch.arange(len(rows)), drawn] += 1
    for row, (_, allowed) in enumerate(rows):
        expected = torch.zeros(4)
        expected[allowed] = shares[allowed] / shares[allowed].sum()
        torch.testing.assert_close(counts[row] / 4000, expected, atol=0.03, rtol=0)


def test_cancelling() -> None:
    model, all_ids = build("Llama", layers=1), prompts((9, 5, 4))
    loop = serving_loop(model, rows=1)
    running, waiting, last = (loop.add(ids, max_new_tokens=9) for ids in all_ids)
    got = loop.step()
    assert [output.request_id for output in got] == [running]
    assert loop.cancel(running)
    assert loop.cancel(waiting)
    assert not loop.cancel("nobody")
    assert loop.pending == 3
    done = ended_from(loop, got)
    assert done[running].finish_reason == done[waiting].finish_reason == "cancelled"
    assert done[running].generated_tokens == alone(model, all_ids[0], 9)[: len(done[running].generated_tokens)]
    assert done[waiting].generated_tokens == []
    assert done[last].generated_tokens == alone(model, all_ids[2], 9)
    assert loop.pending == 0
    assert not loop.cancel(last)


def ended_from(loop: kvpass.DecodeLoop, _: list[GenerationOutput]) -> dict[str, GenerationOutput]:
    """The last outputs of a loop that has been looked at before."""
    return {output.request_id: output for output in loop if output.is_finished()}


def test_others_are_kept_for_the_next_look() -> None:
    loop = serving_loop()
    first = loop.add(prompts((5,))[0], max_new_tokens=3)
    done = loop.generate_batch(prompts((9, 2)), max_new_tokens=6)
    assert first not in done
    later = [output for output in loop.step() if output.request_id == first]
    assert later[-1].is_finished()
    assert [token for output in later for token in output.new_tokens] == later[-1].generated_tokens


def test_full_caches() -> None:
    """Rows end at their own lengths; a request that would not fit is refused, and the others go on."""
    model = build("Llama", layers=1)
    loop = serving_loop(model, policy="full", budget=24, rows=2)
    fits = [loop.add(ids, max_new_tokens=25 - len(ids)) for ids in prompts((20, 3, 9, 1, 24))]
    with pytest.raises(kvpass.RequestError, match="budget of 24"):
        loop.add(prompts((20,))[0], max_new_tokens=6)
    done = ended(loop)
    for name, ids in zip(fits, prompts((20, 3, 9, 1, 24)), strict=True):
        assert done[name].generated_tokens == alone(model, ids, 25 - len(ids), policy="full", budget=64)


def test_bad_input() -> None:
    loop = serving_loop()
    good = loop.add(prompts((5,))[0], max_new_tokens=3, request_id="mine")
    assert good == "mine"
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
    done = loop.generate_batch([[5, 6], [], [300], [7]], max_new_tokens=2)
    assert [output.status.name for output in done.values()] == ["FINISHED", "FAILED", "FAILED", "FINISHED"]
    assert "empty" in [*done.values()][1].error
    assert "300" in [*done.values()][2].error
    assert ended(loop)["mine"].status == RequestStatus.FINISHED


def test_refusals() -> None:
    with pytest.raises(kvpass.PolicyError, match="rows"):
        serving_loop(rows=0)
    loop = serving_loop(rows=10**10)
    name = loop.add(prompts((5,))[0], max_new_tokens=2)
    with pytest.raises(kvpass.BudgetError, match="rows=10000000000"):
        loop.step()
    assert loop.pending == 1
    assert loop.cancel(name)
    with pytest.raises(kvpass.PolicyError, match="rows"):
        loop.prompt(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(kvpass.PolicyError, match="rows"):
        serving_loop(rows=None).add([3])
    with pytest.raises(kvpass.BudgetError, match="needs a budget"):
        serving_loop(policy="full", budget=None)


def faulty(chance: float, seed: int) -> Any:
    """What a step raises now and then."""
    drawn = random.Random(seed)

    def fail(*_: Any) -> None:
        if drawn.random() < chance:
            raise RuntimeError("out of luck")

    return fail


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_none_is_lost_and_none_mixed_up(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled requests, bad ones, and steps and prompts that raise errors, in between."""
    drawn, model = random.Random(count), build("Llama", layers=1)
    kinds = [(drawn.choice(LENGTHS), drawn.choice(MOST)) for _ in range(12)]
    expected = {kind: alone(model, prompts((kind[0],))[0], kind[1]) for kind in set(kinds)}
    loop, wanted, done = serving_loop(model), {}, {}
    fail, run = faulty(0.03, count), stepping.Step.run
    monkeypatch.setattr(stepping.Step, "run", lambda step: (fail(), run(step))[1])
    read = serving.chunks
    monkeypatch.setattr(serving, "chunks", lambda *how: (fail(), read(*how))[1])
    while len(wanted) < count or loop.pending:
        for _ in range(drawn.randint(0, 3) if len(wanted) < count else 0):
            kind = drawn.choice(kinds)
            wanted[loop.add(prompts((kind[0],))[0], max_new_tokens=kind[1])] = kind
            with pytest.raises(kvpass.RequestError):
                loop.add([500])
        if drawn.random() < 0.1 and wanted:
            loop.cancel(drawn.choice([*wanted]))
        for output in loop.step():
            if output.is_finished():
                assert output.request_id not in done
                done[output.request_id] = output
    assert done.keys() == wanted.keys()
    reasons = {output.finish_reason for output in done.values()}
    assert {"length", "cancelled"} <= reasons <= {"length", "cancelled", "error"}
    for name, output in done.items():
        said = expected[wanted[name]]
        assert output.generated_tokens == said[: len(output.generated_tokens)]
        assert output.finish_reason != "length" or output.generated_tokens == said
    assert loop.requests is not None
    assert not loop.requests.known
    assert not any(loop.requests.rows)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model = build("Llama")
    loop = serving_loop(model, inner="inductor", prefill_chunk=8)
    loop.generate_batch(prompts((3, 30)), max_new_tokens=4)
    with torch.compiler.set_stance("fail_on_recompile"):
        names = [loop.add(ids, max_new_tokens=most) for ids, most in zip(prompts(), MOST, strict=True)]
        done = ended(loop)
    for name, ids, most in zip(names, prompts(), MOST, strict=True):
        assert done[name].generated_tokens == alone(model, ids, most, prefill_chunk=8)
