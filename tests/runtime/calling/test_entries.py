"""Test that every way to call a model bounds its cache or raises: wrappers, copies, disabled compilation.

In every case the code that runs is not simply the compiled call of the model. Each case ends with handles in the cache
or with an error of kvpass; an ordinary cache that grows is a failure.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import logging
import pickle
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import kvpass
from kvpass import model_access
from kvpass.backend import _made_by_name as by_name_backends
from kvpass.cache.handle import Handle
from kvpass.errors import UnreadableGraph
from kvpass.runtime.steps import StepRunner
from kvpass.torch_private import dynamo
from tests.architectures import zoo
from tests.models import build, graphs, prompt
from tests.test_backend import Tiny, loop

POLICY: dict[str, Any] = dict(policy="h2o", budget=8, inner="eager")


def generate(model: Any, **more: Any) -> Any:
    ids, mask = prompt(2, 20, (2, 0))
    plain: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **plain, **more)


def bounded(cache: Any) -> bool:
    return all(isinstance(layer.keys, Handle) for layer in cache.layers)


def tiny() -> Any:
    return build("Llama", layers=1)


# -- inner modules and wrappers ----------------------------------------------------------------------------------------


class Speaking(nn.Module):
    """A model whose `generate` calls a child's `generate`, like models for images and speech."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.language_model = inner

    def forward(self, ids: Tensor, past_key_values: Any = None, **more: Any) -> Any:
        return self.language_model(ids, past_key_values=past_key_values, **more)

    def generate(self, ids: Tensor, **more: Any) -> Any:
        return self.language_model.generate(ids, **more)


class WithValues(nn.Module):
    """A value head around a model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.pretrained_model, self.head = inner, nn.Linear(64, 1)

    def forward(self, ids: Tensor, **more: Any) -> Any:
        out = self.pretrained_model(ids, output_hidden_states=True, **more)
        return out.logits, self.head(out.hidden_states[-1])

    def generate(self, *given: Any, **more: Any) -> Any:
        return self.pretrained_model.generate(*given, **more)


class Distributed(nn.Module):
    """Attributes of a wrapper for distributed training."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.module = inner

    def forward(self, *given: Any, **more: Any) -> Any:
        return self.module(*given, **more)


class Ensemble(nn.Module):
    """Models in a list."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList([inner])

    def forward(self, *given: Any, **more: Any) -> Any:
        return self.experts[0](*given, **more)


AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a child's generate": (Speaking, lambda model: model),
    "a value head": (WithValues, lambda model: model),
    "module": (Distributed, lambda model: model.module),
    "a list": (Ensemble, lambda model: model.experts[0]),
    "two deep": (lambda inner: Distributed(Speaking(inner)), lambda model: model.module),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", AROUND)
def test_a_model_inside_is_bounded_wherever_generate_is_called(name: str) -> None:
    around, called = AROUND[name]
    model = kvpass.compile(around(tiny()), **POLICY)
    assert bounded(generate(called(model)).past_key_values)


@pytest.mark.parametrize("around", [Speaking, Distributed])
def test_a_wrapper_runs_as_one_graph(around: Callable[[Any], Any]) -> None:
    """Check that an inner model is compiled for direct calls, and traced into the graph of its wrapper."""
    model, (ids, _) = kvpass.compile(around(tiny()), **POLICY), prompt(1, 12, ())
    with torch.no_grad():
        out = model(ids, use_cache=True)
    assert bounded(out.past_key_values)
    assert graphs() == 1


class Loop(nn.Module):
    """A hand-written model whose `generate` calls a child that has no `generate`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.decoder = inner

    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        return self.decoder(ids, past_key_values=cache, use_cache=True)

    def generate(self, ids: Tensor) -> Any:
        return self.decoder(ids, use_cache=True)


