"""Test threads that reach a graph at the same time: they compile and rewrite it once."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kvpass
from kvpass.cache.model_cache import caches_in
from kvpass.rewrite.step_graph import StepRewriteInput
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.checks import RotationCheck
from kvpass.runtime.deferred_code import DeferredCode
from kvpass.runtime.prompts import PromptRunner
from kvpass.runtime.variants import CompiledVariant, ShapeKey
from kvpass.torch_private import dynamo
from tests.models import build, prompt

THREADS = 4


def in_threads(work: Callable[[], Any]) -> list[Any]:
    """Start all threads at once, and return the result or exception of each."""
    start, found = threading.Barrier(THREADS), []

    def run() -> None:
        start.wait()
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_prompt_that_was_put_off_is_compiled_once() -> None:
    compiled, code = [], DeferredCode()

    def compile() -> Callable[..., Any]:
        assert not compiled  # because its graph is dropped
        time.sleep(0.1)
        compiled.append(True)
        return lambda *_: "compiled"

    def run() -> Any:
        return code.for_run(torch.fx.symbolic_trace(torch.nn.Identity()), compile)(1)

    assert run() == 1
    assert in_threads(run) == ["compiled"] * THREADS
    assert len(compiled) == 1


def test_a_step_is_rewritten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the rewrites of each kind of call, whose sizes are static with this compiler."""
    model = kvpass.compile(build("Llama", layers=1), "h2o", budget=8, inner="eager")
    (ids, _), calls, rewrite = prompt(1, 12, ()), [], BackendBase.rewrite

    def slowly(self: BackendBase, call: StepRewriteInput) -> Any:
        calls.append(call)
        time.sleep(0.1)
        return rewrite(self, call)

    def step(cache: Any, count: int) -> torch.Tensor:
        logits: torch.Tensor = model(ids[:, :count], past_key_values=cache).logits
        return logits

    monkeypatch.setattr(BackendBase, "has_dynamic_sizes", lambda *_: False)
    with torch.no_grad():
        caches = [model(ids, use_cache=True).past_key_values for _ in range(THREADS + 2)]
        step(caches.pop(), 2)
        step(caches.pop(), 4)  # Dynamo has a graph for chunks of any length by now
        monkeypatch.setattr(BackendBase, "rewrite", slowly)
        found = in_threads(lambda: torch.no_grad()(step)(caches.pop(), 3))
    assert all(isinstance(each, torch.Tensor) and torch.equal(each, found[0]) for each in found), found
    assert len(calls) == 1


def test_a_warm_step_does_not_wait_for_another_thread_that_compiles() -> None:
    """Check that running compiled code takes no lock of the compiler."""
    rewrite: Any = SimpleNamespace(signature=None, dynamic=None)
    variant: Any = CompiledVariant(rewrite, ShapeKey(()))
    variant.code.compiled, found = (lambda *_: "compiled"), []
    with dynamo.compile_lock():
        thread = threading.Thread(target=lambda: found.append(variant.code_for(None, [], False, chunk=False)))
        thread.start()
        thread.join(timeout=5)
    assert found == [variant.code.compiled]


