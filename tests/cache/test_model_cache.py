"""Test what is read from a model's own cache, in each form that models use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.cache import model_cache
from kvpass.cache.handle import handles_of
from kvpass.cache.layer_cache import LayerCache
from tests.runtime.prompts import admitted

FORMS = ["object", "encoder-decoder", "tuples", "dictionary"]
Pairs = list[tuple[Tensor, Tensor]]


def in_form(form: str, pairs: Pairs) -> Any:
    """Return a model's cache with the keys and values of each layer, in one of FORMS."""
    layers = [SimpleNamespace(keys=key, values=value) for key, value in pairs]
    if form == "object":
        return SimpleNamespace(layers=layers)
    if form == "encoder-decoder":
        cross = SimpleNamespace(layers=[SimpleNamespace(keys=torch.ones(1, 2, 50, 4)) for _ in pairs])
        return SimpleNamespace(self_attention_cache=SimpleNamespace(layers=layers), cross_attention_cache=cross)
    return {str(index): pair for index, pair in enumerate(pairs)} if form == "dictionary" else tuple(pairs)


def two_layers() -> list[LayerCache]:
    """Return the caches of two layers after a prompt of twelve tokens."""
    return admitted(kvpass.backend("streaming", budget=8, inner="eager"), 12, (0,), windows=[None, None])


def ordinary(*tokens: int) -> Pairs:
    """Return keys and values of three heads for each layer's number of tokens."""
    return [(torch.zeros(1, 3, count, 4), torch.zeros(1, 3, count, 4)) for count in tokens]


@pytest.mark.parametrize("form", FORMS)
def test_the_layers_of_a_bounded_cache_are_found_once_each_and_in_order(form: str) -> None:
    layers = two_layers()
    cache = in_form(form, [handles_of(layer, (2, 2)) for layer in layers])
    assert list(map(id, model_cache.caches_in(cache))) == list(map(id, layers))
    assert list(map(id, model_cache.caches_in(SimpleNamespace(cache=cache)))) == list(map(id, layers))  # of an output
    assert not model_cache.caches_in(in_form(form, ordinary(4, 4)))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dictionary"])
def test_a_bounded_cache_is_no_ordinary_one(form: str) -> None:
    cache = in_form(form, [handles_of(layer, (2, 2)) for layer in two_layers()])
    assert model_cache.has_handles(cache)
    assert model_cache.ordinary_keys(cache) == 0
    assert not model_cache.ordinary_caches([cache])
    assert not model_cache.returns_growing_cache({"past_key_values": cache})


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dictionary"])
def test_the_keys_of_an_ordinary_cache_are_counted_over_layers_and_heads(form: str) -> None:
    """Check that a layer which grows is seen next to one that does not, such as a window."""
    cache = in_form(form, ordinary(16, 4))
    assert not model_cache.has_handles(cache)
    assert model_cache.ordinary_keys(cache) == 3 * (16 + 4)
    assert model_cache.ordinary_keys(in_form(form, ordinary(16, 5))) == 3 * (16 + 5)
    assert model_cache.returns_growing_cache({"past_key_values": cache})


@pytest.mark.parametrize("form", ["object", "encoder-decoder"])
def test_a_cache_object_that_grows_in_place_has_grown(form: str) -> None:
    cache = in_form(form, ordinary(16, 4))
    before = model_cache.ordinary_caches([cache, 3, torch.zeros(1, 4), None])
    assert before == [(cache, 60)]
    assert not model_cache.have_grown(before)
    layer = model_cache.layers_of(cache)[1]
    layer.keys = torch.zeros(1, 3, 5, 4)
    assert model_cache.have_grown(before)


@pytest.mark.parametrize("value", [3, None, "layers", torch.zeros(2, 3), torch.nn.ModuleList(), {"a": 1}])
def test_other_arguments_are_no_caches(value: Any) -> None:
    assert not model_cache.is_cache_object(value)
    assert not model_cache.has_handles(value)
    assert not model_cache.ordinary_caches([value])
    assert not model_cache.caches_in(value)


@pytest.mark.parametrize("form", ["object", "tuples"])
def test_refreshed_handles_have_the_present_number_of_tokens(form: str) -> None:
    layers = two_layers()
    cache = in_form(form, [handles_of(layer, (2, 2)) for layer in layers])
    for layer in layers:
        layer.length += 3
    refreshed = model_cache.refresh_handles(cache, 3)
    assert [key.shape[2] for key in model_cache.key_tensors(refreshed)] == [15, 15]
    assert list(map(id, model_cache.caches_in(refreshed))) == list(map(id, layers))
