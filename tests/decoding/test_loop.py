"""Compare DecodeLoop with `generate`, and check that it works without the host."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils

import kvpass
from kvpass.decoding import loop as decode
from kvpass.decoding import synthetic_conversation
from kvpass.decoding.conversations import Conversations, LoopState
from tests.architectures import zoo
from tests.models import breaks, build, discard_compiled_code, graphs, prompt
from tests.step_settings import step_settings
from tests.strategies import ROWS, fitting_budget
from tests.test_invariants import settings

pytestmark = pytest.mark.usefixtures("shared_traces")


@functools.cache
def llama() -> Any:
    return build("Llama", layers=1)


HOST = {"_local_scalar_dense", "nonzero", "item", "is_nonzero"}


def greedy(model: Any, ids: Tensor, mask: Tensor, tokens: int, **how: Any) -> Tensor:
    """Return the tokens of the uncompiled model's `generate`."""
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **how)
    return out[:, ids.shape[1] :]


def loop_on(model: Any, **given: Any) -> kvpass.DecodeLoop:
    return kvpass.DecodeLoop(model, **{"policy": "window", "budget": 64, "inner": "eager", **given})


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
@pytest.mark.parametrize("padding", [(), (3, 1, 0)])
def test_equal_to_generate_until_something_is_evicted(architecture: str, padding: tuple[int, ...]) -> None:
    discard_compiled_code()
    model, (ids, mask) = build(architecture, layers=1), prompt(3, 9, padding)
    loop = loop_on(model, read_interval=5)
    loop.prompt(ids, mask)
    assert torch.equal(loop.generate(12), greedy(model, ids, mask, 12, eos_token_id=-1))
    assert (graphs(), breaks()) == (2, 0)


def test_reset_begins_a_new_conversation_on_the_same_code() -> None:
    discard_compiled_code()
    loop, ids = loop_on(llama(), policy="h2o", budget=8), prompt(2, 11, ())[0]
    loop.prompt(ids)
    expected = loop.generate(9)
    loop.prompt(ids[:, :3])
    before = graphs()
    loop.reset()
    assert loop.cache is None
    with pytest.raises(kvpass.CacheHandleError, match="needs a prompt"):
        loop.generate(1)
    loop.prompt(ids)
    assert torch.equal(loop.generate(9), expected)
    assert graphs() == before


@pytest.mark.parametrize("rows", [None, 2])
def test_inference_mode_may_change_between_calls(rows: int | None) -> None:
    """Check that inference mode can change between calls, because traces do not depend on it."""
    discard_compiled_code()
    ids = prompt(1)[0]

    def tokens(first: bool, second: bool) -> list[Tensor]:
        loop, made = loop_on(llama(), rows=rows, read_interval=2), []

        def decode() -> None:
            if rows is None:
                made.append(loop.generate(4))
            else:
                made.extend(torch.tensor([output.new_tokens]) for _ in range(3) for output in loop.step())

        for mode in (first, second):
            with torch.inference_mode(mode):
                given = ids.clone()
                loop.prompt(given) if rows is None else loop.add(given[0], max_new_tokens=30)
                decode()
            with torch.inference_mode(not mode):
                decode()
        return made

    expected, count = torch.cat(tokens(False, False), 1), graphs()
    assert torch.equal(torch.cat(tokens(True, False), 1), expected)
    assert torch.equal(torch.cat(tokens(False, True), 1), expected)
    assert graphs() == count