class SlowCompiler:
    """An inner compiler that traces, like Inductor, until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.can_stop = threading.Event(), threading.Event()

    def __call__(self, gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        make_fx(lambda x: self.wait(x))(torch.ones(1))
        return gm.forward

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        assert self.can_stop.wait(60)
        return x + 1


OTHERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "a model of kvpass": lambda inner: kvpass.compile(build("Llama", layers=1), "h2o", budget=8, inner=inner),
    "a model under torch.compile": lambda inner: torch.compile(
        build("Llama", layers=1), backend=kvpass.backend("h2o", budget=8, inner=inner)
    ),
    "a function for another backend": lambda inner: torch.compile(lambda x, use_cache: x + 1, backend=inner),
}


@contextlib.contextmanager
def compiling(other: str) -> Iterator[Callable[[], Any]]:
    """Compile in another thread; yield a function that ends this and returns the thread's result."""
    inner, (ids, _) = SlowCompiler(), prompt(1, 12, ())
    function = OTHERS[other](inner)
    with ThreadPoolExecutor(1) as pool:
        call: Future[Any] = pool.submit(torch.no_grad()(function), ids, use_cache=True)

        def end() -> Any:
            inner.can_stop.set()
            return call.result()

        try:
            assert inner.begun.wait(60)
            yield end
        finally:
            inner.can_stop.set()


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_waits_while_another_thread_compiles(other: str) -> None:
    """Check that a call waits: torch would mistake it for a call that FX traces, and refuse it."""
    model = kvpass.compile(build("GPTNeoX", layers=1), "h2o", budget=8, inner="eager")
    ids, _ = prompt(1, 12, ())

    @torch.no_grad()
    def talk() -> torch.Tensor:
        cache, logits = None, []
        for at in (slice(0, 9), *(slice(i, i + 1) for i in range(9, 12))):
            out = model(ids[:, at].contiguous(), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, 1)

    talk()
    expected, made = talk(), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with compiling(other) as end, ThreadPoolExecutor(1) as pool:
        call = pool.submit(talk)
        time.sleep(0.2)
        assert not call.done()
        end()
        assert torch.equal(call.result(), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made + 1


def test_a_handle_is_no_tensor_while_another_thread_compiles() -> None:
    model = kvpass.compile(build("GPTNeoX", layers=1), "h2o", budget=8, inner="eager")
    with torch.no_grad():
        layer = model(prompt(1, 12, ())[0], use_cache=True).past_key_values.layers[0]
    with compiling("a model of kvpass"), pytest.raises(kvpass.CacheHandleError, match="live in slots"):
        layer.keys + 1


class Exported(torch.nn.Module):
    """A module that waits while torch.export records it."""

    def __init__(self, compiler: SlowCompiler) -> None:
        super().__init__()
        self.compiler = compiler

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiler.wait(x)


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_is_what_it_is_alone_while_another_thread_exports(strict: bool) -> None:
    """torch.export says to all threads that it records, and handles let recorded operations pass."""
    model = kvpass.compile(build("GPTNeoX", layers=1), "h2o", budget=8, inner="eager", strict=strict)
    (ids, _), slow = prompt(1, 12, ()), SlowCompiler()

    @torch.no_grad()
    def talk() -> torch.Tensor:
        out = model(ids[:, :9].contiguous(), use_cache=True)
        logits: torch.Tensor = model(ids[:, 9:10].contiguous(), past_key_values=out.past_key_values).logits
        return logits

    talk()
    expected = talk()
    with ThreadPoolExecutor(1) as pool:
        export = pool.submit(torch.export.export, Exported(slow), (torch.ones(2),), strict=False)
        try:
            assert slow.begun.wait(60)
            assert torch.allclose(talk(), expected, atol=1e-5)
        finally:
            slow.can_stop.set()
        export.result()


class Advised(torch.nn.Module):
    """A model that waits for another model's call in another thread, outside any graph."""

    def __init__(self, adviser: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.model, self.adviser = build("GPTNeoX", layers=1), adviser

    @torch.compiler.disable
    def advise(self, ids: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.no_grad()(self.adviser), ids).result(60)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        self.advise(input_ids)
        return self.model(input_ids, past_key_values=past_key_values, use_cache=use_cache)


@pytest.mark.parametrize("other", ["a model of kvpass", "a function for another backend"])
def test_a_call_may_wait_for_a_call_in_another_thread(other: str) -> None:
    adviser = OTHERS[other]("eager")
    model = kvpass.compile(Advised(lambda ids: adviser(ids, use_cache=True)), "h2o", budget=8, inner="eager")
    ids, _ = prompt(1, 12, ())
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        assert model(ids[:, :1], past_key_values=cache).logits.shape[1] == 1


def test_a_call_that_torch_refuses_for_another_thread_is_tried_again() -> None:
    tried = []

    def compile_wrapper() -> str:  # named like the torch function that raises
        tried.append(True)
        if len(tried) < 3:
            raise RuntimeError("Detected that you are using FX to symbolically trace a dynamo-optimized function.")
        return "ran"

    assert dynamo.between_compilations(compile_wrapper)() == "ran"
    assert len(tried) == 3


def test_a_call_inside_of_a_trace_of_its_own_thread_is_refused_as_before() -> None:
    model = kvpass.compile(build("Llama", layers=1), "h2o", budget=8, inner="eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="FX to symbolically trace"):
        make_fx(lambda ids: model(ids, use_cache=True).logits)(prompt(1, 12, ())[0])


def test_threads_run_their_code_at_once() -> None:
    both = threading.Barrier(2)

    def meeting(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if torch.is_inference_mode_enabled():
                both.wait(60)
            return gm.forward(*arguments)

        return run

    model = kvpass.compile(build("Llama", layers=1), "h2o", budget=8, inner=meeting)
    (ids, _) = prompt(1, 12, ())

    @torch.inference_mode()
    def talk() -> torch.Tensor:
        out = model(ids[:, :9].contiguous(), use_cache=True)
        logits: torch.Tensor = model(ids[:, 9:10].contiguous(), past_key_values=out.past_key_values).logits
        return logits

    with ThreadPoolExecutor(2) as pool:
        one, other = [each.result(120) for each in [pool.submit(talk), pool.submit(talk)]]
    assert torch.equal(one, other)


def test_prompts_in_two_threads_keep_their_own_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a prompt in another thread in the middle of one, with another rotation, as of dynamic frequencies."""
    rotations, others = itertools.count(), []
    monkeypatch.setattr(RotationCheck, "rotated_key", lambda *_: torch.full((1,), float(next(rotations))))
    model = kvpass.compile(build("Llama", layers=1), "streaming", budget=8, positions="cache", inner="eager")
    ids, _ = prompt(1, 9, ())
    with torch.no_grad():
        model(ids, use_cache=True)
    call_pins = PromptRunner._call_pins

    def interrupted(self: PromptRunner, *arguments: Any) -> Any:
        if not others:
            others.append(None)
            with ThreadPoolExecutor(1) as pool, torch.no_grad():
                others[0] = pool.submit(torch.no_grad()(lambda: model(ids, use_cache=True))).result(60)
        return call_pins(self, *arguments)

    monkeypatch.setattr(PromptRunner, "_call_pins", interrupted)
    with torch.no_grad():
        outputs = [model(ids, use_cache=True), *others]
    one, other = (caches_in(out.past_key_values)[0].rotated_key for out in outputs)
    assert one is not None
    assert other is not None
    assert not torch.equal(one, other)
