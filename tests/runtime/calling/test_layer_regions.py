"""Test layers that are traced once: equal results, separate weights, and layers that cannot be regions."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import kvpass
from kvpass import model_access, versions
from kvpass.runtime.calling.in_place import compile_in_place
from kvpass.runtime.calling.layer_regions import RegionForward, install_regions
from kvpass.torch_private import regions
from tests import models
from tests.switch import Switch

LAYERS, BUDGET = 2, 12
needs_reuse = pytest.mark.skipif(not regions.are_supported(), reason="this version of torch traces each region anew")


class Counting:
    """A backend of kvpass that counts the layers in Dynamo's graphs and their shared traces."""

    def __init__(self, policy: str = "h2o", budget: int | None = BUDGET) -> None:
        self.inner = kvpass.backend(policy, budget=budget, inner="eager")
        self.layers: list[tuple[int, int]] = []

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        calls = gm.graph.find_nodes(op="call_function", target=regions.CALL)
        self.layers.append((len(calls), len({call.args[0].target for call in calls})))
        return self.inner(gm, examples)


def talk(model: Any, ids: Tensor, parts: Sequence[int]) -> Tensor:
    """Feed tokens in parts, and return all logits."""
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for part in ids.split(list(parts), 1):
            out = model_access.call_model(model, part, cache)
            cache = model_access.cache_of_output(out)
            logits.append(out.logits)
    return torch.cat(logits, 1)


def ids_of(rows: int, count: int) -> Tensor:
    return torch.randint(3, 128, (rows, count), generator=torch.Generator().manual_seed(1))


def layer_calls(model: torch.nn.Module) -> list[RegionForward]:
    return [call for each in model.modules() if isinstance(call := each.__dict__.get("forward"), RegionForward)]


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_results_are_those_of_layers_traced_one_by_one(architecture: str) -> None:
    """Compare results under two policies, which share Dynamo's traces."""
    model, ids, parts = models.build(architecture, layers=LAYERS), ids_of(2, 24), (16, 1, 1, 5, 1)
    plain, once, one_by_one = copy.deepcopy(model), Switch(), Switch()
    compile_in_place(model, once, True)
    compile_in_place(plain, one_by_one, True)
    for call in layer_calls(plain):
        call.regions.usable = False
    for policy in ("h2o", "streaming"):
        chosen = kvpass.backend(policy, budget=BUDGET, inner="eager")
        once.to(chosen), one_by_one.to(chosen)
        assert torch.equal(talk(model, ids, parts), talk(plain, ids, parts))


@needs_reuse
@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Gemma", "Cohere"])
def test_one_trace_serves_all_layers_of_each_graph(architecture: str) -> None:
    model, backend = models.build(architecture, layers=LAYERS), Counting()
    compile_in_place(model, backend, True)
    talk(model, ids_of(1, 20), (16, 1, 1, 1, 1))
    assert set(backend.layers) == {(LAYERS, 1)}


@pytest.mark.few(1)
@torch.no_grad()
def test_prompts_without_a_cache_and_with_an_empty_one_share_a_graph() -> None:
    model, backend = models.build("Llama", layers=LAYERS), Counting()
    compile_in_place(model, backend, True)
    model(ids_of(1, 16), use_cache=True)
    model_access.call_model(model, ids_of(1, 16), DynamicCache(config=model.config))
    assert len(backend.layers) == 1
    model(ids_of(1, 16), use_cache=False)
    assert len(backend.layers) == 2


@pytest.mark.few(1)
@needs_reuse
@pytest.mark.parametrize("replaced", range(LAYERS))
def test_each_layer_has_weights_of_its_own(replaced: int) -> None:
    """Change a weight in one layer, and compare the result with the plain model."""
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    with torch.no_grad():
        model.model.layers[replaced].self_attn.v_proj.weight.mul_(-3)
        wanted = model(ids).logits
    compile_in_place(model, backend := Counting("full", None), True)
    assert torch.allclose(talk(model, ids, (8, 1, 1)), wanted, atol=1e-5)
    assert set(backend.layers) == {(LAYERS, 1)}


