"""Test the order and the errors of requests with rows that only count: no model runs, and each request has its text."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvpass import policies
from kvpass.decoding import scheduler as scheduler_module
from kvpass.decoding.prefill import chunk_lengths
from kvpass.decoding.requests import MAX_STOPS, GenerationOutput, RequestStatus
from kvpass.decoding.sampling import GREEDY
from kvpass.decoding.scheduler import ATTEMPTS, RequestScheduler
from kvpass.errors import BudgetError, CacheHandleError, RequestError
from tests.decoding.outputs import last_outputs

VOCABULARY, ROWS, INTERVAL = 50, 2, 3


def text(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first tokens of the text that follows a prompt."""
    return [(7 * sum(prompt) + 3 * number) % VOCABULARY for number in range(count)]


def expected(prompt: Sequence[int], most: int, stop: Sequence[int] = ()) -> list[int]:
    """Return what a request gets: up to a stop token, at most `most` tokens."""
    whole = text(prompt, most)
    return next((whole[: number + 1] for number, token in enumerate(whole) if token in stop), whole)


class CountingLoop:
    """A loop whose calls of the model only count; `failures` are errors of its next calls, None for a success."""

    def __init__(self, policy: str = "window", budget: Any = 8, chunk: int | None = 4) -> None:
        self.backend = types.SimpleNamespace(policy=policies.resolve(policy, {}), budget=budget, cache_settings=None)
        self.model, self.device, self.lock = None, torch.device("cpu"), threading.RLock()
        self.in_inference_mode, self.prefill_chunk, self.read_interval = False, chunk, INTERVAL
        self.takes_positions = True
        self.failures: list[BaseException | None] = []
        self.calls: list[Any] = []  # "prefill", or the prompts of the rows that decode
        self.model_call = types.SimpleNamespace(
            vocabulary=VOCABULARY,
            unknown_token=lambda ids: next((int(x) for x in ids if not 0 <= x < VOCABULARY), None),
            empty_cache=lambda: None,
            logits=lambda out: torch.zeros(1, 1, VOCABULARY),
        )

    def call(self, what: Any) -> None:
        self.calls.append(what)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure


class CountingBatch:
    """The rows of a counting loop."""

    def __init__(self, loop: CountingLoop, rows: int) -> None:
        self.loop, self.stopped = loop, torch.ones(rows, dtype=torch.bool)
        self.requests: dict[int, Any] = {}
        self.made = [0] * rows

    @staticmethod
    def of(loop: CountingLoop, cache: Any, rows: int) -> CountingBatch:
        return CountingBatch(loop, rows)

    def fit_slots(self, caches: Any) -> None:
        pass

    def insert(self, row: int, caches: Any, request: Any, logits: Any) -> int:
        assert self.stopped[row]
        self.requests[row], self.made[row] = request, 1
        (first,) = text(request.prompt, 1)
        self.stopped[row] = first in request.stop or request.max_new_tokens == 1
        return first

    def set_length(self, length: int) -> None:
        pass

    def run(self, count: int, exact: bool) -> list[list[int]]:
        assert count > 0
        running = [row for row in self.requests if not self.stopped[row]]
        self.loop.call(sorted(tuple(self.requests[row].prompt) for row in running))
        columns, ended = [], False
        while len(columns) < count and not ended:
            column = [-1] * len(self.made)
            for row in running:
                request = self.requests[row]
                if not self.stopped[row]:
                    self.made[row] += 1
                    column[row] = text(request.prompt, self.made[row])[-1]
                    self.stopped[row] = column[row] in request.stop or self.made[row] == request.max_new_tokens
                    ended |= bool(self.stopped[row])
            columns.append(column)
        return columns

    def cached_tokens(self, row: int) -> float:
        return float(len(self.requests[row].prompt))

    def extract(self, row: int, length: int) -> Any:
        return ("cache", tuple(self.requests[row].prompt), length)


def run_chunks(model_call: Any, ids: Any, mask: Any, prefix: Any, size: Any, **pins: Any) -> Iterator[Any]:
    for _ in chunk_lengths(ids.shape[1], size, True):
        LOOPS[-1].call("prefill")
        yield types.SimpleNamespace(past_key_values=None)


LOOPS: list[CountingLoop] = []


@pytest.fixture(autouse=True)
def _counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "RequestBatch", CountingBatch)
    monkeypatch.setattr(scheduler_module, "run_chunks", run_chunks)
    monkeypatch.setattr(scheduler_module, "check_holds_only_slots", lambda cache, empty: None)


def scheduled(rows: int = ROWS, **given: Any) -> RequestScheduler:
    LOOPS[:] = [CountingLoop(**given)]
    return RequestScheduler(LOOPS[-1], rows)  # type: ignore[arg-type]


def add(made: RequestScheduler, prompt: Any, most: int = 5, stop: Sequence[int] = (), **more: Any) -> str:
    return made.add(prompt, more.pop("name", None), most, stop, GREEDY, **more)


