"""Test requests on one decode graph: each gets the same tokens as alone, whatever happens to others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

import kvpass
from kvpass import GenerationOutput, RequestStatus
from kvpass.decoding import request_batch, scheduler, stepping
from kvpass.decoding.scheduler import RequestScheduler
from tests.decoding.outputs import last_outputs
from tests.models import build, discard_compiled_code, model_with_unequal_layers, prompt
from tests.strategies import MODEL_SPECIFIC
from tests.test_invariants import settings

LENGTHS = (3, 17, 9, 1, 12, 30, 5)
MOST = (6, 3, 14, 9, 1, 7, 12)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [prompt(1, n, ())[0][0].tolist() for n in lengths]


def serving_loop(model: Any = None, **given: Any) -> kvpass.DecodeLoop:
    settings = {"policy": "h2o", "budget": 8, "inner": "eager", "rows": 3, "read_interval": 4, **given}
    return kvpass.DecodeLoop(build("Llama", layers=1) if model is None else model, **settings)


def alone(model: Any, ids: list[int], most: int, **given: Any) -> list[int]:
    """Return the tokens of a loop with one conversation."""
    loop = kvpass.DecodeLoop(model, **{"policy": "h2o", "budget": 8, "inner": "eager", **given})
    loop.prompt(torch.tensor([ids]))
    return loop.generate(most)[0].tolist()


def ended(loop: kvpass.DecodeLoop, seen: Sequence[GenerationOutput] = ()) -> dict[str, GenerationOutput]:
    """Return the last output of each request, and check that all partial outputs, with `seen`, add up to it."""
    return last_outputs(loop, {output.request_id: list(output.new_tokens) for output in seen})


def each_is_as_alone(name: str, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> None:
    given = {**settings(name, "Llama", 8), "inner": "eager", "prefill_chunk": 8, **more}
    model = build("Llama", layers=2 if name in MODEL_SPECIFIC else 1)
    loop = kvpass.DecodeLoop(model, **given, rows=3, read_interval=4)
    names = [loop.add(ids, max_new_tokens=most) for ids, most in zip(prompts(lengths), MOST, strict=False)]
    done = ended(loop)
    single = kvpass.DecodeLoop(model, **given)
    for request, ids, most in zip(names, prompts(lengths), MOST, strict=False):
        single.reset()
        single.prompt(torch.tensor([ids]))
        assert done[request].generated_tokens == single.generate(most)[0].tolist()
        assert (done[request].finish_reason, done[request].status) == ("length", RequestStatus.FINISHED)
        assert done[request].prompt_ids == ids


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["streaming", "cascade", "buzz", "d2o", "random", "kv_align", "ada_kv", "duo_attention"]
)
def test_each_request_gets_what_it_gets_alone(name: str) -> None:
    each_is_as_alone(name)


@pytest.mark.slow
def test_rows_get_more_slots_when_a_request_needs_them() -> None:
    """Test d2o, whose layer budgets depend on the prompt: later prompts need more slots in some layers."""
    model = model_with_unequal_layers(3)
    given: dict[str, Any] = {"policy": "d2o", "budget": 8}
    loop, met = serving_loop(model, **given), []
    names = [loop.add(ids, max_new_tokens=9) for ids in prompts((30, 5, 9, 40, 17))]
    done: dict[str, GenerationOutput] = {}
    while loop.pending:
        done |= {output.request_id: output for output in loop.step() if output.is_finished()}
        met.append([layer.capacity for layer in kvpass.inspect(loop).layers])
    for name, ids in zip(names, prompts((30, 5, 9, 40, 17)), strict=True):
        assert done[name].generated_tokens == alone(model, ids, 9, **given)
    assert all(a <= b for one, other in itertools.pairwise(met) for a, b in zip(one, other, strict=True))
    assert met[0] != met[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sage", {"refresh_interval": 3}),
        ("sage", {"select_at": "overflow", "budget": 14}),
        ("h2o", {"interval": 3}),
    ],
)
def test_steps_that_compact(name: str, options: dict[str, object]) -> None:
    each_is_as_alone(name, **options)


@pytest.mark.parametrize("longer", [8, 17, 30])
def test_rows_become_shorter_before_a_step_is_repeated(longer: int) -> None:
    """Check a step through the model beside a free row whose request had seen more tokens than the rows now have."""
    loop, ids = serving_loop(policy="full", budget=40), prompts((longer, 5))
    names = [loop.add(one, max_new_tokens=most) for one, most in zip(ids, (2, 8), strict=True)]
    done = ended(loop)
    expected = alone(loop.model, ids[1], 8, policy="full", budget=40)
    assert done[names[1]].generated_tokens == expected, done[names[1]].error


class WithoutPositionIds(torch.nn.Module):
    """A Llama whose forward takes no position ids, as many wrappers' do: positions follow from the cache's length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_with_unequal_layers(1)

    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
        return self.inner(input_ids, past_key_values=past_key_values, use_cache=use_cache)