def test_a_loop_on_weights_of_inference_mode_is_saved_right_after_its_prompt(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = llama()
    loops = [loop_on(model) for _ in range(2)]
    loops[0].prompt(prompt(1)[0])
    kvpass.save_cache(loops[0], tmp_path / "cache")
    kvpass.load_cache(tmp_path / "cache", loops[1])
    assert torch.equal(*(loop.generate(3) for loop in loops))


def compile_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    return model


def compile_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compile_model", [functools.partial(torch.compile, backend="eager"), compile_forward, compile_in_place]
)
def test_a_model_that_another_backend_has_compiled(compile_model: Callable[[Any], Any]) -> None:
    theirs, ids = compile_model(build("Llama", layers=1)), prompt(1)[0]
    loops = [loop_on(model) for model in (llama(), theirs, theirs)]
    for loop in loops[:2]:
        loop.prompt(ids)
    assert torch.equal(*(loop.generate(3) for loop in loops[:2]))
    before = graphs()
    loops[2].prompt(ids)
    assert torch.equal(loops[1].generate(3), loops[2].generate(6)[:, 3:])
    assert graphs() == before


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("h2o", "buzz", "d2o") else pytest.mark.slow) for n in ROWS]
)
def test_equal_to_generate_with_every_policy(name: str) -> None:
    """Compare `generate` on the compiled model, which evicts in every step, with the loop."""
    model, (ids, mask) = build("Llama"), prompt(3, 12, (3, 1, 0))
    given = {**settings(name, "Llama", 8), "inner": "eager"}
    loop = kvpass.DecodeLoop(model, **given)
    loop.prompt(ids, mask)
    got = loop.generate(14)
    held = kvpass.inspect(loop)
    discard_compiled_code()
    kvpass.compile(model, **given)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=14, do_sample=False, pad_token_id=0, eos_token_id=-1,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert torch.equal(got, out.sequences[:, 12:])
    for ours, theirs in zip(held.layers, kvpass.inspect(out.past_key_values).layers, strict=True):
        assert torch.equal(ours.positions, theirs.positions)


def test_a_full_cache_grows() -> None:
    model, (ids, mask) = llama(), prompt(1, 9, ())
    loop = kvpass.DecodeLoop(model, "full", inner="eager", read_interval=64)
    loop.prompt(ids, mask)
    assert torch.equal(loop.generate(300), greedy(model, ids, mask, 300, eos_token_id=-1))
    assert kvpass.inspect(loop).layers[0].seen == 9 + 299


@pytest.mark.slow
def test_a_loop_that_keeps_every_token_warms_up_within_its_budget() -> None:
    loop = loop_on(llama(), policy="full", budget=64)
    loop.warm(2)
    assert loop.cache is None
    ids, mask = prompt(2, 60, (3, 0))
    loop.prompt(ids, mask)
    assert torch.equal(loop.generate(5), greedy(llama(), ids, mask, 5, eos_token_id=-1))


