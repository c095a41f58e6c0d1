"""Threads that come to a graph at once compile and rewrite it once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import kvpass
from kvpass.rewrite.step_graph import StepCall
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.prompts import _DeferredPrompt
from kvpass.runtime.variants import CompiledVariant
from kvpass.torch_private import dynamo
from tests.models import build, prompt

THREADS = 4


def in_threads(work: Callable[[], Any]) -> list[Any]:
    """What each thread returned, or raised; all begin at once."""
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
    compiled = []

    def compile(_: Sequence[Any]) -> Callable[..., Any]:
        assert not compiled  # as its graph is dropped
        time.sleep(0.1)
        compiled.append(True)
        return lambda *_: "compiled"

    run = _DeferredPrompt(lambda *_: "uncompiled", compile)
    assert run(1) == "uncompiled"
    assert in_threads(lambda: run(1)) == ["compiled"] * THREADS
    assert len(compiled) == 1


def test_a_step_is_rewritten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes: each kind of call gets numbers of its own where the compiler takes no dynamic ones."""
    model = kvpass.compile(build("Llama", layers=1), "h2o", budget=8, inner="eager")
    (ids, _), calls, rewrite = prompt(1, 12, ()), [], BackendBase.rewrite

    def slowly(self: BackendBase, call: StepCall) -> Any:
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
        step(caches.pop(), 4)  # Dynamo has a graph for chunks of any length now
        monkeypatch.setattr(BackendBase, "rewrite", slowly)
        found = in_threads(lambda: torch.no_grad()(step)(caches.pop(), 3))
    assert all(isinstance(each, torch.Tensor) and torch.equal(each, found[0]) for each in found), found
    assert len(calls) == 1


def test_a_warm_step_does_not_wait_for_another_thread_that_compiles() -> None:
    """Its code is run without the lock of the compiler."""
    variant: Any = object.__new__(CompiledVariant)
    variant.compiled, found = (lambda *_: "compiled"), []
    with dynamo.compile_lock():
        thread = threading.Thread(target=lambda: found.append(variant.code_for(None, [], ranked=False, chunk=False)))
        thread.start()
        thread.join(timeout=5)
    assert found == [variant.compiled]