def bart() -> Any:
    """Return a tiny decoder of BART, whose learned positions follow from the cache's length."""
    sizes = dict(vocab_size=128, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64)
    config = transformers.BartConfig(**sizes, encoder_layers=1, is_decoder=True, is_encoder_decoder=False, init_std=0.5)
    torch.manual_seed(0)
    return transformers.BartForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore:.* one after the other:kvpass.KVPassWarning")
@pytest.mark.parametrize("policy", ["h2o", "full"])
@pytest.mark.parametrize(("make", "rows"), [(bart, 1), (bart, 3), (WithoutPositionIds, 3)])
def test_models_without_position_ids_count_from_the_begin_of_each_request(make: Any, rows: int, policy: str) -> None:
    model, lengths = make(), (30, 5, 12, 3)
    given: dict[str, Any] = dict(policy=policy, budget=8 if policy == "h2o" else 48)
    outputs = serving_loop(model, **given, rows=rows).generate_batch(prompts(lengths), max_new_tokens=9)
    for output, ids in zip(outputs.values(), prompts(lengths), strict=True):
        assert output.generated_tokens == alone(model, ids, 9, **given), output.error


def test_rows_that_cannot_decode_together_are_named() -> None:
    with pytest.warns(
        kvpass.KVPassWarning, match="WithoutPositionIds takes no `position_ids`.*one after the other"
    ) as made:
        serving_loop(WithoutPositionIds(), rows=2).reset()
    assert [each.filename for each in made if "one after the other" in str(each.message)] == [__file__]


@pytest.mark.slow
def test_a_request_beyond_a_full_cache_is_refused_and_others_go_on() -> None:
    """Check that rows end at their own lengths, and that a request that does not fit is refused alone."""
    model = build("Llama", layers=1)
    loop = serving_loop(model, policy="full", budget=24, rows=2)
    fits = [loop.add(ids, max_new_tokens=25 - len(ids)) for ids in prompts((20, 3, 9, 1, 24))]
    with pytest.raises(kvpass.RequestError, match="budget of 24"):
        loop.add(prompts((20,))[0], max_new_tokens=6)
    done = ended(loop)
    for name, ids in zip(fits, prompts((20, 3, 9, 1, 24)), strict=True):
        assert done[name].generated_tokens == alone(model, ids, 25 - len(ids), policy="full", budget=64)


def test_refusals() -> None:
    with pytest.raises(kvpass.PolicyError, match="a loop of requests decodes by `step`"):
        next(serving_loop().stream(3))
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
    with pytest.raises(kvpass.BudgetError, match="budget=None"):
        serving_loop(policy="full", budget=None)


def gpt2(positions: int) -> Any:
    model = build("GPT2", layers=1)
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:positions].clone())
    return model


def test_a_request_that_fails_ends_alone() -> None:
    """Check that one failed request ends alone, while the others are served.

    A step of several requests does not tell which one is at fault. So each request runs alone until it is past that
    step: no request can end because another one fails, in the prompt or in any step.
    """
    model = gpt2(48)
    loop = serving_loop(model, policy="h2o", budget=16)
    wanted = [(10, 20), (40, 20), (40, 9), (5, 30), (60, 3), (44, 12), (48, 1)]
    names = [
        loop.add(ids, max_new_tokens=most)
        for ids, (_, most) in zip(prompts([n for n, _ in wanted]), wanted, strict=True)
    ]
    done = ended(loop)
    single = kvpass.DecodeLoop(model, "h2o", budget=16, inner="eager")
    for name, (length, most) in zip(names, wanted, strict=True):
        output, fits = done[name], length + most - 1 <= 48
        assert (output.status.name, output.finish_reason) == (("FINISHED", "length") if fits else ("FAILED", "error"))
        assert fits or "IndexError" in str(output.error)
        if fits:
            single.prompt(torch.tensor(prompts([length])))
            assert output.generated_tokens == single.generate(most)[0].tolist()
            single.reset()


def test_reset_forgets_all_requests() -> None:
    loop, fresh = (serving_loop(build("Llama", layers=1), temperature=0.9) for _ in range(2))
    for ids in prompts():  # in rows, in prefill and in the queue
        loop.add(ids, max_new_tokens=6)
    loop.step()
    loop.step()
    loop.reset()
    assert (loop.pending, loop.cache, loop.step()) == (0, None, [])
    made, expected = (each.generate_batch(prompts(), max_new_tokens=6) for each in (loop, fresh))
    assert {name: output.generated_tokens for name, output in made.items()} == {
        name: output.generated_tokens for name, output in expected.items()
    }