def small_budgets() -> Iterator[Any]:
    """Yield policies with their smallest budgets, with and without pinned prompts."""
    for name, pinned in itertools.product(ROWS, (False, True)):
        given = settings(name, "Llama", 1, layers=1)
        options = {key: value for key, value in given.items() if key not in ("policy", "budget")}
        try:
            chosen = kvpass.policies.resolve(name, {**options, "keep_prompt": pinned})
        except kvpass.PolicyError:
            continue
        least = fitting_budget(chosen, 1) + pinned
        for budget, rows in itertools.product((least, least + 1, least + 16), (1, 2)):
            default = (name, pinned, budget - least, rows) in (("full", False, 16, 2), ("h2o", True, 16, 1))
            marks = [] if default else [pytest.mark.slow, pytest.mark.some(6)]
            yield pytest.param(chosen, budget, rows, marks=marks, id=f"{name}-{budget}-{rows}{'-pinned' * pinned}")


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "budget", "rows"), list(small_budgets()))
def test_a_small_budget_warms_up(
    policy: kvpass.policies.Policy, budget: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that a loop that accepts a prompt of one token warms up, with prompts and with requests."""
    discard_compiled_code()
    budget = next(each for each in itertools.count(budget) if fitting_budget(policy, each) == each)
    loop = loop_on(llama(), policy=policy, budget=budget, read_interval=4)
    loop.warm(rows)
    assert loop.cache is None
    loop.prompt(*prompt(rows, 1, ()))
    loop_on(llama(), policy=policy, budget=budget, read_interval=4, prefill_chunk=4, rows=rows).warm()
    assert "kvpass.warm" not in {record.name for record in caplog.records}  # no graph was left out


def test_parts_that_are_not_warmed_up_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_conversation, "prompt_lengths", lambda *_: [4, 40])
    monkeypatch.setattr(synthetic_conversation.TokenAllowance, "of", lambda *_: synthetic_conversation.TokenAllowance())
    loop_on(llama(), policy="full", budget=24, read_interval=1).warm()
    assert "not all of prompts [1, 40] is compiled ahead: policy 'full' keeps every token" in caplog.text


@pytest.mark.slow
def test_no_prompt_of_a_warm_up_exceeds_the_positions_that_a_model_has_learned() -> None:
    loop = loop_on(build("GPT2", layers=1), policy="streaming", budget=500, read_interval=4)
    loop.warm()
    assert loop.model.config.max_position_embeddings < 500 + 16


def test_a_budget_that_holds_no_prompt_is_an_error() -> None:
    loop = loop_on(llama(), policy="h2o", keep_prompt=True, budget=2)
    with pytest.raises(kvpass.BudgetError, match="1 tokens are to stay, which leaves 1 of it for others"):
        loop.warm()


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    discard_compiled_code()
    model, (ids, mask) = llama(), prompt(2, 9, (2, 0))
    loop = loop_on(model, policy="h2o", inner="inductor", read_interval=4)
    loop.prompt(ids, mask)
    with torch.compiler.set_stance("default"):
        first = loop.generate(3)
    with torch.compiler.set_stance("fail_on_recompile"):
        rest = loop.generate(9)
    assert torch.equal(torch.cat([first, rest], 1), greedy(model, ids, mask, 12, eos_token_id=-1))
    assert (graphs(), breaks()) == (2, 0)


def test_continuing_is_as_if_it_had_not_stopped() -> None:
    model, (ids, mask) = llama(), prompt(3, 9, (3, 1, 0))
    whole, parts = loop_on(model, policy="h2o", budget=8), loop_on(model, policy="h2o", budget=8, read_interval=3)
    whole.prompt(ids, mask)
    parts.prompt(ids, mask)
    expected = whole.generate(15)
    got = [parts.generate(4)]
    kvpass.inspect(parts)
    got += [parts.generate(1), parts.generate(10)]
    assert torch.equal(torch.cat(got, 1), expected)


def stopped(rows: Tensor, stop: list[int]) -> list[list[int]]:
    """Return each row up to its first stop token."""
    ends = [next((i + 1 for i, t in enumerate(row) if t in stop), len(row)) for row in rows.tolist()]
    return [row[:end] for row, end in zip(rows.tolist(), ends, strict=True)]


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [1, 4, 32])
def test_stop_tokens(every: int) -> None:
    model, (ids, mask) = llama(), prompt(3, 9, (3, 1, 0))
    free = greedy(model, ids, mask, 20, eos_token_id=-1)
    stop = [int(free[0, 6]), int(free[1, 2])]
    loop = loop_on(model, read_interval=every, stop=stop, pad=0)
    loop.prompt(ids, mask)
    got = loop.generate(20)
    expected = stopped(free, stop)
    assert got.shape[1] == max(map(len, expected))
    for row, said in zip(got.tolist(), expected, strict=True):
        assert row == said + [0] * (len(row) - len(said))


def test_tokens_after_a_stop_are_not_cached() -> None:
    """Check that a further prompt sees the text up to the stop, however far the loop decoded ahead."""
    model, (ids, mask) = llama(), prompt(2, 9, (2, 0))
    more, more_mask = prompt(2, 5, (0, 1))
    free = greedy(model, ids, mask, 20, eos_token_id=-1)
    stop = [int(free[0, 3])]
    said = stopped(free[:, :8], stop)
    loop = loop_on(model, read_interval=8, stop=stop)
    loop.prompt(ids, mask)
    loop.generate(8)
    loop.prompt(more, more_mask)
    loop.stop = torch.tensor([], dtype=torch.int64)
    got = loop.generate(6)
    for row in range(2):
        real = [*ids[row, mask[row].bool()].tolist(), *said[row], *more[row, more_mask[row].bool()].tolist()]
        alone = torch.tensor([real])
        assert torch.equal(got[row : row + 1], greedy(model, alone, torch.ones_like(alone), 6, eos_token_id=-1))


def test_a_stream_hands_out_as_it_goes() -> None:
    model, (ids, mask) = llama(), prompt(2, 9, ())
    loop = loop_on(model, read_interval=4)
    loop.prompt(ids, mask)
    stream = loop.stream(10)
    first = [next(stream) for _ in range(4)]
    assert kvpass.inspect(loop).layers[0].seen == 9 + 3  # the model processed three of the four tokens
    assert torch.equal(torch.stack([*first, *stream], 1), greedy(model, ids, mask, 10, eos_token_id=-1))


def test_a_stream_that_is_left_early_loses_nothing() -> None:
    """Check that every reader gets undelivered tokens first, so that no number of taken tokens loses any."""
    model, (ids, mask) = llama(), prompt(2, 9, ())
    expected = greedy(model, ids, mask, 16, eos_token_id=-1)
    for taken in ((1, 2, 5), (4, 4), (3, 1, 1, 9)):
        loop, got = loop_on(model, read_interval=4), []
        loop.prompt(ids, mask)
        for count in taken:
            got += list(itertools.islice(loop.stream(16), count))
        got += loop.generate(16 - len(got)).unbind(1)
        assert torch.equal(torch.stack(got, 1), expected)


def test_tokens_before_an_error_are_handed_out_later() -> None:
    model, (ids, mask) = llama(), prompt(2, 9, ())
    loop = loop_on(model, policy="full", budget=20, read_interval=4)
    loop.prompt(ids, mask)
    with pytest.raises(kvpass.BudgetError, match="is full"):
        loop.generate(16)
    assert torch.equal(loop.generate(12), greedy(model, ids, mask, 12, eos_token_id=-1))


@pytest.mark.parametrize("interval", [2, 7, 100])
def test_a_loop_may_be_read_at_another_interval(interval: int) -> None:
    model, (ids, mask) = llama(), prompt(2, 9, ())
    loop = loop_on(model, read_interval=4)
    loop.prompt(ids, mask)
    loop.read_interval = interval
    assert torch.equal(loop.generate(12), greedy(model, ids, mask, 12, eos_token_id=-1))


@pytest.mark.parametrize("forget", ["reset", "branch"])
def test_a_stream_ends_with_its_conversation(forget: str) -> None:
    loop, (ids, _) = loop_on(llama(), read_interval=4), prompt(1, 9, ())
    loop.prompt(ids)
    stream = loop.stream(9)
    next(stream)
    loop.reset() if forget == "reset" else loop.branch(loop.cache)
    with pytest.raises(kvpass.CacheHandleError, match="needs a prompt"):
        next(stream)


def test_a_row_that_has_stopped_stays_within_the_positions_of_the_model() -> None:
    """Check that a stopped row is fed at the position of its last token, not at later positions."""
    model, (ids, mask) = build("GPT2", layers=1), prompt(2, 9, (0, 6))
    with torch.no_grad():  # larger weights, because the original ones repeat one token
        for number, weight in enumerate(each for each in model.parameters() if each.ndim > 1):
            weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:12].clone())
    free = greedy(model, ids[:1], mask[:1], 4, eos_token_id=-1)[0]
    loop = loop_on(model, read_interval=8, stop=[int(free[3])])
    loop.prompt(ids, mask)
    assert loop.generate(9)[0, :4].tolist() == free.tolist()


def test_calls_of_generate_from_two_threads_each_get_tokens_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, (ids, _) = loop_on(llama(), read_interval=1), prompt(1, 9, ())
    loop.prompt(ids)
    expected = loop.generate(12)
    loop.reset()
    loop.prompt(ids)
    take, got = LoopState.next, []

    def slowly(state: LoopState, wanted: int) -> Tensor | None:
        time.sleep(0.005)  # outside of the turn of `next`, so that another thread can have one
        return take(state, wanted)

    monkeypatch.setattr(LoopState, "next", slowly)
    threads = [threading.Thread(target=lambda: got.append(loop.generate(6))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.cat(got, 1), expected)


SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.9)


@pytest.mark.parametrize("how", ["reset", "branch"])
def test_a_thread_that_forgets_the_conversation_waits_for_the_prompt_of_another(how: str) -> None:
    loop, (ids, _) = loop_on(llama()), prompt(1, 9, ())
    loop.prompt(ids)
    prefix = copy.deepcopy(loop.cache)
    model_call, called, goes_on = loop.model_call, threading.Event(), threading.Event()

    def waiting(*given: Any, **named: Any) -> Any:
        called.set()
        assert goes_on.wait(60)
        return model_call.call(*given, **named)

    loop.model_call = dataclasses.replace(model_call, call=waiting)
    forget = loop.reset if how == "reset" else functools.partial(loop.branch, prefix)
    threads = [threading.Thread(target=each) for each in (functools.partial(loop.prompt, ids), forget)]
    threads[0].start()
    assert called.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # until it waits for its turn
    goes_on.set()
    for thread in threads:
        thread.join()
    assert isinstance(loop.driver, Conversations)
    assert loop.driver.state is None
    assert (0 if loop.cache is None else kvpass.inspect(loop).seen) == (0 if how == "reset" else 9)


def test_samples_are_those_of_the_seed() -> None:
    model, (ids, mask) = llama(), prompt(3, 9, (3, 1, 0))
    said = []
    for seed in (1, 1, 2):
        torch.rand(3)  # consumes numbers of the global generator, which the loop does not use
        loop = loop_on(model, **SAMPLED, seed=seed)
        loop.prompt(ids, mask)
        said.append(loop.generate(12))
    assert torch.equal(said[0], said[1])
    assert not torch.equal(said[0], said[2])


class Watched(TorchDispatchMode):
    """Records every operation that waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["window", "h2o", "d2o", "tova", "roco"])