def stepped(made: RequestScheduler, seen: Sequence[GenerationOutput]) -> Iterator[GenerationOutput]:
    """Yield earlier outputs, then the outputs of up to 500 steps, until no request is pending."""
    yield from seen
    steps = itertools.count()
    while made.pending and next(steps) < 500:
        yield from made.step()
        assert len(made.rows) <= made.count


def run_out(made: RequestScheduler, seen: Sequence[GenerationOutput] = ()) -> dict[str, GenerationOutput]:
    """Step until no request is pending, and check that outputs add up; return the last ones."""
    last = last_outputs(stepped(made, seen), {})
    assert made.pending == 0
    assert not made.queue
    return last


PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
REQUESTS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 9), st.lists(st.integers(0, VOCABULARY - 1), max_size=3)), min_size=1, max_size=7
)
FAILURES = st.lists(st.sampled_from([None, None, None, RuntimeError("odd"), ValueError("odd")]), max_size=12)


@given(requests=REQUESTS, rows=st.integers(1, 3), data=st.data())
def test_each_request_gets_its_own_text(requests: list[Any], rows: int, data: st.DataObject) -> None:
    """Add requests at any time."""
    made, seen, names = scheduled(rows), list[GenerationOutput](), []
    for prompt, most, stop in requests:
        names.append(add(made, prompt, most, stop))
        for _ in range(data.draw(st.integers(0, 3))):
            seen += made.step()
    done = run_out(made, seen)
    for name, (prompt, most, stop) in zip(names, requests, strict=True):
        output = done[name]
        assert output.generated_tokens == expected(prompt, most, stop)
        assert output.status is RequestStatus.FINISHED
        assert output.finish_reason == ("stop" if output.generated_tokens[-1] in stop else "length")
        assert output.cached_tokens == len(prompt)


@given(requests=REQUESTS, failures=FAILURES)
@example(requests=[([1], 9, []), ([2], 9, [])], failures=[None, None, RuntimeError("odd")])
def test_errors_lose_and_repeat_no_token(requests: list[Any], failures: list[Any]) -> None:
    """Check that a request has its whole text, or failed with a part of it, whatever calls fail."""
    made = scheduled()
    LOOPS[-1].failures = list(failures)
    names = [add(made, *each) for each in requests]
    done = run_out(made)
    assert sorted(done) == sorted(names)
    failed = sum(done[name].status is RequestStatus.FAILED for name in names)
    assert failed <= sum(failure is not None for failure in failures) / ATTEMPTS  # each failed alone so often
    for name, (prompt, most, stop) in zip(names, requests, strict=True):
        whole, output = expected(prompt, most, stop), done[name]
        if output.status is RequestStatus.FAILED:
            assert output.generated_tokens == whole[: len(output.generated_tokens)]
            assert (output.finish_reason, str(output.cause)) == ("error", "odd")
        else:
            assert output.generated_tokens == whole


@given(requests=REQUESTS, steps=st.integers(0, 9), data=st.data())
def test_cancelled_requests_end_and_others_go_on(requests: list[Any], steps: int, data: st.DataObject) -> None:
    made, seen = scheduled(), list[GenerationOutput]()
    names = [add(made, *each) for each in requests]
    for _ in range(steps):
        seen += made.step()
    gone = data.draw(st.sets(st.sampled_from(names)))
    ended = {output.request_id for output in seen if output.is_finished()}
    for name in sorted(gone):
        assert made.cancel(name) == (name not in ended)
        assert not made.cancel(name)
    done = run_out(made, seen)
    for name, (prompt, most, stop) in zip(names, requests, strict=True):
        whole, tokens = expected(prompt, most, stop), done[name].generated_tokens
        cancelled = name in gone - ended
        assert tokens == whole[: len(tokens)]
        assert (done[name].finish_reason == "cancelled") == cancelled
        assert cancelled or tokens == whole


@given(requests=REQUESTS, before=st.integers(0, 9))
def test_after_an_interrupt_all_requests_go_on(requests: list[Any], before: int) -> None:
    made, seen = scheduled(), list[GenerationOutput]()
    names = [add(made, *each) for each in requests]
    LOOPS[-1].failures = [*[None] * before, KeyboardInterrupt()]
    interrupted = 0
    while made.pending and not interrupted:
        try:
            seen += made.step()
        except KeyboardInterrupt:
            interrupted += 1
    done = run_out(made, seen)
    for name, each in zip(names, requests, strict=True):
        assert done[name].generated_tokens == expected(*each)


def test_a_failed_step_is_repeated_by_each_request_alone() -> None:
    made = scheduled()
    LOOPS[-1].failures = [None, None, RuntimeError("of both")]
    for prompt in ([1], [2, 2]):
        add(made, prompt, 9)
    run_out(made)
    decoding = [call for call in LOOPS[-1].calls if call != "prefill"]
    assert decoding[0] == [(1,), (2, 2)]
    assert decoding[1] in ([(1,)], [(2, 2)])
    assert all(len(rows) == 1 for rows in decoding[1:3])
    assert max(map(len, decoding[1:])) <= ROWS


