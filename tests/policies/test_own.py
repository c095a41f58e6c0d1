"""Test a short policy of a user that reads new tokens' values."""

from __future__ import annotations

import dataclasses
import inspect
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.diagnostics.simulate import simulate
from kvpass.policies import base, names
from kvpass.policies.cascade import Cascade
from kvpass.policies.defensive_kv import DefensiveKV
from kvpass.policies.full import Full
from kvpass.policies.h2o import H2O
from kvpass.policies.sage import Sage
from kvpass.reference import reference_of
from tests.models import breaks, build, graphs, prompt, teacher_forced
from tests.strategies import TABLE


@dataclasses.dataclass(frozen=True)
class ValueNorm(base.Policy):
    """A policy that evicts tokens with small values first, for all heads of a layer together."""

    name: ClassVar[str] = "value_norm"

    def state(self) -> dict[str, torch.dtype]:
        return {"norm": torch.float32}

    def init_token_state(self, key: Tensor, value: Tensor) -> base.State:
        return {"norm": value.float().norm(dim=-1).sum(1, keepdim=True)}  # [B, 1, n]

    def score(self, tokens: base.Tokens) -> Tensor:
        return tokens.state["norm"]


def rows(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, tokens, 8, generator=drawn)
    k, v = (torch.randn(1, 2, tokens, 8, generator=drawn) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("split", [24, 10])
def test_a_policy_of_the_user_keeps_the_highest_scores(split: int) -> None:
    """Check a prompt, and a prompt with single tokens: a norm does not depend on the order of arrival."""
    q, k, v = rows(24)
    trace = simulate(ValueNorm(), q, k, v, prompt=split, budget=7, compiled=True)
    best = v[0].norm(dim=-1).sum(0).topk(7).indices
    assert trace.positions[-1, 0, 0].tolist() == sorted(best.tolist())


def test_a_model_runs_on_it_in_two_graphs() -> None:
    ids, mask = prompt(2, 20, (3, 0))
    values = build("Llama", layers=1)(ids, attention_mask=mask, use_cache=True).past_key_values.layers[0].values
    run = teacher_forced(
        build("Llama", layers=1), ids, mask, [9, *[1] * 11], policy=ValueNorm(), budget=6, inner="eager"
    )
    assert (graphs(), breaks()) == (2, 0)
    worth = values.norm(dim=-1).sum(1).masked_fill(mask == 0, -1)  # layer 0 does not depend on eviction
    for row in range(2):
        assert run.positions[-1][0][row, 0].tolist() == sorted(worth[row].topk(6).indices.tolist())


@pytest.mark.parametrize("name", ["Attention", "Clock", "Merge", "Plan", "Policy", "State", "Statistic", "Tokens"])
def test_policies_base_exports_every_name_that_a_policy_needs(name: str) -> None:
    assert name in base.__all__
    assert hasattr(base, name)


@pytest.mark.parametrize(("old", "new"), sorted(base.RENAMED_HOOKS.items()))
def test_hooks_by_their_old_names_work_with_a_warning(old: str, new: str) -> None:
    hook = getattr(ValueNorm, new)
    with pytest.warns(DeprecationWarning, match=f"Old.{old}: this hook of policies is called '{new}' now"):
        made = type("Old", (ValueNorm,), {old: hook})
    assert inspect.unwrap(made.__dict__[new]) is inspect.unwrap(hook)


def test_an_option_by_the_old_name_of_a_hook_is_read_as_the_hook() -> None:
    body = {"__module__": __name__, "__annotations__": {"observation": int}, "observation": 4}
    with pytest.warns(DeprecationWarning, match=r"Old.observation: .* called 'observation_window' now"):
        old = dataclasses.dataclass(frozen=True)(type("Old", (ValueNorm,), body))
    assert (old().observation_window, old(observation=16).observation_window) == (4, 16)


def test_a_policy_of_old_names_keeps_the_same_tokens() -> None:
    with pytest.warns(DeprecationWarning, match="worth"):
        old = type("Old", (base.Policy,), {
            "name": "old_value_norm", "state": ValueNorm.state,
            "arrive": ValueNorm.init_token_state, "worth": ValueNorm.score,
        })  # fmt: skip
    traces = [simulate(policy, *rows(24), prompt=10, budget=7, compiled=True) for policy in (old(), ValueNorm())]
    assert torch.equal(traces[0].positions, traces[1].positions)


def test_tokens_tell_by_the_old_name_how_many_are_cached() -> None:
    tokens = base.Tokens(torch.zeros(1, 1, 3).long(), torch.zeros(1, 1, 1).long(), {}, 3, cached_columns=2)
    with pytest.warns(DeprecationWarning, match="cached_columns"):
        assert tokens.held == 2


def test_flags_follow_from_what_a_policy_has() -> None:
    for name in names():
        policy = kvpass.policies.get(name)
        scans = policy.scan is not base.Policy.scan or policy.smoothed is not base.Policy.smoothed
        assert scans == ("scan" in policy.statistics), name
        aligns = policy.align is not base.Policy.align
        assert aligns == (policy.aligns is not base.Policy.aligns), name
        rescores = policy.rescore is not base.Policy.rescore
        has_weights = policy.layer_weights is not base.Policy.layer_weights
        assert aligns <= has_weights <= (aligns or rescores), name  # which read them
    own = {row.name: kvpass.policies.get(row.name).merge_evicted for row in TABLE}
    assert {name for name, hook in own.items() if hook is not base.Policy.merge_evicted} == {"d2o"}


def test_each_policy_names_its_paper() -> None:
    controls = {"full", "window", "random"}  # they have no paper
    private = {"kv_align"}  # its paper has no such number
    for name in set(names()) - controls - private - {ValueNorm.name}:
        module = __import__(kvpass.policies.get(name).__module__, fromlist=["_"])
        assert "https://arxiv.org/abs/" in (module.__doc__ or ""), name


@dataclasses.dataclass(frozen=True)
class ReversedH2O(H2O):
    """A policy that keeps another policy's name and its options, but scores tokens otherwise."""

    def score(self, tokens: base.Tokens) -> Tensor:
        return -super().score(tokens)


@dataclasses.dataclass(frozen=True)
class OwnCascade(Cascade):
    """A policy whose scan would run as the scan of the policy of that name."""


@dataclasses.dataclass(frozen=True)
class OwnDefensive(DefensiveKV):
    """A policy whose votes would be smoothed as by the policy of that name."""


@dataclasses.dataclass(frozen=True)
class UnregisteredScan(Cascade):
    """A policy with a scan and a name that no registered policy has."""

    name = "test_unregistered_scan"


@pytest.mark.parametrize("cls", [OwnCascade, OwnDefensive, UnregisteredScan])
def test_a_policy_whose_scan_is_found_by_its_name_must_be_registered(cls: type[base.Policy]) -> None:
    with pytest.raises(kvpass.PolicyError, match=f"{cls.__name__}: a scan runs in an operator, which finds the policy"):
        kvpass.backend(cls(), budget=32)


def test_a_derived_policy_is_not_taken_for_the_policy_of_its_name() -> None:
    own, built_in = kvpass.policies.to_values(ReversedH2O()), kvpass.policies.to_values(H2O())
    assert own != built_in
    with pytest.raises(kvpass.PolicyError, match=r"policy 'h2o' is of .*\.ReversedH2O, which is not registered"):
        kvpass.policies.from_values(own)
    with pytest.raises(kvpass.PolicyError, match="has no eager reference: give ReversedH2O a method reference"):
        reference_of(ReversedH2O())


@dataclasses.dataclass(frozen=True)
class LayerByLayer(ValueNorm):
    """A policy that returns another policy, or other options, for the second layer."""

    second: base.Policy | None = None

    def for_layer(self, layer: int, layers: int) -> base.Policy:
        return self.second if layer and self.second is not None else self


@pytest.mark.parametrize("second", [ValueNorm(interval=2), LayerByLayer(), H2O()], ids=lambda policy: policy.name)
def test_another_policy_that_evicts_is_refused_for_a_layer(second: base.Policy) -> None:
    """Check the error: such a layer would get slots for all tokens and no pins."""
    ids, mask = prompt(2, 20, ())
    with pytest.raises(kvpass.PolicyError, match=r"LayerByLayer.for_layer\(1, 2\) returned .* the policy itself"):
        teacher_forced(build("Llama"), ids, mask, [20], policy=LayerByLayer(second=second), budget=6, inner="eager")


def test_a_layer_may_keep_every_token() -> None:
    ids, mask = prompt(2, 20, ())
    run = teacher_forced(build("Llama"), ids, mask, [20], policy=LayerByLayer(second=Full()), budget=6, inner="eager")
    assert [positions.shape[-1] for positions in run.positions[-1]] == [6, 20]


def test_a_plan_that_takes_earlier_plans_works() -> None:
    """Test the hook's signature before version 0.1."""
    body = {"plan": lambda self, attention, valid, budget, earlier=None: ValueNorm.plan(self, attention, valid, 5)}
    ids, mask = prompt(2, 9, ())
    policy = type("Old", (ValueNorm,), body)()
    run = teacher_forced(build("Llama", layers=1), ids, mask, [9], policy=policy, budget=6, inner="eager")
    assert run.positions[-1][0].shape[-1] == 5


def test_policies_without_their_logit_changes_are_equal_if_the_policies_are() -> None:
    """Check equality, so that validation traces equal layers once."""
    a, b = (Sage(share="concat").with_plain_logits() for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Sage().with_plain_logits()
    assert not a.biases