@pytest.mark.parametrize("given", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_step_asks_nothing_of_the_device(name: str, given: dict[str, Any]) -> None:
    model, (ids, mask) = llama(), prompt(2, 12, (2, 0))
    loop = loop_on(model, policy=name, budget=8, stop=[5], **given)
    loop.prompt(ids, mask)
    loop.generate(4)
    assert isinstance(loop.driver, Conversations)
    step = loop.driver.started().step
    assert step is not None
    with torch.no_grad(), Watched() as watched:
        step.run()
    assert len(watched.ran) > 50
    assert HOST.isdisjoint(watched.ran)


def test_a_model_without_its_graph_break_is_traced_anew() -> None:
    """Refuse a loop for a graph break, which torch keeps, and then make an equal one for the mended model."""
    model, (ids, _) = build("Llama"), prompt(2, 9, ())
    attention = model.model.layers[0].self_attn

    def breaking(*arguments: Any, **named: Any) -> Any:
        torch._dynamo.graph_break()
        return type(attention).forward(attention, *arguments, **named)

    attention.forward, broken = breaking, loop_on(model)
    broken.prompt(ids)
    with pytest.raises(kvpass.UnsupportedGraph, match="decode step in 2 graphs of kvpass"):
        broken.generate(2)
    del attention.forward
    mended = loop_on(model)
    mended.prompt(ids)
    assert mended.generate(4).shape == (2, 4)


def test_refusals() -> None:
    model, (ids, mask) = llama(), prompt(2, 9, ())
    with pytest.raises(kvpass.PolicyError, match="mode"):
        loop_on(model, mode="reduce-overhead")
    with pytest.raises(kvpass.PolicyError, match="options"):
        loop_on(model, options={"triton.cudagraphs": True})
    for wrong in (dict(read_interval=0), dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0)):
        with pytest.raises(kvpass.PolicyError, match=next(iter(wrong))):
            loop_on(model, **wrong)
    loop = loop_on(model)
    with pytest.raises(kvpass.CacheHandleError, match="prompt"):
        loop.generate(3)
    loop.prompt(ids, mask)
    with pytest.raises(kvpass.CacheHandleError, match="rows"):
        loop.prompt(ids[:1])