class Negated(torch.nn.Linear):
    """A product that is negated."""

    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def _other_activation(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


def _other_class(layer: Any) -> None:
    layer.mlp.down_proj.__class__ = Negated


def _forward_of_its_own(layer: Any) -> None:
    own = layer.mlp
    own.forward = lambda hidden: type(own).forward(own, hidden) * -2


def _nested_modules(layer: Any) -> None:
    layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Tanh())


def _other_number(layer: Any) -> None:
    layer.self_attn.scaling = 3.0


def _other_object(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 0.5


def _hook(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, arguments, output: -output)


def _hook_before(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_pre_hook(lambda module, arguments: (arguments[0] * -0.5,))


CHANGES = (_other_activation, _other_class, _forward_of_its_own, _nested_modules, _other_number, _other_object)


@needs_reuse
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs_keeps_its_own_code(change: Callable[[Any], None], later: bool, layer: int) -> None:
    """Change one layer before the first conversation, or after it."""
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    plain = copy.deepcopy(model)
    change(plain.model.layers[layer])
    compile_in_place(model, Counting("full", None), True)
    if later:
        talk(model, ids, (8, 1, 1))
    change(model.model.layers[layer])
    assert torch.allclose(talk(model, ids, (8, 1, 1)), talk(plain, ids, (8, 1, 1)), atol=1e-5)


@needs_reuse
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("change", [_hook, _hook_before])
def test_a_layer_with_hooks_inside_keeps_its_own_code(change: Callable[[Any], None], layer: int) -> None:
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    change(model.model.layers[layer])
    wanted = talk(model, ids, (8, 1, 1))
    compile_in_place(model, Counting("full", None), True)
    assert torch.allclose(talk(model, ids, (8, 1, 1)), wanted, atol=1e-5)


@needs_reuse
def test_a_layer_with_a_configuration_of_its_own_keeps_its_own_code() -> None:
    """Check objects that all layers share, and that Dynamo knows by another path."""
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    own = type(model.model.layers[0].mlp).forward

    def scaled(self: Any, hidden: Tensor) -> Tensor:
        return own(self, hidden) * self.config.pretraining_tp

    kind = type("Scaled", (type(model.model.layers[0].mlp),), {"forward": scaled})
    for each in model.model.layers:
        each.mlp.__class__ = kind
    model.model.layers[1].mlp.config = copy.deepcopy(model.config)
    model.model.layers[1].mlp.config.pretraining_tp = -2
    wanted = talk(model, ids, (8, 1, 1))
    compile_in_place(model, Counting("full", None), True)
    assert torch.allclose(talk(model, ids, (8, 1, 1)), wanted, atol=1e-5)


def _breaks(layer: Any) -> None:
    def breaking(hidden: Any, *args: Any, **named: Any) -> Any:
        torch._dynamo.graph_break()
        return type(layer.mlp).forward(layer.mlp, hidden, *args, **named)

    layer.mlp.forward = breaking


def _counts(layer: Any) -> None:
    layer.mlp.calls = 0

    def counting(hidden: Any) -> Any:
        layer.mlp.calls = layer.mlp.calls + 1
        return type(layer.mlp).forward(layer.mlp, hidden)

    layer.mlp.forward = counting


def _asks_the_cache(layer: Any) -> None:
    own = type(layer.self_attn).forward

    def asking(*args: Any, **named: Any) -> Any:
        cache = named.get(model_access.NEW_KEYWORD, named.get(model_access.OLD_KEYWORD))
        assert len(cache.layers) == LAYERS
        return own(layer.self_attn, *args, **named)

    layer.self_attn.forward = asking


@needs_reuse
@pytest.mark.few(1)
@pytest.mark.parametrize("changed", [pytest.param(_breaks, marks=pytest.mark.slow), _counts, _asks_the_cache])
def test_layers_that_no_region_can_hold_are_traced_one_by_one(
    changed: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpass.regions")
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    with torch.no_grad():
        wanted = model(ids).logits
    for layer in model.model.layers:
        changed(layer)
    compile_in_place(model, backend := Counting("full", None), True)
    assert torch.allclose(talk(model, ids, (8, 1, 1)), wanted, atol=1e-5)
    assert backend.layers[-1] == (0, 0)
    said = [record.getMessage() for record in caplog.records if record.name == "kvpass.regions"]
    refused = not layer_calls(model)[0].regions.usable  # torch itself retraces calls that change an integer
    assert [each.partition(" from now on")[0] for each in said] == [
        "LlamaForCausalLM: its layers are traced separately"
    ] * refused
    assert refused or changed is _counts
    assert ("a layer reads 'layers' of the model's cache" in "".join(said)) == (changed is _asks_the_cache)


def test_a_layer_that_stores_under_the_index_of_another_is_no_region() -> None:
    model = models.build("Llama", layers=LAYERS)
    model.model.layers[-1].self_attn.layer_idx = LAYERS - 2
    kvpass.compile(model, "h2o", budget=BUDGET, inner="eager")
    assert not layer_calls(model)


@needs_reuse
def test_an_index_that_is_computed_is_no_reason_to_reuse_a_trace() -> None:
    """Check that layers that share a cache by `layer_idx // 2` are traced separately, and refused."""
    model = models.build("Llama", layers=LAYERS)
    for layer in model.model.layers:
        own, attention = type(layer.self_attn).forward, layer.self_attn

        class Halved:
            def __init__(self, cache: Any) -> None:
                self.cache = cache

            def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **named: Any) -> Any:
                return self.cache.update(key, value, layer_idx // 2, *args, **named)

        def sharing(*args: Any, own: Any = own, attention: Any = attention, **named: Any) -> Any:
            new, old = model_access.NEW_KEYWORD, model_access.OLD_KEYWORD
            name = new if named.get(new) is not None else old
            named[name] = Halved(named[name])
            return own(attention, *args, **named)

        attention.forward = sharing
    compile_in_place(model, backend := Counting(), True)
    with pytest.raises(kvpass.UnsupportedGraph, match="cache-updating"):
        talk(model, ids_of(1, 10), (8, 1, 1))
    assert set(backend.layers) == {(0, 0)}


@needs_reuse
@pytest.mark.few(1)
@pytest.mark.parametrize("refused", [1, 2])
def test_a_refused_graph_leaves_the_others_as_they_are(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a refused graph triggers no recompilation: Dynamo does not guard on regions."""
    model, backend, seen = models.build("Llama", layers=LAYERS), Counting(), 0
    parts = (16, 1, 5, 1)
    wanted = talk(copy.deepcopy(model), ids_of(1, 16), (16,))

    def check(gm: fx.GraphModule) -> None:
        nonlocal seen
        seen += 1
        if seen == refused:
            raise regions.RegionMismatch("as in a graph that cannot be")

    monkeypatch.setattr(regions, "check_weights", check)
    compile_in_place(model, backend, True)
    with models.sharing_compiled_code():
        talk(model, ids_of(1, 23), parts)
        count = len(backend.layers)
        assert [total for total, _ in backend.layers] == [LAYERS] * refused + [0] * (count - refused)
        torch.testing.assert_close(talk(model, ids_of(1, 23), parts)[:, :16], wanted)
        assert len(backend.layers) == count


@pytest.mark.few(1)
@needs_reuse
def test_layers_stay_regions_if_a_call_is_refused_without_them_too() -> None:
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    compile_in_place(model, backend := Counting(), True)
    with pytest.raises(kvpass.UnsupportedGraph, match="needs gradients"):
        model(ids)
    talk(model, ids, (8, 1, 1))
    assert backend.layers[-1] == (LAYERS, 1)


def test_no_layer_is_a_region_where_dynamo_suppresses_errors() -> None:
    """Check that error suppression disables regions: a failed one would append to the cache twice."""
    compile_in_place(model := models.build("Llama", layers=LAYERS), backend := Counting(), True)
    with torch._dynamo.config.patch(suppress_errors=True):
        talk(model, ids_of(1, 18), (16, 1, 1))
    assert set(backend.layers) == {(0, 0)}


class Named:
    """Returns a layer under a path that is not the model's."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getitem__(self, index: int) -> Any:
        return self.layer


@needs_reuse
def test_a_reuse_with_the_weights_of_another_layer_is_seen() -> None:
    """Check against torch 2.13, which reuses the first layer's weights if layers have a second path."""
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    with torch.no_grad():
        wanted = model(ids).logits
    compile_in_place(model, backend := Counting("full", None), True)
    for call in layer_calls(model):
        call.layers = Named(call.layers[call.index])  # type: ignore[assignment]
    assert torch.allclose(talk(model, ids, (8, 1, 1)), wanted, atol=1e-5)
    assert backend.layers[-1] in ((0, 0), (LAYERS, 1))


def test_copies_have_layers_of_their_own() -> None:
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    kvpass.compile(model, "full", inner="eager")
    before = talk(model, ids, (9, 1))
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in others:
        assert torch.equal(talk(other, ids, (9, 1)), before)
        assert all(a is not b for a, b in zip(layer_calls(model), layer_calls(other), strict=True))


class Doubled(torch.nn.Module):
    """A layer around a layer, with the index of a cache of the layer inside."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        return self.inside(2 * hidden_states, *args, **named)


def _exchange(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[2] = layers[2], layers[0]


def _wrap(model: Any) -> None:
    model.model.layers[1] = Doubled(model.model.layers[1])


def _prune(model: Any) -> None:
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in (0, 2)])
    _number(model)


def _delete(model: Any) -> None:
    del model.model.layers[1]
    _number(model)


def _append_a_copy(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    _number(model)


def _number(model: Any) -> None:
    """Give each layer its index in the list, as a user does who changes the list."""
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = ["full_attention"] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index


@pytest.mark.parametrize("called_before", [True, False])
@pytest.mark.parametrize("change", [_exchange, _wrap, _prune, _delete, _append_a_copy])
def test_a_list_of_layers_may_be_changed_later(change: Callable[[Any], None], called_before: bool) -> None:
    """Check that each layer keeps its weights and its own cache; the model runs uncompiled for comparison."""
    plain, ids, parts = models.build("Llama", layers=3), ids_of(2, 14), (9, 1, 1, 3)
    model = kvpass.compile(copy.deepcopy(plain), "full", budget=64, inner="eager")
    if called_before:
        talk(model, ids, parts)
    change(model), change(plain)
    assert not torch.allclose(talk(plain, ids, parts), talk(models.build("Llama", layers=3), ids, parts))
    torch.testing.assert_close(talk(model, ids, parts), talk(plain, ids, parts))
    with torch.no_grad():  # uncompiled
        inner, expected = (
            each.model(inputs_embeds=torch.ones(1, 4, plain.config.hidden_size), use_cache=False)
            for each in (model, plain)
        )
    torch.testing.assert_close(inner.last_hidden_state, expected.last_hidden_state)


def test_uncompiled_layers_run_as_they_are() -> None:
    model, ids = models.build("Llama", layers=LAYERS), ids_of(1, 10)
    with torch.no_grad():
        wanted = model.model(ids).last_hidden_state
        kvpass.compile(model, "full", inner="eager")
        model.compile(backend="eager")  # not a backend of kvpass, so layers are not regions
        assert torch.equal(model.model(ids, use_cache=False).last_hidden_state, wanted)


def test_without_a_name_of_transformers_layers_are_traced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.cache_utils.DynamicLayer")
    assert not install_regions(models.build("Llama", layers=4)).indices


class Marked(DynamicLayer):
    """A layer's cache that holds more than keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.marked = True


class Growing(DynamicLayer):
    """A layer's cache with a counter."""

    tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        self.tokens += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **named)


class Scaled(DynamicLayer):
    """A layer's cache whose update needs another argument."""

    def update(self, key_states: Tensor, value_states: Tensor, scale: float, *args: Any) -> tuple[Tensor, Tensor]:
        return super().update(key_states * scale, value_states, *args)


@needs_reuse
@pytest.mark.parametrize("kind", [Marked, Growing, Scaled])
def test_layers_whose_cache_holds_more_are_traced_one_by_one(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("Llama", layers=4)
    assert install_regions(copy.deepcopy(model)).indices
    monkeypatch.setattr("transformers.cache_utils.DynamicLayer", kind)
    assert not install_regions(model).indices


@needs_reuse
@pytest.mark.parametrize("name", ["build_reuse_condition", "is_reusable"])
def test_a_function_of_torch_with_other_parameters_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(tx: Any, fingerprint: Any, tracer: Any) -> None: ...

    monkeypatch.setattr(f"{regions.REUSE}.{name}", changed)
    monkeypatch.setattr(versions, "untested_version", lambda package: "9.9")
    with pytest.warns(
        kvpass.KVPassWarning, match="traced separately, which takes longer: this torch or transformers cannot"
    ):
        assert not install_regions(models.build("Llama", layers=4)).indices


def ask_for_length(cache: Any) -> float:
    return float(cache.get_seq_length())  # of layer 0, whose tokens of this call later layers already count


def ask_for_length_of_layer_0(cache: Any) -> float:
    return float(cache.get_seq_length(0))


def ask_for_attribute(cache: Any) -> float:
    return float(getattr(cache, "offset", 0))


def ask_for_class(cache: Any) -> float:
    return 7.0 if isinstance(cache, DynamicCache) else 0.0


def ask_for_number_of_layers(cache: Any) -> float:
    return float(len(cache))


def ask_for_size_of_masks(cache: Any) -> float:
    return float(cache.get_mask_sizes(1, 0)[0])


def ask_for_truth(cache: Any) -> float:
    return 3.0 if cache else 0.0


ASKING = [
    ask_for_length, ask_for_length_of_layer_0, ask_for_attribute, ask_for_class, ask_for_number_of_layers,
    ask_for_size_of_masks, ask_for_truth,
]  # fmt: skip


@pytest.mark.parametrize("ask", ASKING)
def test_layers_that_ask_the_whole_cache_are_no_regions(ask: Callable[[Any], float]) -> None:
    """Check that what stands for the cache within a region gives no answer that the cache would not give."""
    plain = models.build("Llama", layers=4)
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        let_attention_ask(model, ask)
    kvpass.compile(ours, "full", inner="eager")
    for out, wanted in zip(pieces_of(ours), pieces_of(plain), strict=True):
        torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


def let_attention_ask(model: Any, ask: Callable[[Any], float]) -> None:
    """Scale the hidden states of each layer by what its attention reads from the cache."""
    for layer in model.model.layers:
        own, attention = type(layer.self_attn).forward, layer.self_attn

        def asking(hidden_states: Tensor, own: Any = own, attention: Any = attention, **named: Any) -> Any:
            cache = named.get("cache", named.get("past_key_values"))
            return own(attention, hidden_states * (1 + 0.05 * ask(cache)), **named)

        attention.forward = asking


@torch.no_grad()
def pieces_of(model: Any) -> list[Tensor]:
    """Return the logits of a conversation on a cache with an attribute of its own."""
    ids, _ = models.prompt(2, 8, ())
    cache, logits = DynamicCache(config=model.config), []
    cache.offset = 3
    for piece in ids.split([5, 1, 1, 1], 1):
        out = model_access.call_model(model, piece.contiguous(), cache)
        cache = model_access.cache_of_output(out)
        logits.append(out.logits)
    return logits


class Both(torch.nn.Module):
    """Two models, of which this one calls the first."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__()
        self.a, self.b, self.config = a, b, a.config

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        return self.a(input_ids, past_key_values=past_key_values, use_cache=use_cache)


@needs_reuse
@pytest.mark.parametrize("first", ["a b", "b", "a", ""])
def test_models_with_regions_are_compiled_again_as_parts_of_another(first: str) -> None:
    plain = Both(models.build("Llama", layers=LAYERS), models.build("GPT2", layers=LAYERS))
    both, ids, backend = copy.deepcopy(plain), ids_of(1, 10), Counting("full", None)
    for name in first.split():
        kvpass.compile(getattr(both, name), inner="eager")
    compile_in_place(both, backend, True)
    for ours, wanted in ((both.b, plain.b), (both.a, plain.a), (both, plain)):
        torch.testing.assert_close(talk(ours, ids, (8, 1, 1)), talk(wanted, ids, (8, 1, 1)), atol=1e-5, rtol=1e-5)
    assert set(backend.layers) == {(LAYERS, 1)}
    assert len({id(call.regions) for call in layer_calls(both)}) == 1


def _then_breaks(own: Any, count: Callable[[], Any]) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        count()
        torch._dynamo.graph_break()
        return own(*args, **named)

    return forward


def _breaks_in_a_loop(own: Any, count: Callable[[], Any]) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        for _ in range(2):
            count()
            torch._dynamo.graph_break()
        return own(*args, **named)

    return forward


def _counts_uncompiled(own: Any, count: Callable[[], Any]) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        torch.compiler.disable(count)()
        return own(*args, **named)

    return forward


@pytest.mark.parametrize("breaks", [_then_breaks, _breaks_in_a_loop, _counts_uncompiled])
@pytest.mark.parametrize("in_graph", [True, False])
def test_no_side_effect_of_a_call_is_repeated(breaks: Callable[..., Any], in_graph: bool) -> None:
    """Test calls that have run a part of the model before Dynamo reaches layers that cannot be regions."""
    model, ids, calls, steps = models.build("Llama", layers=LAYERS), ids_of(1, 10), [0], torch.zeros((), dtype=int)
    with torch.no_grad():
        wanted = model(ids).logits
    for layer in model.model.layers:
        _asks_the_cache(layer)

    def count() -> None:
        if in_graph:
            steps.add_(1)
        else:
            calls[0] += 1

    own = type(model.model).forward.__get__(model.model)
    model.model.forward = breaks(own, count)
    kvpass.compile(model, inner="eager")
    assert torch.allclose(talk(model, ids, (8, 1, 1)), wanted, atol=1e-5)
    assert int(steps) + calls[0] == 3 * (2 if breaks is _breaks_in_a_loop else 1)


@pytest.mark.parametrize("disabled", ["layers", "model"])
def test_layers_that_run_uncompiled_get_the_cache_itself(disabled: str) -> None:
    """Check that code which Dynamo does not trace sees no region, where a cache of one layer would lack members."""
    plain = models.build("Llama", layers=LAYERS)
    let_attention_ask(plain, lambda cache: float(len(cache.layers)))
    for strict in (True, False):
        model = copy.deepcopy(plain)
        let_attention_ask(model, lambda cache: float(len(cache.layers)))
        for module in model.model.layers if disabled == "layers" else [model.model]:
            module.forward = torch.compiler.disable(type(module).forward.__get__(module))
        kvpass.compile(model, inner="eager", strict=strict)
        if strict:
            with pytest.raises(kvpass.UnsupportedGraph, match="returned an ordinary cache"):
                talk(model, ids_of(1, 8), (8,))
        else:
            wanted = talk(plain, ids_of(1, 10), (8, 1, 1))
            assert torch.allclose(talk(model, ids_of(1, 10), (8, 1, 1)), wanted, atol=1e-5)
