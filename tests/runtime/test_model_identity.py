"""Plans and caches belong to models and layers, which are known by their tensors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.backend import Backend
from kvpass.policies.budgets import Plan
from kvpass.runtime.model_identity import PlansByModel, TensorSet, belongs_to_other_layer, weak_references
from tests.models import different, prompt

BUDGET = 8


def calibrated() -> Backend:
    """A backend that has no plan yet, and with an equal one's graphs out of the way."""
    torch._dynamo.reset()
    return kvpass.backend("d2o", budget=BUDGET, calibrate=True, inner="eager")


@torch.no_grad()
def budgets(model: Any, backend: Backend, ids: Tensor | None = None) -> list[int]:
    """The slots of each layer after a prompt."""
    ids = prompt(2, 30, ())[0] if ids is None else ids
    cache = torch.compile(model, backend=backend)(ids, use_cache=True).past_key_values
    return [layer.capacity for layer in kvpass.inspect(cache).layers]


def test_two_models_have_plans_of_their_own() -> None:
    first, second = different(3), different(3, seed=2)
    alone = [budgets(model, calibrated()) for model in (first, second)]
    assert alone[0] != alone[1]
    shared = calibrated()
    assert [budgets(model, shared) for model in (first, second, first)] == [*alone, alone[0]]


@pytest.mark.slow
def test_graphs_of_one_model_share_its_plan() -> None:
    """Later prompts get what the first one got, whatever their shape and whatever else is given."""
    model, other = different(3), prompt(3, 41, ())[0]
    assert budgets(model, calibrated(), other) != budgets(model, calibrated())
    backend = calibrated()
    assert budgets(model, backend) == budgets(model, backend, other) == budgets(model, backend, other[:1])


def test_a_plan_goes_with_its_model() -> None:
    backend, second = calibrated(), different(3, seed=2)
    budgets(different(3), backend)
    torch._dynamo.reset()
    gc.collect()
    assert budgets(second, backend) == budgets(second, calibrated())


def test_plans_know_a_model_by_most_of_its_tensors() -> None:
    mine, others, plan = [torch.ones(1) for _ in range(4)], [torch.ones(1) for _ in range(4)], [Plan(3, 4)]
    plans = PlansByModel()
    plans.keep(mine, (1, 2), plan)
    assert plans.find(mine, (1, 2)) is plan
    assert plans.find([*mine, others[0]], (1, 2)) is plan  # an adapter more
    assert plans.find(mine[:3], (1, 2)) is plan
    assert plans.find([mine[0], *others], (1, 2)) is None  # an embedding shared by two models
    assert plans.find(mine, (2, 2)) is None
    assert plans.find([], (1, 2)) is None


@pytest.mark.parametrize("gone", [True, False])
def test_a_tensor_at_an_old_address_is_another_one(gone: bool) -> None:
    known, tensor = TensorSet(), torch.ones(1)
    known.add([tensor])
    key = id(tensor)
    if gone:
        del tensor
        known._references[key] = next(iter(known._references.values()))
        assert not any(torch.ones(1) in known for _ in range(100))
    else:
        assert tensor in known


def test_what_made_a_cache_is_compared_with_what_is_known() -> None:
    here, there, known = torch.ones(1), torch.ones(1), TensorSet()
    assert not belongs_to_other_layer(weak_references([there]), [here], known)  # a copy that ran the prompt alone
    known.add([there])
    assert belongs_to_other_layer(weak_references([there]), [here], known)
    assert not belongs_to_other_layer(weak_references([there, here]), [here], known)  # an adapter
    assert not belongs_to_other_layer((), [here], known)