def test_hooks_leave_no_steps_behind() -> None:
    """Check that a hook on any module makes the next step call the model and drop recorded steps."""
    loop, (ids, _) = loop_on(llama()), prompt(1, 9, ())
    loop.prompt(ids)
    sizes = []
    for _ in range(4):
        loop.generate(3)
        assert isinstance(loop.driver, Conversations)
        step = loop.driver.started().step
        assert step is not None
        sizes.append((len(step.slots_by_key), len(step.callables)))
        torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert sizes[1:] == [(1, 1)] * 3


def test_a_model_without_a_padding_mask_takes_no_padding() -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.nn.Linear(2, 2)

        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            raise AssertionError("never gets here")

    ids, mask = prompt(2, 9, (2, 0))
    with pytest.raises(kvpass.PolicyError, match="attention_mask"):
        loop_on(Bare()).prompt(ids, mask)


def test_modes_are_passed_to_inductor() -> None:
    chosen = kvpass.backend("h2o", budget=8, mode="reduce-overhead")
    assert step_settings(chosen)["triton.cudagraphs"] is True
    assert "triton.cudagraphs" not in step_settings(kvpass.backend("h2o", budget=8))
    assert decode.CAPTURING[0] == "reduce-overhead"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("mistral", 5), ("mistral", 12), ("gemma2", 5)])