INNER: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Any]]] = {
    "a decoder": (lambda model: Loop(model.model), lambda model, ids: model.generate(ids)),
    "a model without its head": (lambda model: model, lambda model, ids: model.model(ids, use_cache=True)),
    "a cache that is given": (
        lambda model: model, lambda model, ids: model.model(ids, past_key_values=transformers.DynamicCache())
    ),
    "tuples": (lambda model: model, lambda model, ids: model.model(ids, use_cache=True, return_dict=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", INNER)
def test_a_module_inside_that_runs_uncompiled_refuses_a_cache(name: str) -> None:
    around, call = INNER[name]
    model, (ids, _) = kvpass.compile(around(tiny()), **POLICY), prompt(1, 12, ())
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="LlamaModel was called by itself"):
        call(model, ids)


@torch.no_grad()
@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("named", [False, True])
def test_forward_of_a_plain_module_is_a_call_of_it(copied: Callable[[Any], Any], named: bool) -> None:
    """Call `forward`, which torch leaves uncompiled, of a model without a module inside that would notice."""
    model, ids = Tiny().eval(), torch.randint(0, 64, (2, 20))
    expected = loop(kvpass.compile(copy.deepcopy(model), "streaming", budget=8, inner="eager"), ids)
    kvpass.compile(model, "streaming", budget=8, inner="eager")
    model = copied(model)
    assert list(inspect.signature(model.forward).parameters) == ["ids", "past"]
    call = (lambda ids, past=None: model.forward(ids=ids, past=past)) if named else model.forward
    assert torch.equal(loop(call, ids), expected)
    assert isinstance(model.forward(ids)[1][0], Handle)


@torch.no_grad()
def test_forward_is_the_models_own_again_without_strict() -> None:
    model, ids = Tiny().eval(), torch.randint(0, 64, (2, 20))
    for strict in (True, False):
        kvpass.compile(model, "streaming", budget=8, inner="eager", strict=strict)
    assert not isinstance(model.forward(ids)[1][0], Handle)
    model.forward = own = functools.partial(Tiny.forward, model)
    kvpass.compile(model, "streaming", budget=8, inner="eager")
    assert model.forward is own


def test_a_module_inside_runs_without_a_cache_and_unless_strict() -> None:
    ids, _ = prompt(1, 12, ())
    with torch.no_grad():
        kvpass.compile(tiny(), **POLICY).model(ids, use_cache=False)
        again = kvpass.compile(kvpass.compile(tiny(), **POLICY), **POLICY, strict=False)
        out = again.model(ids, use_cache=True)
    assert not bounded(out.past_key_values)


BY_NAME: dict[str, bool] = {"past_key_values": True, "cache": True, "kv_cache": True, "use_cache": False, "ids": False}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_cache_argument_is_found_by_its_name(name: str) -> None:
    module = nn.Module()
    exec(f"def forward(ids, {'' if name == 'ids' else name + '=None'}): ...", made := {})  # type: ignore[var-annotated]
    module.forward = made["forward"]  # type: ignore[method-assign]
    assert (model_access.cache_parameter(module) is not None) == BY_NAME[name]


_SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
BLIP: dict[str, Any] = dict(
    vision_config=dict(_SMALL, intermediate_size=32, image_size=16, patch_size=8),
    qformer_config=dict(_SMALL, intermediate_size=32, encoder_hidden_size=32, vocab_size=32),
    text_config=dict(
        _SMALL, model_type="opt", vocab_size=128, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=64
    ),
    num_query_tokens=4,
    image_token_index=5,
)


@pytest.mark.slow
def test_blip_is_bounded() -> None:
    """Test a model of transformers whose `generate` calls that of its language model."""
    model = transformers.Blip2ForConditionalGeneration(transformers.Blip2Config(**BLIP)).eval()
    kvpass.compile(model, **POLICY)
    ids = torch.tensor([[5, 5, 5, 5, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        out = model.generate(
            pixel_values=torch.rand(1, 3, 16, 16), input_ids=ids, max_new_tokens=4, return_dict_in_generate=True
        )
    assert bounded(out.past_key_values)


# -- copies ---------------------------------------------------------------------------------------------------------


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "a copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "a copy of a wrapper": lambda model: copy.deepcopy(Distributed(model)).module,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_bounded(way: str) -> None:
    """Check copies: the compiled call is part of a module's state, so copying the state copies it."""
    model = kvpass.compile(tiny(), **POLICY)
    copied = COPIES[way](model)
    expected = generate(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(-1)
    out = generate(copied)
    assert bounded(out.past_key_values)
    assert not torch.equal(out.sequences, expected.sequences)
    assert torch.equal(generate(model).sequences, expected.sequences)


def test_a_copy_of_a_wrapper_is_bounded_inside() -> None:
    assert bounded(generate(copy.deepcopy(kvpass.compile(Speaking(tiny()), **POLICY))).past_key_values)


def test_a_shallow_copy_is_an_error() -> None:
    model = kvpass.compile(tiny(), **POLICY)
    with pytest.raises(kvpass.UnsupportedGraph, match=r"shallow copy \(copy.copy\)"):
        generate(copy.copy(model))
    assert bounded(generate(model).past_key_values)


def test_a_copy_of_what_torch_compile_returns_is_bounded() -> None:
    model = copy.deepcopy(torch.compile(tiny(), backend=kvpass.backend(**POLICY)))
    with torch.no_grad():
        assert bounded(model(prompt(1, 12, ())[0], use_cache=True).past_key_values)


def test_a_model_that_is_compiled_again_is_what_it_was_compiled_to_last() -> None:
    model = kvpass.compile(kvpass.compile(tiny(), **POLICY), **{**POLICY, "budget": 6})
    assert kvpass.inspect(generate(copy.deepcopy(model)).past_key_values).layers[0].capacity == 7
    model.compile(backend="eager")
    assert not bounded(generate(model).past_key_values)


def test_what_torch_compile_returns_is_compiled_inside() -> None:
    wrapped = torch.compile(tiny(), backend="eager")
    model = kvpass.compile(wrapped, **POLICY)
    assert bounded(generate(model).past_key_values)
    assert bounded(generate(wrapped).past_key_values)
    with torch.no_grad():
        assert bounded(wrapped(prompt(1, 12, ())[0]).past_key_values)


@pytest.mark.parametrize("before", [dict(backend="eager", fullgraph=True), dict(backend=kvpass.backend(**POLICY))])
def test_a_forward_that_was_compiled_before_gives_way(before: dict[str, Any]) -> None:
    model = tiny()
    model.forward = torch.compile(model.forward, **before)
    kvpass.compile(model, **{**POLICY, "budget": 6})
    for called in (model, copy.deepcopy(model)):
        assert kvpass.inspect(generate(called).past_key_values).layers[0].capacity == 7


def test_a_backend_is_pickled_as_its_settings() -> None:
    chosen = kvpass.backend("d2o", budget=8, inner="eager", crop=0, options={"max_autotune": False})
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    assert copy.deepcopy(chosen) is chosen


# -- torch.compile stops or is disabled --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_of_policies_is_bounded() -> None:
    """Check that kvpass has a recompile limit of its own; torch's counts the graphs of all backends."""
    model, (ids, _) = tiny(), prompt(1, 12, ())
    with torch._dynamo.config.patch(recompile_limit=3), torch.no_grad():
        for policy in ("window", "streaming", "h2o"):
            compiled = torch.compile(model, backend=kvpass.backend(policy, budget=8, inner="eager"))
            out = compiled(ids, use_cache=True)
            out = compiled(ids[:, :1], past_key_values=out.past_key_values)
            assert bounded(out.past_key_values), policy


@pytest.mark.slow
def test_graphs_of_other_backends_leave_room() -> None:
    """Check compilation after other backends reached the recompile limit, also with settings of another thread."""
    model, chosen = tiny(), kvpass.backend(**POLICY)
    with torch._dynamo.config.patch(recompile_limit=3), torch.no_grad():
        for rows in range(1, 4):
            torch.compile(model, backend="eager", dynamic=False)(prompt(rows, 12, ())[0], use_cache=False)
        assert bounded(torch.compile(model, backend=chosen)(prompt(1, 12, ())[0], use_cache=True).past_key_values)


def dynamo_settings() -> dict[str, Any]:
    """Return all settings of Dynamo, with the type of each value."""
    return {name: (type(value), value) for name, value in torch._dynamo.config.get_config_copy().items()}


def graphs_of_another_backend() -> int:
    """Count the graphs that torch makes of a new function for twelve shapes."""
    backend = EagerAndRecordGraphs()
    function = eval("lambda x: x + 1")  # a new code object, because torch counts graphs for each
    compiled = torch.compile(function, backend=backend, dynamic=False)
    for size in range(1, 13):
        compiled(torch.ones(size))
    return len(backend.graphs)


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [8, 5])
def test_settings_are_those_of_the_user_outside_of_compilations_for_kvpass(limit: int) -> None:
    """Check settings after a compilation, a reset and a refusal; other functions keep their graph limit."""
    with torch._dynamo.config.patch(recompile_limit=limit), torch.no_grad():
        before = dynamo_settings()
        for _ in range(2):
            torch.compile(tiny(), backend=kvpass.backend(**POLICY))(prompt(1, 12, ())[0], use_cache=True)
            assert dynamo_settings() == before
            assert graphs_of_another_backend() == limit
            torch._dynamo.reset()
        with torch.enable_grad(), pytest.raises(kvpass.UnsupportedGraph, match="gradient"):
            torch.compile(tiny(), backend=kvpass.backend(**POLICY))(prompt(1, 12, ())[0], use_cache=True)
        assert dynamo_settings() == before


def test_a_trace_whose_backend_torch_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = types.SimpleNamespace(output=types.SimpleNamespace())
    monkeypatch.setattr("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", lambda: shown)
    assert dynamo.is_traced_for(kvpass.backend("full"))
    assert not dynamo.is_traced_for(None)


@pytest.mark.parametrize("way", ["in index", "torch.compile"])
def test_beyond_the_limit_there_is_an_error(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "MAX_GRAPHS", {"recompile_limit": 1})
    model, (ids, _) = tiny(), prompt(2, 12, ())
    chosen = kvpass.backend(**POLICY)
    call = kvpass.compile(model, **POLICY) if way == "in index" else torch.compile(model, backend=chosen)
    error = kvpass.UnsupportedGraph if way == "in index" else Exception
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        before = dynamo_settings()
        with pytest.warns(kvpass.KVPassWarning, match="last graph"):
            call(ids, use_cache=True)
        for _ in range(2):
            with pytest.raises(error, match=r"maximum of graphs|recompile_limit"):
                call(ids[:1, :7], use_cache=True)
        assert graphs_of_another_backend() == 1
        assert dynamo_settings() == before


def test_settings_after_a_limit_that_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check settings if torch reaches the limit without `strict`, and so runs code uncompiled."""
    monkeypatch.setattr(dynamo, "MAX_GRAPHS", {"recompile_limit": 1})
    call, (ids, _) = kvpass.compile(tiny(), **POLICY, strict=False), prompt(2, 12, ())
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        before = dynamo_settings()
        call(ids, use_cache=True)
        call(ids[:1, :7], use_cache=True)
        assert dynamo_settings() == before


@pytest.mark.parametrize("strict", [True, False])
def test_strict_counts_among_the_options_of_a_backend_by_name(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "MAX_GRAPHS", {"recompile_limit": 1})
    model, (ids, _) = tiny(), prompt(2, 12, ())
    call = torch.compile(model, backend="kvpass", options={**POLICY, "strict": strict})
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        with pytest.warns(kvpass.KVPassWarning, match="last graph"):
            call(ids, use_cache=True)
        if strict:
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                call(ids[:1, :7], use_cache=True)
        else:
            assert not bounded(call(ids[:1, :7], use_cache=True).past_key_values)


@pytest.mark.slow
def test_a_backend_by_name_lives_as_long_as_its_graphs() -> None:
    model, (ids, _) = tiny(), prompt(1, 12, ())
    weight = weakref.ref(model.lm_head.weight)
    with torch.no_grad():
        for budget in (8, 9):
            for count in (12, 10, 9):
                torch.compile(model, backend="kvpass", options={**POLICY, "budget": budget})(ids[:, :count])
            assert sum(each() is not None for each in by_name_backends) == budget - 7
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None
    assert all(each() is None for each in by_name_backends)


def test_a_compilation_that_shows_no_backend_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dynamo._note_unknown_backend.cache_clear()
    with caplog.at_level(logging.INFO, "kvpass.dynamo"):
        assert [dynamo._apply_settings() for _ in range(2)] == ["", ""]
    (record,) = caplog.records
    assert "recompile_limit" in record.getMessage()
    with caplog.at_level(logging.INFO, "kvpass.dynamo"), torch.no_grad():
        dynamo._note_unknown_backend.cache_clear()
        kvpass.compile(tiny(), **POLICY)(prompt(1, 12, ())[0])
        assert graphs_of_another_backend()
    assert [each for each in caplog.records if each.name == record.name] == [record]


OFF: dict[str, Callable[[], Any]] = {
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
    "another backend": lambda: torch.compiler.set_stance("default", force_backend="eager"),
    "a dispatch mode": lambda: __import__("torch.utils.flop_counter").utils.flop_counter.FlopCounterMode(display=False),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OFF)
def test_where_torch_compile_is_off_there_is_an_error_and_afterwards_a_bound(name: str) -> None:
    model = kvpass.compile(tiny(), **POLICY)
    for _ in range(2):
        with OFF[name](), pytest.raises(kvpass.UnsupportedGraph, match="would run uncompiled"):
            generate(model)
        assert bounded(generate(model).past_key_values)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OFF)
def test_where_torch_compile_is_off_a_lax_model_runs_as_it_is(name: str) -> None:
    model = kvpass.compile(tiny(), **POLICY, strict=False)
    with OFF[name]():
        assert not bounded(generate(model).past_key_values)
    assert bounded(generate(model).past_key_values)


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "FlopCounterMode": OFF["a dispatch mode"],
    "FakeTensorMode, as in compiling": FakeTensorMode,
    "a mode of one's own": TorchDispatchMode,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("compiled", [False, True], ids=["first call", "later call"])
def test_modes_of_another_thread_do_not_apply_to_this_one(name: str, compiled: bool) -> None:
    """Check modes by thread: torch's process-wide flag is set while any thread has a mode."""
    model, entered, called = kvpass.compile(tiny(), **POLICY), threading.Event(), threading.Event()
    if compiled:
        generate(model)

    def work() -> None:
        with ELSEWHERE[name]():
            entered.set()
            called.wait()

    other = threading.Thread(target=work)
    other.start()
    entered.wait()
    try:
        assert bounded(generate(model).past_key_values)
    finally:
        called.set()
        other.join()


def test_a_disabled_torch_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._dynamo.config.patch(disable=True):
        for ask in (
            kvpass.backend,
            functools.partial(kvpass.compile, tiny()),
            functools.partial(kvpass.DecodeLoop, tiny()),
        ):
            with pytest.raises(kvpass.UnsupportedGraph, match="TORCH_COMPILE_DISABLE=1"):
                ask("h2o", budget=8)
        with pytest.warns(kvpass.KVPassWarning, match="TORCH_COMPILE_DISABLE=1"):
            kvpass.backend("h2o", budget=8, strict=False)
    model = kvpass.compile(tiny(), **POLICY)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(kvpass.UnsupportedGraph, match="TORCH_COMPILE_DISABLE=1"):
        generate(model)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_disabled_torch_compile_is_an_error_in_a_process_of_its_own(variable: str) -> None:
    program = "import kvpass; kvpass.backend('h2o', budget=8)"
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PATH": "", variable: "1"}, capture_output=True, check=False
    )
    assert b"UnsupportedGraph: torch.compile is disabled" in run.stderr


# -- inside functions that another backend compiles --------------------------------------------------------------------


class Sampling(nn.Module):
    """A module with operations before and after its call of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        out = self.model(input_ids=ids + 0, past_key_values=cache, use_cache=True)
        return (out.logits[:, -1:] * 2).argmax(-1), out.past_key_values


def two_steps(model: Any, ids: Tensor, cache: Any) -> Any:
    for _ in range(2):
        ids, cache = Sampling.forward(types.SimpleNamespace(model=model), ids, cache)  # type: ignore[arg-type]
    return ids, cache


def generated(model: Any, ids: Tensor, cache: Any) -> Any:
    out = model.generate(ids, max_new_tokens=4, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    return out.sequences, out.past_key_values


OUTER: dict[str, Callable[[Any], Callable[[Tensor, Any], Any]]] = {
    "a module": Sampling,
    "a loop": lambda model: lambda ids, cache: two_steps(model, ids, cache),
    "generate": lambda model: lambda ids, cache: generated(model, ids, cache),
    "the model itself": lambda model: lambda ids, cache: Sampling(torch.compile(model, backend="eager"))(ids, cache),
    "a copy": lambda model: Sampling(copy.deepcopy(model)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", OUTER)
def test_inside_of_what_another_backend_compiles_a_model_is_as_it_is_alone(name: str, strict: bool) -> None:
    (ids, _), model = prompt(1, 12, ()), kvpass.compile(tiny(), **POLICY, strict=strict)
    alone = OUTER[name](model)
    outer = torch.compile(OUTER[name](model), backend="eager")
    with torch.no_grad():
        expected, ours = alone(ids, None), outer(ids, None)
        for _ in range(0 if name == "generate" else 2):
            expected, ours = alone(*expected), outer(*ours)
    assert torch.equal(ours[0], expected[0])
    assert bounded(ours[1])
    assert kvpass.inspect(ours[1]).layers[0].capacity == 9


@pytest.mark.slow
def test_inside_of_what_inductor_compiles_a_model_is_bounded() -> None:
    outer, (ids, _) = torch.compile(Sampling(kvpass.compile(tiny(), **POLICY))), prompt(1, 12, ())
    with torch.no_grad():
        assert bounded(outer(*outer(ids))[1])


def test_what_must_be_one_graph_of_another_backend_is_an_error_with_a_cache() -> None:
    (ids, _), model = prompt(1, 12, ()), kvpass.compile(tiny(), **POLICY)
    whole = functools.partial(torch.compile, backend="eager", fullgraph=True)
    with torch.no_grad():
        for called in (model, model.model):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be traced into another backend's graph"):
                whole(Sampling(called))(ids)
            assert whole(lambda x, called=called: called(input_ids=x, use_cache=False)[0] + 1)(ids).shape[1] == 12
    assert graphs() == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_without_a_cache_is_a_part_of_another_graph(name: str) -> None:
    """Test `use_cache=False`, which does not reach the encoder, although this accepts a cache argument."""
    (ids, _), model = prompt(1, 12, ()), kvpass.compile(zoo.build(name, "reading"), **POLICY)
    whole = torch.compile(
        lambda x: model(input_ids=x, decoder_input_ids=x, use_cache=False)[0] + 1, backend="eager", fullgraph=True
    )
    with torch.no_grad():
        assert whole(ids).shape[1] == 12


@pytest.mark.few(1)
@pytest.mark.parametrize("inside", [tiny, lambda: kvpass.compile(tiny(), **POLICY)], ids=["plain", "compiled"])
def test_a_model_is_a_part_of_what_a_backend_of_kvpass_compiles(inside: Callable[[], Any]) -> None:
    (ids, _), chosen = prompt(1, 12, ()), kvpass.backend(**{**POLICY, "budget": 6})
    outer = torch.compile(Sampling(inside()), backend=chosen, fullgraph=True)
    with torch.no_grad():
        cache = outer(*outer(ids))[1]
    assert kvpass.inspect(cache).layers[0].capacity == 7
    assert graphs() == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("in_place", ["before, copied", "later", "later, used"])
@pytest.mark.parametrize("way", ["a wrapper", "a loop"])
def test_a_wrapper_keeps_its_settings_where_the_model_is_compiled_in_place(way: str, in_place: str) -> None:
    (ids, _), model, others = prompt(1, 12, ()), tiny(), {**POLICY, "budget": 6}
    if in_place == "before, copied":
        model = copy.deepcopy(kvpass.compile(model, **POLICY))
    loop, wrapper = kvpass.DecodeLoop(model, **others), torch.compile(model, backend=kvpass.backend(**others))

    def capacity() -> int:
        if way == "a wrapper":
            with torch.no_grad():
                return kvpass.inspect(wrapper(ids).past_key_values).layers[0].capacity
        loop.reset()
        loop.prompt(ids)
        loop.generate(3)
        return kvpass.inspect(loop).layers[0].capacity

    if in_place == "later, used":
        assert capacity() == 7
    if in_place != "before, copied":
        kvpass.compile(model, **POLICY)
    assert capacity() == 7
    assert kvpass.inspect(generate(model).past_key_values).layers[0].capacity == 9


def test_a_module_inside_that_another_backend_would_trace_refuses_a_cache() -> None:
    (ids, _), model = prompt(1, 12, ()), kvpass.compile(tiny(), **POLICY)
    outer = torch.compile(lambda ids: model.model(ids, use_cache=True), backend="eager")
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match="LlamaModel was called by itself"):
        outer(ids)


class Hinted(nn.Module):
    """A model that calls a function outside of any graph, and keeps what that returned."""

    def __init__(self, hint: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self.hint, self.hints = build("GPTNeoX", layers=1), hint, list[Any]()

    @torch.compiler.disable
    def ask(self, ids: Tensor) -> None:
        self.hints.append(self.hint(ids))

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        self.ask(input_ids)
        return self.model(input_ids=input_ids, past_key_values=past_key_values, use_cache=True)


def test_a_function_for_another_backend_within_a_running_model_is_bounded() -> None:
    """Another compiled model that is called there was a part of that function's graph, with a full cache."""
    (ids, _), other = prompt(1, 12, ()), kvpass.compile(tiny(), **POLICY)
    model = kvpass.compile(Hinted(torch.compile(Sampling(other), backend="eager")), **POLICY)
    with torch.no_grad():
        assert bounded(model(ids).past_key_values)
        assert bounded(model.hints[0][1])
        assert bounded(model.hint(*model.hints[0])[1])


def test_a_model_that_another_backend_compiles_in_place_is_one_graph() -> None:
    (ids, _), model, made = prompt(1, 12, ()), kvpass.compile(tiny(), **POLICY), list[Any]()
    model.compile(backend=lambda gm, _: made.append(gm) or gm.forward)
    with torch.no_grad():
        assert not bounded(model(ids, use_cache=True).past_key_values)
    assert len(made) == 1


@pytest.mark.parametrize("traced", [True, False])
def test_an_exported_model_has_no_cache(traced: bool) -> None:
    ids, _ = prompt(1, 12, ())
    model = kvpass.compile(tiny(), **POLICY)
    error = torch._dynamo.exc.Unsupported if traced else kvpass.UnsupportedGraph
    with torch.no_grad():
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=traced)
        assert torch.allclose(program.module()(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
        with pytest.raises(error, match=r"another backend's graph|torch\.export records"):
            torch.export.export(Sampling(model), (ids,), strict=traced)


# -- hooks ------------------------------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[[Any, list[int]], Any]] = {
    "of the model": lambda model, ran: model.register_forward_hook(lambda *_: ran.append(1)),
    "of a layer": lambda model, ran: model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1)),
    "of a projection": lambda model, ran: model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda *_: ran.append(1)
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_are_added_and_removed_later_count(name: str) -> None:
    """Check that Dynamo guards on hooks, which it does not do by default."""
    model, ran = kvpass.compile(tiny(), **POLICY), list[int]()
    ids, _ = prompt(1, 12, ())
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        added = HOOKS[name](model, ran)
        for count in range(1, 3):
            cache = model(ids[:, :1], past_key_values=cache).past_key_values
            assert len(ran) == count
        added.remove()
        cache = model(ids[:, :1], past_key_values=cache).past_key_values
    assert len(ran) == 2
    assert bounded(cache)


@pytest.mark.slow
def test_hooks_that_are_added_later_count_in_a_decode_loop() -> None:
    model, (ids, _) = tiny(), prompt(1, 12, ())
    loop = kvpass.DecodeLoop(model, **POLICY)
    loop.prompt(ids)
    loop.generate(6)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.masked_fill(torch.arange(128) == 7, 1e4))
    assert loop.generate(6)[0, 1:].tolist() == [7] * 5  # the first token was chosen before


# -- early refusals ----------------------------------------------------------------------------------------------------


def test_continuous_batching_is_refused_where_it_begins() -> None:
    model = kvpass.compile(tiny(), **POLICY)
    for each in (model, copy.deepcopy(model), kvpass.compile(Speaking(tiny()), **POLICY).language_model):
        with pytest.raises(kvpass.UnsupportedGraph, match=r"DecodeLoop\(model, \.\.\., rows=N\)"):
            each.generate_batch([[3, 4, 5]])


def test_attention_masks_of_the_new_tokens_alone_are_named() -> None:
    model, (ids, mask) = kvpass.compile(tiny(), **POLICY), prompt(2, 9, (2, 0))
    for count in (4, 1):
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            with pytest.raises(kvpass.UnsupportedGraph, match=f"has {count} columns, but needs {9 + count}:"):
                model(ids[:, :count], attention_mask=mask[:, -count:], past_key_values=cache)


def test_a_refusal_keeps_its_class_where_the_mask_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: StepRunner, arguments: object) -> None:
        raise UnreadableGraph("no rewrite", line="model.py:7: return x")

    model, (ids, mask) = kvpass.compile(tiny(), **POLICY), prompt(2, 9, (2, 0))
    monkeypatch.setattr(StepRunner, "_run", fail)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        expected = r"^model\.py:7: return x: .*has 1 columns, but needs 10.* With this mask: no rewrite$"
        with pytest.raises(UnreadableGraph, match=expected) as refused:
            model(ids[:, :1], attention_mask=mask[:, -1:], past_key_values=cache)
    assert refused.value.line == "model.py:7: return x"
    assert refused.value.reason.endswith("With this mask: no rewrite")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_count_that_torch_took_for_a_constant_says_what_to_do(name: str) -> None:
    """Check a prompt beyond a window whose cache the model makes while torch traces it."""
    model, (ids, mask) = zoo.build(name), prompt(2, 13, (2, 0))
    compiled = torch.compile(model, backend=kvpass.backend(**POLICY))
    with torch.no_grad():
        cache = compiled(ids[:, :12], attention_mask=mask[:, :12], use_cache=True).past_key_values
        with pytest.raises(kvpass.UnsupportedGraph, match=r"count for a constant .* Pass DynamicCache"):
            compiled(ids[:, 12:], attention_mask=mask, past_key_values=cache)
        torch._dynamo.reset()  # otherwise the graph that was refused serves the next step too
        given = transformers.DynamicCache(config=model.config)
        cache = compiled(ids[:, :12], attention_mask=mask[:, :12], past_key_values=given).past_key_values
        out = compiled(ids[:, 12:], attention_mask=mask, past_key_values=cache)
    assert all(layer.capacity <= POLICY["budget"] + 1 for layer in kvpass.inspect(out.past_key_values).layers)


@pytest.mark.slow
def test_the_mask_of_an_encoder_has_columns_of_its_own() -> None:
    """Check that the refusal of a decoder's step keeps its reason when the encoder has a mask."""
    model = kvpass.compile(zoo.build("t5", "reading"), **POLICY)
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), use_cache=True)
    with torch.no_grad():
        out = model(ids, decoder_input_ids=ids[:, :5], **given)
        with pytest.raises(kvpass.UnsupportedGraph, match="attention") as refused:
            model(
                ids,
                decoder_input_ids=ids[:, :1],
                past_key_values=out.past_key_values,
                output_attentions=True,
                **given,
            )
    assert "columns" not in str(refused.value)


