"""Compare computed bytes of full caches, and budgets in bytes, with real caches."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.apps.evaluation.full_cache import CacheLayer, FullCache
from kvpass.errors import BudgetError, PolicyError
from kvpass.lowering.formats import KVDtype
from kvpass.policies import resolve
from tests.architectures import zoo
from tests.calibrations import random_gates
from tests.models import build
from tests.traces import Traced

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model(shared_traces: None) -> Traced:
    return Traced(build("Llama", layers=2))


def test_a_full_cache_is_that_of_the_model() -> None:
    model = build("Llama", layers=2)
    out = model(input_ids=torch.arange(5)[None], use_cache=True)
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
    assert FullCache.of(model).bytes_of(5) == cached


def test_layers_with_a_window_of_their_own_are_counted_as_the_model_and_kvpass_store_them() -> None:
    model, tokens = zoo.build("gemma2"), 40
    ids = torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    full = FullCache.of(model)
    assert {layer.window for layer in full.layers} == {None, 7}
    assert full.bytes_of(tokens) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    for share in (0.3, 0.9):  # budgets below the window and above it
        budget = full.budget(share, tokens, resolve("streaming", {}), None)
        compiled = kvpass.compile(zoo.build("gemma2"), "streaming", budget=budget, inner="eager")
        with torch.no_grad():
            taken = kvpass.inspect(compiled(input_ids=ids, use_cache=True).past_key_values).nbytes
        assert taken == sum(layer.slot_bytes(resolve("streaming", {}), budget, None) for layer in full.layers)
        assert taken <= share * full.bytes_of(tokens)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("policy", ["streaming", "h2o", "cascade", "buzz", "sage", "snapkv", "roco"])
def test_a_budget_takes_at_most_its_share_and_one_more_slot_takes_more(
    model: Traced, policy: str, kv_dtype: KVDtype | None
) -> None:
    """Compare with the bytes that `kvpass.inspect` reports for a compiled model's cache."""
    tokens, share = 300, 0.6
    full, chosen = FullCache.of(model.model), resolve(policy, {})
    budget = full.budget(share, tokens, chosen, kv_dtype)

    def taken(slots: int) -> int:
        under = model.under(kvpass.backend(policy, budget=slots, kv_dtype=kv_dtype, inner="eager"))
        with torch.no_grad():
            return kvpass.inspect(under(torch.arange(2, 100)[None], use_cache=True)).nbytes

    assert taken(budget) <= share * full.bytes_of(tokens)
    more = next(slots for slots in range(budget + 1, 2 * budget) if chosen.fitting_budget(slots) == slots)
    assert taken(more) > share * full.bytes_of(tokens)


def test_shares_that_no_budget_can_have_are_refused() -> None:
    full = FullCache((CacheLayer(2, 16, 16, torch.float32),))
    with pytest.raises(BudgetError, match=r"no budget of 'snapkv' takes at most 0\.01 of the bytes"):
        full.budget(0.01, 100, resolve("snapkv", {}), None)
    with pytest.raises(PolicyError, match=r"share=1\.5"):
        full.budget(1.5, 100, resolve("h2o", {}), None)


def test_no_budget_below_the_smallest_of_a_policy_is_tried() -> None:
    """Check `duo_attention`, whose streaming heads hold 320 tokens: others would get a negative number."""
    full = FullCache((CacheLayer(2, 16, 16, torch.float32),))
    policy = resolve("duo_attention", {"gates": random_gates(1)})
    with pytest.raises(BudgetError, match="no budget of 'duo_attention'"):
        full.budget(0.125, 2048, policy, None)
    assert full.budget(0.5, 2048, policy, None) >= 320