def test_layers_that_store_their_last_tokens_only(name: str, tokens: int) -> None:
    """Test windows of eight tokens that fill up in the prompt or in steps, which use different graphs."""
    discard_compiled_code()
    model, ids = zoo.build(name), torch.randint(3, 120, (1, tokens), generator=torch.Generator().manual_seed(0))
    loop = loop_on(model, policy="h2o", budget=32)
    loop.prompt(ids)
    assert torch.equal(loop.generate(12), greedy(model, ids, torch.ones_like(ids), 12, eos_token_id=-1))


class Turning(torch.nn.Module):
    """A model whose output changes from 14 tokens on."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        later = past_key_values is not None and past_key_values.get_seq_length() >= 14
        out = self.model(input_ids, past_key_values=past_key_values, use_cache=use_cache)
        out.logits = -out.logits if later else out.logits
        return out


@pytest.mark.slow
@torch.no_grad()
def test_repeated_steps_keep_dynamos_guards_on_the_length() -> None:
    discard_compiled_code()
    model, (ids, _) = Turning(build("Llama", layers=1)), prompt(1, 9, ())
    loop = loop_on(model)
    loop.prompt(ids)
    out, wanted = model(ids), []
    for _ in range(10):
        wanted.append(out.logits[:, -1].argmax(-1))
        out = model(wanted[-1][:, None], past_key_values=out.past_key_values)
    assert torch.equal(loop.generate(10), torch.stack(wanted, 1))


class Remembering(torch.nn.Module):
    """A model that stores a value of its calls in an attribute."""

    def __init__(self, model: Any, what: str) -> None:
        super().__init__()
        self.model, self.config, self.what = model, model.config, what
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        out = self.model(input_ids, past_key_values=past_key_values, use_cache=use_cache)
        if self.what == "a number":
            self.calls += 1
        elif self.what == "a tensor":
            self.last = out.logits.sum()
        elif past_key_values is not None and past_key_values.get_seq_length() >= 14:
            self.calls = past_key_values.get_seq_length()
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("what", ["a tensor", "a number", "a number from some length on"])
def test_a_model_that_sets_its_attributes_runs_at_every_step(what: str, rows: int | None) -> None:
    """Check that the model runs at every step, because repeated steps would not update its attributes."""
    discard_compiled_code()
    ours, theirs = (Remembering(build("Llama", layers=1), what) for _ in range(2))
    (ids, _), loop = prompt(1, 9, ()), loop_on(ours, rows=rows)
    if rows is None:
        loop.prompt(ids)
        made = loop.generate(10)[0].tolist()
    else:
        made = loop.generate_batch([ids[0]], max_new_tokens=10).popitem()[1].generated_tokens
    with torch.no_grad():
        out, wanted = theirs(ids), []
        for _ in range(9):
            wanted.append(int(out.logits[:, -1].argmax(-1)))
            out = theirs(torch.tensor([[wanted[-1]]]), past_key_values=out.past_key_values)
    assert made[:9] == wanted
    assert abs(ours.calls - theirs.calls) <= 1  # the last token may or may not be fed to the model
    assert torch.allclose(ours.last, theirs.last, atol=1e-4) or what != "a tensor"


class Counting(cache_utils.DynamicLayer):
    """A layer of a cache that counts its tokens in an attribute that kvpass does not know."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.tokens += key_states.shape[-2]
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **named)
        return updated


@pytest.mark.parametrize("rows", [None, 2])
def test_a_count_of_the_cache_that_kvpass_does_not_advance(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    discard_compiled_code()
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Counting)
    (ids, _), loop = prompt(1, 9, ()), loop_on(build("Llama", layers=1), rows=rows)
    if rows is None:
        loop.prompt(ids)
        loop.generate(10)
        assert loop.cache.layers[0].tokens == kvpass.inspect(loop.cache).seen
    else:
        refused = loop.generate_batch([ids[0]], max_new_tokens=10).popitem()[1]
        assert "has tokens in addition to keys" in str(refused.error)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["caches disabled", "wrapper in C++"])