def test_an_error_of_kvpass_ends_the_request_at_once() -> None:
    made = scheduled(rows=1)
    LOOPS[-1].failures = [CacheHandleError("not possible")]
    one, other = add(made, [1]), add(made, [2])
    done = run_out(made)
    cause: Any = done[one].cause
    assert done[one].status is RequestStatus.FAILED
    assert "not possible" in str(done[one].error)
    assert cause.__traceback__ is None  # it would keep tensors alive
    assert LOOPS[-1].calls.count("prefill") == 2  # it is not repeated
    assert done[other].generated_tokens == expected([2], 5)


def test_a_model_without_position_ids_has_one_request_at_a_time() -> None:
    made = scheduled(rows=3)
    LOOPS[-1].takes_positions = False
    for prompt in ([1], [2], [3]):
        add(made, prompt)
    run_out(made)
    assert all(len(rows) == 1 for rows in LOOPS[-1].calls if rows != "prefill")


def test_a_request_keeps_its_cache_if_it_is_to() -> None:
    made = scheduled()
    kept, other = add(made, [4, 5], 3, keep=True), add(made, [6])
    done = run_out(made)
    assert done[kept].cache == ("cache", (4, 5), 4)  # all tokens but the last
    assert done[other].cache is None


def test_long_prompts_run_in_chunks_between_which_others_decode() -> None:
    made = scheduled()
    add(made, [1], 20)
    seen = made.step()
    add(made, list(range(12)), 2)
    run_out(made, seen)
    prefills = [number for number, call in enumerate(LOOPS[-1].calls) if call == "prefill"][1:]
    assert len(prefills) == 3
    assert all(b - a > 1 for a, b in itertools.pairwise(prefills))


# -- refusals and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 0.5])
def test_rows_need_a_number_of_slots(budget: Any) -> None:
    with pytest.raises(BudgetError, match=f"budget={budget}: rows have equally many slots for every request"):
        scheduled(budget=budget)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(prompt=[1, VOCABULARY]), "token 50 is not in the vocabulary of 50"),
        (dict(prompt=[1], stop=list(range(MAX_STOPS + 1))), "9 tokens to stop at; at most 8 are possible"),
        (dict(prompt=[1], name="taken"), "request 'taken' exists already"),
        (dict(prompt=[1] * 9, pin=[(0, 8)]), "8 tokens are to stay, which leaves 0"),
    ],
)
def test_a_refused_request_leaves_nothing(given: dict[str, Any], message: str) -> None:
    made = scheduled()
    add(made, [1], name="taken")
    before = made.number
    with pytest.raises(RequestError, match=message):
        add(made, **given)
    assert (made.pending, made.number, len(made.queue)) == (1, before, 1)


def test_a_policy_that_keeps_all_refuses_what_exceeds_its_slots() -> None:
    made = scheduled(policy="full", budget=8)
    add(made, [1] * 4, 5)
    with pytest.raises(RequestError, match="4 tokens and 6 new ones exceed the budget of 8"):
        add(made, [1] * 4, 6)


@given(own=st.lists(st.sampled_from([None, "req_0", "req_1", "req_3"]), max_size=6))
def test_names_are_unique(own: list[str | None]) -> None:
    made, names = scheduled(), list[str]()
    for name in own:
        adding: Callable[[], str] = lambda name=name: add(made, [1], name=name)  # noqa: E731
        if name in names:
            with pytest.raises(RequestError, match="exists already"):
                adding()
        else:
            names.append(adding())
    assert len(set(names)) == len(names)
    assert sorted(run_out(made)) == sorted(names)


def test_a_batch_gets_its_outputs_and_leaves_those_of_others() -> None:
    made = scheduled()
    other = add(made, [9])
    names, done = made.add_all([lambda: add(made, [1]), lambda: add(made, [VOCABULARY]), lambda: add(made, [2])])
    outputs = made.run_all(names, done)
    assert [outputs[name].status.name for name in names] == ["FINISHED", "FAILED", "FINISHED"]
    assert outputs[names[0]].generated_tokens == expected([1], 5)
    rest = run_out(made)
    assert list(rest) == [other]
    assert rest[other].generated_tokens == expected([9], 5)


def test_outputs_are_popped_one_by_one() -> None:
    made = scheduled()
    for prompt in ([1], [2]):
        add(made, prompt, 4)
    popped = []
    while (output := made.pop_output(made.step)) is not None:
        popped.append(output)
    tokens = [token for output in popped if output.request_id == "req_1" for token in output.new_tokens]
    assert tokens == expected([2], 4)
    assert [output.request_id for output in popped if output.is_finished()] == ["req_0", "req_1"]
