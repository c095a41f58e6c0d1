"""Handles: what people do to caches between forwards acts on the slots or says that it cannot."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import kvpass
from kvpass.handle import Handle
from tests.models import build, force, prompt

BUDGET = 8


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("Llama")


def started(model: torch.nn.Module, tokens: int = 14, **how: object) -> tuple[object, object, torch.Tensor]:
    """A compiled model, a cache with evictions behind it, and the ids that go on."""
    ids, _ = prompt(3, tokens + 6, ())
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=BUDGET, inner="eager", **how))
    with torch.no_grad():
        out = compiled(ids[:, : tokens - 3], use_cache=True)
        for t in range(tokens - 3, tokens):
            out = compiled(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
    return compiled, out.past_key_values, ids[:, tokens:]


@torch.no_grad()
def follow(compiled: object, cache: object, ids: torch.Tensor) -> torch.Tensor:
    logits = []
    for t in range(ids.shape[1]):
        out = compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True)  # type: ignore[operator]
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def test_looks_like_the_full_cache_and_holds_nothing(model: torch.nn.Module) -> None:
    _, cache, _ = started(model)
    handle = cache.layers[0].keys  # type: ignore[attr-defined]
    assert isinstance(handle, Handle)
    assert handle.shape == (3, 2, 14, 16)
    assert cache.get_seq_length() == 14  # type: ignore[attr-defined]
    assert handle.stride() == (0, 0, 0, 0)  # one number, whatever its shape says


def test_uncompiled_use_gives_an_error_and_not_a_plausible_answer(model: torch.nn.Module) -> None:
    _, cache, ids = started(model)
    with torch.no_grad(), pytest.raises(kvpass.CacheHandleError):
        model(ids[:, :1], past_key_values=cache, use_cache=True)


def test_reordered_rows_go_on_as_those_rows(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    straight = follow(compiled, copy.deepcopy(cache), ids)
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)  # type: ignore[attr-defined]
    assert torch.allclose(follow(compiled, cache, ids[order]), straight[order], atol=1e-5)


def test_fewer_rows(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    straight = follow(compiled, copy.deepcopy(cache), ids)
    cache.batch_select_indices(torch.tensor([0, 2]))  # type: ignore[attr-defined]
    assert torch.allclose(follow(compiled, cache, ids[[0, 2]]), straight[[0, 2]], atol=1e-5)


def test_a_copy_goes_its_own_way(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    twin = copy.deepcopy(cache)
    first = follow(compiled, cache, ids)
    assert torch.allclose(follow(compiled, twin, ids), first, atol=1e-6)


def test_a_stale_handle_is_noticed(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    layer = cache.layers[0]  # type: ignore[attr-defined]
    old = layer.keys, layer.values
    follow(compiled, cache, ids[:, :2])
    layer.keys, layer.values = old
    with pytest.raises(kvpass.CacheHandleError, match=r"14 tokens and has since gone on to 16"):
        follow(compiled, cache, ids[:, 2:3])


@pytest.mark.parametrize("tamper", ["crop", "arithmetic", "dtype", "pickle"])
def test_what_slots_cannot_follow_is_refused(model: torch.nn.Module, tamper: str) -> None:
    _, cache, _ = started(model)
    handle = cache.layers[0].keys  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError):
        {
            "crop": lambda: cache.crop(-3),  # type: ignore[attr-defined]
            "arithmetic": lambda: handle * 2,
            "dtype": lambda: handle.to(torch.float64),
            "pickle": lambda: pickle.dumps(handle),
        }[tamper]()


def test_a_replaced_tensor_loses_nothing_else(model: torch.nn.Module) -> None:
    """A tampered cache is refused; the model, and another conversation on it, go on."""
    compiled, cache, ids = started(model)
    other = copy.deepcopy(cache)
    expected = follow(compiled, copy.deepcopy(cache), ids)
    cache.layers[1].values = cache.layers[0].values  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError, match="different conversations"):
        follow(compiled, cache, ids[:, :1])
    assert torch.allclose(follow(compiled, other, ids), expected, atol=1e-6)


def test_another_backend_refuses_the_cache(model: torch.nn.Module) -> None:
    _, cache, ids = started(model)
    other = torch.compile(model, backend=kvpass.backend("window", budget=BUDGET, inner="eager"))
    with pytest.raises(kvpass.CacheHandleError, match="cannot go on"):
        follow(other, cache, ids[:, :1])


def test_an_interrupted_step_is_noticed(model: torch.nn.Module) -> None:
    compiled, cache, ids = started(model)
    cache.layers[1].keys.cache.broken = True  # type: ignore[attr-defined]
    with pytest.raises(kvpass.CacheHandleError, match="interrupted"):
        follow(compiled, cache, ids[:, :1])


def test_chunk_of_another_length_on_live_slots(model: torch.nn.Module) -> None:
    """Several turns: every length of chunk is its own graph, and each equals one token at a time for a window."""
    ids, mask = prompt(2, 24, ())
    whole = force(model, ids, mask, [10, 5, 1, 3, 1, 4], policy="full", budget=32, inner="eager").logits
    with torch.no_grad():
        assert torch.allclose(whole, model(ids).logits, atol=1e-4)


def test_what_the_compiler_asks_of_its_inputs_is_answered(model: torch.nn.Module) -> None:
    """Some versions of torch ask the tensor itself, and not only when they trace."""
    _, cache, _ = started(model)
    handle = cache.layers[0].keys  # type: ignore[attr-defined]
    assert not any([handle.is_conj(), handle.is_neg(), handle._is_zerotensor()])
    assert handle.untyped_storage().nbytes() == handle.element_size()  # one number, however long the cache