def test_chunks_are_traced_once_however_their_tokens_are_given() -> None:
    model, (ids, _) = kvpass.compile(tiny(), **POLICY), prompt(1, 40, ())
    with torch.no_grad():
        cache, counts = model(ids[:, :8], use_cache=True).past_key_values, []
        for start in range(8, 40, 8):
            cache = model(ids[:, start : start + 8], past_key_values=cache).past_key_values
            counts.append(graphs())
    assert counts[1:] == [counts[1]] * 3


def test_several_steps_in_one_graph_say_what_to_do() -> None:
    """Check the error for a loop in a compiled function: it is unrolled, and the cache grows several times."""

    def two(model: Any, ids: Tensor, cache: Any) -> Tensor:
        for _ in range(2):
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        return ids

    compiled = torch.compile(two, backend=kvpass.backend(**POLICY))
    with torch.no_grad(), pytest.raises(kvpass.UnsupportedGraph, match=r"grows again at .*calls the model once"):
        compiled(tiny(), prompt(1, 12, ())[0], transformers.DynamicCache())


def test_training_with_a_cache_says_what_to_do() -> None:
    model, (ids, _) = tiny(), prompt(2, 9, ())
    with pytest.raises(kvpass.UnsupportedGraph, match="to train, pass use_cache=False"):
        kvpass.compile(model.train(), **POLICY)(ids, labels=ids)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.slow
