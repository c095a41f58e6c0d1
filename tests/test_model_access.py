"""Test caches under both names, `cache` and `past_key_values`, as arguments and in outputs.

The name follows from the signature of the called function. A cache that does not count the tokens fed is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvpass
from kvpass import model_access
from kvpass.errors import CacheHandleError, PolicyError
from kvpass.model_access import NEW_KEYWORD as NEW
from kvpass.model_access import OLD_KEYWORD as OLD
from kvpass.runtime.calling import model_arguments
from tests.models import build, prompt


def of_old(ids: Any, past_key_values: Any = None, cache: bool = True) -> None:
    """A model from before the rename, with another meaning of the new name."""


def of_new(ids: Any, cache: Any = None, **swallowed: Any) -> None: ...


def of_any(*ids: Any, **swallowed: Any) -> None: ...


@functools.wraps(of_new)
def with_an_alias(*ids: Any, **named: Any) -> None: ...


class Wrapper(nn.Module):
    def __init__(self, **inside: Any) -> None:
        super().__init__()
        for name, value in inside.items():
            setattr(self, name, value)

    def forward(self, *ids: Any, **named: Any) -> None: ...


class New(nn.Module):
    def forward(self, ids: Any, cache: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (of_old, OLD),
        (of_new, NEW),
        (of_any, OLD),
        (with_an_alias, NEW),
        (New(), NEW),
        (New().forward, NEW),
        (Wrapper(module=New()), NEW),
        (Wrapper(get_base_model=lambda: New()), NEW),
        (Wrapper(pretrained_model=Wrapper(module=New())), NEW),
        (Wrapper(), OLD),
        (torch.compile(New(), backend="eager"), NEW),
        (torch.compile(of_new, backend="eager"), NEW),
    ],
)
def test_the_name_is_that_of_the_signature(model: Any, name: str) -> None:
    assert model_access.cache_keyword(model) == name
    assert model_access.cache_arguments(model, "kept") == {name: "kept"}
    assert model_access.cache_arguments(model, None) == {}


def test_a_function_that_was_set_on_a_module_is_not_kept() -> None:
    """Check that the function is released, because it may hold the module's weights."""
    module = nn.Linear(2, 2)

    def forward(self: nn.Module, cache: Any, own: Any = module.forward) -> Any:
        return own(cache)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    assert model_access.cache_parameter(module)
    assert {"cache", "own"} <= {*model_access.forward_parameters(module)}
    gone = weakref.ref(module)
    del module, forward
    gc.collect()
    assert gone() is None


def test_models_of_transformers_have_the_name_of_their_version() -> None:
    """Check that a decorated alias does not hide the original."""
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert model_access.cache_keyword(build("Llama")) == (NEW if release >= (5, 24) else OLD)


@pytest.mark.parametrize(
    ("given", "taken", "passed"),
    [
        ({OLD: 1, "ids": 2}, {NEW, "ids"}, {NEW: 1, "ids": 2}),
        ({NEW: 1}, {OLD}, {OLD: 1}),
        ({OLD: 1, NEW: True}, {OLD, NEW}, {OLD: 1, NEW: True}),
        ({OLD: 1, NEW: 2}, {NEW}, {OLD: 1, NEW: 2}),  # the model itself raises for both names
        ({OLD: 1}, {"kwargs"}, {OLD: 1}),
        ({"ids": 2}, {NEW}, {"ids": 2}),
    ],
)
def test_a_cache_argument_is_renamed_to_a_name_that_the_model_takes(given: Any, taken: set[str], passed: Any) -> None:
    assert model_access.rename_cache(given, frozenset(taken)) == passed


def test_the_cache_of_an_output_is_found_under_either_name() -> None:
    for output in (SimpleNamespace(cache=3), SimpleNamespace(past_key_values=3), {NEW: 3}, {OLD: 3, NEW: None}):
        assert model_access.cache_of_output(output) == 3
    assert model_access.cache_of_output(SimpleNamespace(logits=3)) is None
    assert model_access.cache_of_output((3, 4)) is None


@dataclasses.dataclass
class Output:
    logits: Tensor
    cache: Any


class Swallowing(nn.Module):
    """A model that takes its cache as `cache`, and accepts any other argument."""

    def __init__(self, forgets: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.inner, self.forgets, self.twice = build("Llama", layers=1), forgets, twice
        self.name = model_access.cache_keyword(self.inner)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        **swallowed: Any,
    ) -> Output:
        if self.twice:
            input_ids, attention_mask, position_ids = torch.cat([input_ids, input_ids], 1), None, None
        if self.forgets:
            cache, attention_mask = None, None
        out = self.inner(input_ids, attention_mask, position_ids, **{self.name: cache}, use_cache=True)
        return Output(out.logits, model_access.cache_of_output(out))


def compiled(model: nn.Module, **settings: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=kvpass.backend("full", inner="eager", **settings))