def test_a_decode_loop_whose_code_cannot_be_recorded(how: str) -> None:
    """Check calls that run past the recording: a loop would repeat its first token otherwise."""
    ids, _ = prompt(1, 20)
    model = build("Llama", layers=3)
    expected = decoded(kvpass.DecodeLoop(model, "h2o", budget=8, inner="eager"), ids)
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=how == "caches disabled"):
        options = {"cpp_wrapper": True} if how == "wrapper in C++" else {}
        assert torch.equal(decoded(kvpass.DecodeLoop(model, "h2o", budget=8, options=options), ids), expected)


def decoded(loop: kvpass.DecodeLoop, ids: torch.Tensor) -> torch.Tensor:
    loop.prompt(ids)
    return loop.generate(12)


def replace_weight(linear: torch.nn.Linear) -> None:
    made = torch.randn(linear.weight.shape, generator=torch.Generator().manual_seed(1))
    linear.weight = torch.nn.Parameter(made)


def replace_data(linear: torch.nn.Linear, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the data of a parameter, which stays the same object, as `Module.to` does."""
    linear.weight.data = change(linear.weight.data)


REPLACED: dict[str, Callable[[Any], None]] = {
    "a-parameter": lambda layer: replace_weight(layer.mlp.down_proj),
    "a-module": lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh()),
    "the-keys": lambda layer: replace_weight(layer.self_attn.k_proj),
    "a-number": lambda layer: setattr(layer.self_attn, "scaling", 1.0),
    "the-data": lambda layer: replace_data(layer.mlp.down_proj, lambda data: data.flip(0)),
    "the-strides": lambda layer: replace_data(layer.self_attn.o_proj, lambda data: data.t().contiguous().t()),
    "a-view": lambda layer: replace_data(layer.self_attn.o_proj, lambda data: data.t()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", REPLACED)
def test_a_replaced_tensor_of_the_model_is_used(what: str) -> None:
    """Check that a replaced tensor of the model is used.

    A loop repeats steps with the tensors of its last call of the model. It compares the model's objects, and where the
    data of tensors is, before each batch of steps. That suffices, because user code runs only between batches.
    """
    discard_compiled_code()
    ours, theirs, (ids, _) = build("Llama", layers=1), build("Llama", layers=1), prompt(1, 6, ())
    loop = loop_on(ours, read_interval=4)
    loop.prompt(ids)
    made, expected = [int(tokens) for tokens in loop.stream(8)], []
    REPLACED[what](ours.model.layers[0])
    made += [int(tokens) for tokens in loop.stream(8)]
    token, cache = ids, None
    with torch.no_grad():
        for number in range(16):
            if number == 8:
                REPLACED[what](theirs.model.layers[0])
            out = theirs(token, past_key_values=cache, use_cache=True)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            expected.append(int(token))
    assert made == expected


def scaled_by(model: Any, holder: Any, read: Callable[[Any], float]) -> Any:
    """Let the first layer's MLP be scaled by a number that an object holds."""
    mlp = model.model.layers[0].mlp
    mlp.holder, own = holder, type(mlp).forward
    mlp.forward = lambda hidden: own(mlp, hidden) * read(mlp.holder)
    return mlp.holder


HELD_IN: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]] = {
    "a dictionary": (lambda: {"a": 1.0}, lambda x: x["a"], lambda x: x.update(a=-2.0)),
    "a list in a dictionary": (lambda: {"a": [1.0]}, lambda x: x["a"][0], lambda x: x["a"].__setitem__(0, -2.0)),
    "a list that becomes empty": (lambda: [1.0], lambda x: 1.0 if x else -2.0, lambda x: x.clear()),
    "a configuration": (
        lambda: types.SimpleNamespace(a=types.SimpleNamespace(b=1.0)),
        lambda x: x.a.b,
        lambda x: setattr(x.a, "b", -2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD_IN)
def test_what_an_object_of_the_model_holds_may_change_between_steps(name: str) -> None:
    """Check that a change within an object, which keeps its identity, is not overlooked."""
    discard_compiled_code()
    make, read, change = HELD_IN[name]
    ours, theirs, (ids, _) = build("Llama", layers=1), build("Llama", layers=1), prompt(1, 6, ())
    holder, expected_holder = scaled_by(ours, make(), read), scaled_by(theirs, make(), read)
    expected, token, cache = [], ids, None
    with torch.no_grad():
        for number in range(12):
            if number == 7:  # the loop has read six tokens, and runs the model on the sixth next
                change(expected_holder)
            out = theirs(token, past_key_values=cache, use_cache=True)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            expected.append(int(token))
    loop = kvpass.DecodeLoop(ours, "window", budget=64, inner="eager")
    loop.prompt(ids)
    made = loop.generate(7)[0].tolist()
    change(holder)
    assert made + loop.generate(5)[0].tolist() == expected


@torch.no_grad()
def test_autocast_may_begin_between_steps() -> None:
    discard_compiled_code()
    ids, _ = prompt(1, 6, ())
    loop = kvpass.DecodeLoop(build("Llama", layers=1), "window", budget=64, inner="eager")
    loop.prompt(ids)
    loop.generate(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert loop.generate(4).shape == (1, 4)
    assert loop.generate(4).shape == (1, 4)


@pytest.mark.parametrize("generates", [False, True])
def test_a_first_token_that_nobody_has_seen_is_no_part_of_the_text(generates: bool) -> None:
    """Check two prompts in a row, and a prompt after a token was handed out."""
    discard_compiled_code()
    model, (ids, _) = build("Llama", layers=1), prompt(1, 12, ())
    loop = kvpass.DecodeLoop(model, "window", budget=64, inner="eager")
    loop.prompt(ids[:, :7])
    seen = [ids[:, :7], loop.generate(1), ids[:, 7:]] if generates else [ids]
    loop.prompt(ids[:, 7:])
    whole = kvpass.DecodeLoop(model, "window", budget=64, inner="eager")
    whole.prompt(torch.cat(seen, 1))
    assert loop.generate(8).tolist() == whole.generate(8).tolist()


def tokens_of_loop(model: Any, ids: torch.Tensor) -> Iterator[int]:
    loop = kvpass.DecodeLoop(model, "window", budget=64)
    loop.prompt(ids)
    yield from map(int, loop.stream(20))


def tokens_of_calls(model: Any, ids: torch.Tensor) -> Iterator[int]:
    token, cache = ids, None
    while True:
        out = model(token, past_key_values=cache, use_cache=True)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        yield int(token)


@pytest.mark.slow
@pytest.mark.parametrize("how", [tokens_of_loop, tokens_of_calls])
def test_generated_code_reads_weights_by_their_present_strides(
    how: Callable[[Any, torch.Tensor], Iterator[int]],
) -> None:
    """Check that nothing reads replaced data by earlier strides, as generated code does not compare them."""
    ours, theirs, (ids, _) = build("Llama", layers=2), build("Llama", layers=2), prompt(1, 6, ())
    if how is tokens_of_calls:
        kvpass.compile(ours, "window", budget=64)
    with torch.no_grad():
        expected = list(itertools.islice(tokens_of_calls(theirs, ids), 20))
        made = how(ours, ids)
        found = list(itertools.islice(made, 10))
        for layer in ours.model.layers:
            replace_data(layer.self_attn.o_proj, lambda data: data.t().contiguous().t())
        assert [*found, *itertools.islice(made, 10)] == expected


def through_loop(model: Any, ids: torch.Tensor) -> Iterator[None]:
    loop = loop_on(model)
    loop.prompt(ids)
    loop.generate(8)
    yield
    loop.generate(8)


def through_requests(model: Any, ids: torch.Tensor) -> Iterator[None]:
    loop = loop_on(model, rows=2, read_interval=4)
    loop.add(ids[0], max_new_tokens=40)
    for _ in range(4):
        loop.step()
    yield
    for output in loop:  # a request that fails does not stop the others
        if output.cause is not None:
            raise output.cause


def through_forward(model: Any, ids: torch.Tensor) -> Iterator[None]:
    kvpass.compile(model, "window", budget=64, inner="eager")
    out = model(ids, use_cache=True)
    out = model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
    yield
    model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)


@pytest.mark.parametrize("how", [through_loop, through_requests, through_forward])
def test_weights_of_another_dtype_are_no_silent_change(how: Callable[[Any, torch.Tensor], Iterator[None]]) -> None:
    """Check that compiled code does not read weights as numbers of their earlier dtype."""
    model, (ids, _) = build("Llama", layers=1).to(torch.bfloat16), prompt(1, 6, ())
    with torch.no_grad():
        conversation = how(model, ids)
        next(conversation)
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        with pytest.raises(kvpass.UnsupportedGraph, match=r"cache holds .*, which makes the whole"):
            next(conversation, None)