def test_flex_attention_says_what_to_use() -> None:
    model = tiny()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(kvpass.UnsupportedGraph, match="attn_implementation='sdpa' or 'eager'"):
        generate(kvpass.compile(model, **POLICY))


# -- modes ------------------------------------------------------------------------------------------------------------


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), Passing], ids=["device", "mode"])
def test_steps_run_under_a_function_mode(mode: Callable[[], Any]) -> None:
    """Check that a traced `__torch_function__` disables modes, which Dynamo would call repeatedly otherwise."""
    expected = generate(kvpass.compile(tiny(), **POLICY), num_beams=2)
    before = graphs()
    with mode():
        out = generate(kvpass.compile(tiny(), **POLICY), num_beams=2)
        kvpass.inspect(copy.deepcopy(out.past_key_values))
    assert torch.equal(out.sequences, expected.sequences)
    assert graphs() <= 2 * before


@pytest.mark.slow
def test_steps_run_under_a_default_device() -> None:
    torch.set_default_device("cpu")
    try:
        loop = kvpass.DecodeLoop(tiny(), **POLICY)
        loop.prompt(prompt(2, 12, ())[0])
        assert loop.generate(4).shape == (2, 4)
    finally:
        torch.set_default_device(None)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_float32_run_under_autocast(dtype: torch.dtype) -> None:
    """Test autocast: values in half precision are concatenated with float32 keys, and promoted exactly."""
    model, (ids, mask) = tiny(), prompt(2, 12, (2, 0))
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        expected = model(ids, attention_mask=mask).logits[:, -1]
        kvpass.compile(model, "full", inner="eager")
        out = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        for index in range(9, 12):
            more: dict[str, Any] = dict(attention_mask=mask[:, : index + 1], past_key_values=out.past_key_values)
            out = model(ids[:, index : index + 1], **more)
    assert bounded(out.past_key_values)
    assert out.past_key_values.layers[0].values.dtype == torch.float32
    assert (out.logits[:, -1] - expected).abs().max() < 0.02 * expected.abs().max()


JAMBA: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_offset=1, num_experts=2,
    use_mamba_kernels=False, mamba_d_state=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.mark.slow
def test_a_second_turn_of_a_model_that_maps_over_rows() -> None:
    """Test Jamba, which scans a turn under vmap: the calls that enter and leave vmap stay in the graph."""
    model = transformers.JambaForCausalLM(transformers.JambaConfig(**JAMBA)).eval()
    ids, _ = prompt(1, 24, ())

    def turns(call: Any) -> list[Tensor]:
        cache, logits = None, []
        for first, last in ((0, 12), (12, 17), (17, 18), (18, 24)):
            out = call(ids[:, first:last], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return logits

    with torch.no_grad():
        expected = turns(model)
        kvpass.compile(model, "full", inner="eager")
        for ours, theirs in zip(turns(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