def test_chunks_reach_a_model_that_swallows_the_old_name() -> None:
    model, (ids, mask) = Swallowing().eval(), prompt(2, 24, (3, 0))
    expected = build("Llama", layers=1)(
        ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
    ).logits
    run = compiled(model)
    out = kvpass.prefill(run, ids[:, :16], mask[:, :16], chunk=8)
    for name in (NEW, OLD):
        with torch.no_grad():
            last = kvpass.prefill(run, ids[:, :16], mask[:, :16], chunk=8)
            last = kvpass.prefill(run, ids[:, 16:], mask, chunk=8, **{name: last.cache})
        torch.testing.assert_close(last.logits, expected[:, -1:], atol=1e-4, rtol=1e-4)
        assert kvpass.inspect(last).layers[0].seen == 24
    with pytest.raises(PolicyError, match="past_key_values"):
        kvpass.prefill(run, ids[:, 16:], mask, chunk=8, cache=out.cache, past_key_values=out.cache)


@torch.no_grad()
def test_a_loop_decodes_with_a_model_that_swallows_the_old_name() -> None:
    ids, _ = prompt(1, 12, ())
    loop, plain = kvpass.DecodeLoop(Swallowing().eval(), inner="eager", prefill_chunk=5), build("Llama", layers=1)
    loop.prompt(ids)
    found = loop.generate(6)
    for _ in range(6):
        ids = torch.cat([ids, plain(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids[:, 12:])
    assert loop.cache is loop.past_key_values
    assert kvpass.inspect(loop).layers[0].seen == kvpass.inspect(loop.cache).layers[0].seen


@torch.no_grad()
@pytest.mark.parametrize("model", [Swallowing, functools.partial(build, "Llama", layers=1)])
def test_a_bare_loop_may_use_either_name(model: Any) -> None:
    """Check that `kvpass.compile` accepts either name with every version of transformers."""
    torch._dynamo.reset()
    ids, _ = prompt(1, 12, ())
    expected = build("Llama", layers=1)(ids).logits
    run = kvpass.compile(model().eval(), "full", inner="eager")
    for name in (OLD, NEW):
        cache = None
        for part in ids.split([6, 5, 1], 1):
            out = run(part, **{name: cache}, use_cache=True)
            cache = model_access.cache_of_output(out)
        torch.testing.assert_close(out.logits, expected[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", ["forgets", "twice"])
def test_a_cache_that_does_not_count_what_was_fed_is_an_error(fault: str) -> None:
    model, (ids, _) = Swallowing(**{fault: True}).eval(), prompt(1, 24, ())
    with pytest.raises(CacheHandleError, match=r"Swallowing was fed 8 tokens after \d+, and .* counts \d+ tokens"):
        kvpass.prefill(compiled(model), ids, chunk=8)
    with pytest.raises(CacheHandleError, match="does not continue the cache passed as `cache`"):
        decoded(kvpass.DecodeLoop(model, inner="eager"), ids)


def decoded(loop: kvpass.DecodeLoop, ids: Tensor) -> Tensor:
    loop.prompt(ids)
    return loop.generate(3)


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_call_is_protected_under_either_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that tracing does not depend on the name, because caches are recognised by their handles."""
    torch._dynamo.reset()
    looked: list[Any] = []
    monkeypatch.setattr(
        model_arguments, "length_context", lambda cache, given: looked.append(cache) or contextlib.nullcontext()
    )
    run = kvpass.compile(build("Llama", layers=1), "full", inner="eager")
    with torch.no_grad():
        cache = model_access.cache_of_output(run(prompt(1, 5, ())[0], use_cache=True))
        run(torch.tensor([[3]]), **{name: cache}, use_cache=True)
        run(torch.tensor([[3]]), None, None, cache, use_cache=True)
    assert looked == [None, cache, cache]


@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_the_position_of_a_layers_cache_does_not_count_the_layer(architecture: str) -> None:
    model = build(architecture)
    layer = model.model.layers[0] if architecture == "Llama" else model.transformer.h[0]
    found = model_access.cache_parameter(layer)
    assert found is not None
    assert list(inspect.signature(layer.forward).parameters)[found[1]] == found[0]


@pytest.mark.parametrize(("named", "makes"), [({}, True), ({"use_cache": None}, True), ({"use_cache": False}, False)])
def test_whether_a_call_makes_a_cache(named: dict[str, Any], makes: bool) -> None:
    model = build("Llama")
    assert model_access.makes_empty_cache(model, named) == makes
    model.config.use_cache = False
    assert not model_access.makes_empty_cache(model, named)
    assert model_access.makes_empty_cache(model, {"use_cache": True})


def test_a_model_with_a_cache_for_cross_attention_makes_its_own() -> None:
    model = transformers.RemBertForCausalLM(
        transformers.RemBertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            input_embedding_size=16, output_embedding_size=16, is_decoder=True,
        )
    ).eval()  # fmt: skip
    assert not model_access.makes_empty_cache(model, {"use_cache": True})
    ids = torch.randint(0, 40, (1, 6))
    with torch.no_grad():
        wanted = model_access.cache_of_output(model(ids))
        got = model_access.cache_of_output(kvpass.compile(model, "full", inner="eager")(ids))
    assert type(got) is type(wanted)