def test_a_request_that_cannot_be_admitted_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that iteration ends whatever admission raises: with the end of the request, or with the error."""
    loop = serving_loop(build("Llama", layers=1))
    raised: list[Exception] = []

    def check(*_: Any) -> None:
        if raised:
            raise raised.pop()

    monkeypatch.setattr(scheduler, "check_holds_only_slots", check)
    raised.append(kvpass.CacheHandleError("the layers hold more"))
    first = loop.generate_batch(prompts((5, 5)), max_new_tokens=3)
    assert [output.status.name for output in first.values()] == ["FAILED", "FINISHED"]
    assert next(iter(first.values())).error == "the layers hold more"
    name = loop.add(prompts((5,))[0], max_new_tokens=3)
    raised.append(kvpass.BudgetError("no memory"))
    with pytest.raises(kvpass.BudgetError, match="no memory"):
        list(loop)
    assert loop.pending == 1
    assert ended(loop)[name].generated_tokens == [*first.values()][1].generated_tokens
    for errors, status in (
        ([RuntimeError("once")], "FINISHED"),
        ([RuntimeError("always")] * 9, "FAILED"),
    ):
        name = loop.add(prompts((5,))[0], max_new_tokens=3)
        raised += errors
        assert ended(loop)[name].status.name == status
        raised.clear()
    monkeypatch.setattr(scheduler, "check_holds_only_slots", lambda *_: None)
    put = request_batch.RequestBatch.insert
    monkeypatch.setattr(request_batch.RequestBatch, "insert", lambda *how: (check(), put(*how))[1])
    for errors, status in (
        ([RuntimeError("once")], "FINISHED"),
        ([RuntimeError("twice"), RuntimeError("twice")], "FAILED"),
    ):
        name = loop.add(prompts((5,))[0], max_new_tokens=3)
        raised += errors
        assert ended(loop)[name].status.name == status


def test_generated_names_are_those_of_no_other_request() -> None:
    loop, (ids,) = serving_loop(), prompts((5,))
    names = [loop.add(ids, request_id="req_1"), *(loop.add(ids, max_new_tokens=2) for _ in range(2))]
    assert len(set(names)) == 3
    batch = loop.generate_batch([ids, [10**6], ids], max_new_tokens=2)  # the second request is refused
    assert not set(names) & set(batch)
    assert [output.status.name for output in batch.values()] == ["FINISHED", "FAILED", "FINISHED"]
    assert set(ended(loop)) == set(names)


def test_a_refused_request_of_a_batch_is_not_a_pending_one_of_that_name() -> None:
    loop, (ids,) = serving_loop(), prompts((5,))
    loop.add(ids, request_id="req_1", max_new_tokens=2)
    (output,) = loop.generate_batch([[10**6]]).values()
    assert (output.request_id != "req_1", output.status.name) == (True, "FAILED")
    assert ended(loop)["req_1"].status.name == "FINISHED"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (dict(ids=[500]), "not in the vocabulary"),
        (dict(ids=[500], request_id="mine"), "not in the vocabulary"),
        (dict(ids=[3], stop=[*range(9)]), "9 tokens to stop at"),
        (dict(ids=[3], request_id="req_0"), "exists already"),
    ],
)
def test_a_refused_request_changes_neither_names_nor_seeds_of_later_ones(refused: Any, message: str) -> None:
    found = []
    for refuses in (False, True):
        loop, (ids,) = serving_loop(temperature=1.0), prompts((5,))
        names = [loop.add(ids, max_new_tokens=6)]
        if refuses:
            with pytest.raises(kvpass.RequestError, match=message):
                loop.add(**refused)
        names += [loop.add(ids, max_new_tokens=6) for _ in range(2)]
        done = ended(loop)
        found.append([(name, done[name].generated_tokens) for name in names])
    assert found[0] == found[1]


def windowed(window: int) -> Any:
    config = transformers.MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("given", [dict(budget=16), dict(budget=6), dict(policy="streaming", budget=8)], ids=str)
def test_models_with_a_sliding_window(given: dict[str, Any]) -> None:
    """Check that a layer's window is constant in its cache, before the first token and after each prompt."""
    discard_compiled_code()
    model, lengths = windowed(8), (5, 14, 3, 9)
    done = [*serving_loop(model, **{**given, "rows": 2}).generate_batch(prompts(lengths), max_new_tokens=12).values()]
    for output, ids in zip(done, prompts(lengths), strict=True):
        assert output.generated_tokens == alone(model, ids, 12, **given), output.error


def test_caches_that_hold_more_than_slots() -> None:
    """Check that row state is found in containers too; values that an empty cache has are constants."""

    class Layer:
        def __init__(self, **held: Any) -> None:
            self.keys = self.values = None
            self.__dict__.update(held)

    class Held:
        def __init__(self, *layers: Layer) -> None:
            self.layers = layers

    window, count = torch.tensor(8), torch.tensor(5)
    for held in ({"states": torch.zeros(1, 2)}, {"states": {0: torch.zeros(1, 2)}}, {"count": count}, {"n": [window]}):
        with pytest.raises(kvpass.CacheHandleError, match=f"layer 1 .* has {next(iter(held))} in addition to keys"):
            request_batch.check_holds_only_slots(
                Held(Layer(), Layer(**held)), Held(Layer(), Layer(count=torch.tensor(0)))
            )
    for empty in (None, Held(), Held(Layer(window=torch.tensor(9)))):
        with pytest.raises(kvpass.CacheHandleError, match="has window in addition"):
            request_batch.check_holds_only_slots(Held(Layer(window=window)), empty)
    request_batch.check_holds_only_slots(Held(Layer(window=window, size=3)), Held(Layer(window=window.clone())))
    request_batch.check_holds_only_slots((), None)


def faulty(chance: float, seed: int) -> Any:
    """Return a function that raises with the given probability."""
    drawn = random.Random(seed)

    def fail(*_: Any) -> None:
        if drawn.random() < chance:
            raise RuntimeError("out of luck")

    return fail


@pytest.mark.slow
def test_a_thousand_requests_are_neither_lost_nor_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mix in cancelled requests, bad requests, and errors in steps and prompts."""
    count, drawn, model = 1000, random.Random(7), build("Llama", layers=1)
    kinds = [(drawn.choice(LENGTHS), drawn.choice(MOST)) for _ in range(12)]
    expected = {kind: alone(model, prompts((kind[0],))[0], kind[1]) for kind in set(kinds)}
    loop, wanted, done = serving_loop(model), {}, {}
    fail, run = faulty(0.03, count), stepping.RepeatedStep.run
    monkeypatch.setattr(stepping.RepeatedStep, "run", lambda step: (fail(), run(step))[1])
    read = scheduler.run_chunks
    monkeypatch.setattr(scheduler, "run_chunks", lambda *how, **named: (fail(), read(*how, **named))[1])
    while len(wanted) < count or loop.pending:
        for _ in range(drawn.randint(0, 3) if len(wanted) < count else 0):
            kind = drawn.choice(kinds)
            wanted[loop.add(prompts((kind[0],))[0], max_new_tokens=kind[1])] = kind
            with pytest.raises(kvpass.RequestError, match="vocabulary"):
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
    assert isinstance(loop.driver, RequestScheduler)
    assert not loop.driver.known
    assert not any(loop.driver.rows)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model = build("Llama")
    loop = serving_loop(model, inner="inductor", prefill_chunk=8)
    loop.generate_batch(prompts((1, 3, 30)), max_new_tokens=4)  # torch traces a prompt of one token separately
    with torch.compiler.set_stance("fail_on_recompile"):
        names = [loop.add(ids, max_new_tokens=most) for ids, most in zip(prompts(), MOST, strict=True)]
        done = ended(loop)
    for name, ids, most in zip(names, prompts(), MOST, strict=True):
        assert done[name].generated_tokens == alone(model, ids, most, prefill_chunk=8)


@pytest.mark.parametrize("temperature", [1e31, 1e39, 1e308])
def test_a_temperature_beyond_float32_is_refused(temperature: float) -> None:
    loop = serving_loop()
    with pytest.raises(kvpass.PolicyError, match="temperature"):
        loop.add([3], temperature=temperature)
    with pytest.raises(kvpass.PolicyError, match="temperature"):
        serving_loop(temperature=temperature)


@pytest.mark.parametrize("wrong", ["a span", "a mask", "a prefix"])
def test_a_batch_with_a_wrong_argument_leaves_no_requests(wrong: str) -> None:
    loop, ids = serving_loop(), prompts((9, 5))
    named: dict[str, Any] = {
        "a span": {"pin": [(0, 7)]},
        "a mask": {"pin": torch.ones(9, dtype=torch.bool)},
        "a prefix": {"prefix": object()},
    }[wrong]
    with pytest.raises(kvpass.KVPassError, match=r"pin|prefix|cache"):
        loop.generate_batch(ids, max_new_tokens=3, **named)
    assert loop.step() == []
    (output,) = loop.generate_batch(ids[:1], max_new_tokens=3).values()
    assert (output.status.name, len(output.generated_tokens)) == ("FINISHED", 3)
