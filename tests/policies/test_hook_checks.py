"""Test that mistakes in a user's policy are reported with the hook and its line, wherever it runs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

import kvpass
from kvpass.policies import base
from kvpass.policies.base import Plan
from kvpass.policies.h2o import H2O
from kvpass.policies.hook_checks import HOOKS
from kvpass.policies.types import Merge, Tokens
from tests.models import build, prompt, teacher_forced

ONES = torch.ones(64, dtype=torch.int64)
STATE: dict[str, Any] = {"state": lambda self: {"sum": torch.float32}}
COUNTS: dict[str, Any] = {"clock": lambda self, clock, new, budget: (new,)}
RESCORES: dict[str, Any] = {"rescore": lambda self, tokens, key, value, weights: {}}
ALIGNS: dict[str, Any] = {"aligns": "step"}


def merge(
    valid: torch.Tensor,
    into: torch.dtype = torch.int64,
    slot: int = 0,
    weight: float = 1.0,
    own: Any = 1.0,
    **more: Any,
) -> Merge:
    """Return a merge of all evicted tokens into one slot."""
    weights = torch.where(valid, weight, 0.0)
    return Merge(torch.full(valid.shape, slot, dtype=into), weights, weights, own, more.get("state", {}))


def policy(**body: Any) -> type[base.Policy]:
    """Return a policy class that ranks by position, with other hooks and attributes."""
    body = {"name": "mine", "score": lambda self, tokens: tokens.position, **body}
    return dataclasses.dataclass(frozen=True)(type("Mine", (base.Policy,), {"__module__": __name__, **body}))


def simulated(made: base.Policy) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 14, 8, generator=drawn) for heads in (4, 2, 2))
    return kvpass.simulate(made, q, k, v, prompt=9, budget=6, compiled=True).positions


def run(made: base.Policy) -> Any:
    ids, mask = prompt(2, 14, (3, 0))
    return teacher_forced(build("Llama", layers=1), ids, mask, [9, 1, 1, 3], policy=made, budget=6, inner="eager")


HOOK_MISTAKES: list[tuple[str, Callable[..., Any], dict[str, Any], str]] = [
    ("score", lambda self, tokens: tokens.position.sum(-1), {}, r"returned torch.int64 of shape \(1, 1\), not int64"),
    ("score", lambda self, tokens: tokens.position[..., 1:], {}, r"of shape \(1, 1, 8\), not .*, here \(1, 1, 9\)"),
    ("score", lambda self, tokens: tokens.position > 3, {}, "returned torch.bool"),
    ("score", lambda self, tokens: tokens.position.cfloat(), {}, "returned torch.complex64"),
    ("score", lambda self, tokens: None, {}, "returned a NoneType, not a tensor"),
    ("score", lambda self, tokens: tokens.positions, {}, "fails with AttributeError: 'Tokens' object has no"),
    ("score", lambda self, tokens: tokens.state["mass"], {}, "fails with KeyError: 'mass'"),
    ("score", lambda self: 1, {}, "fails with TypeError"),
    ("score", lambda self, tokens: tokens.position.mul_(-1), {}, "writes to a tensor that it was given"),
    ("score", lambda self, tokens: tokens.position / 0 * 0, {}, "returned NaN as the score of a token"),
    ("victim", lambda self, tokens: tokens.position.argmin(-1) + 7, {}, "returned a slot that is not one of 7"),
    ("victim", lambda self, tokens: tokens.position.argmin(-1, keepdim=True), {}, r"not int64 \[B, H'\]"),
    ("compact", lambda self, tokens: tokens.live, {}, "not a pair: which tokens stay"),
    ("compact", lambda self, tokens: (tokens.position, {}), {}, "not bool"),
    ("compact", lambda self, tokens: (tokens.live, {}), {}, "more tokens to keep than the budget"),
    ("compact", lambda self, tokens: (tokens.newest(tokens.budget + 1), {}), {}, "more tokens to keep than the budget"),
    ("observe", lambda self, tokens, attention: {"sun": tokens.position}, STATE, r"changes 'sun'.* are \['sum'\]"),
    ("observe", lambda self, tokens, attention: {"sum": attention.last}, {**STATE, "statistics": frozenset({"last"})},
     r"shape \(1, 2, 2, 9\), not torch.float32 for 'sum', here \(1, 1, 9\)"),
    ("observe", lambda self, tokens, attention: {"sum": attention.last.sum(1)}, STATE, "None unless `statistics`"),
    ("observe", lambda self, tokens, attention: tokens.position, STATE, "not a dict of changes"),
    ("init_token_state", lambda self, key, value: {"sum": value.norm(dim=-1)}, STATE, r"here \(1, 1, 9\)"),
    ("init_token_state", lambda self, key, value: {"sum": value[:, :1, :, 0].cfloat()}, STATE, "torch.complex"),
    ("state", lambda self: ["sum"], {}, "not a dict of names and dtypes"),
    ("row_state", lambda self: {"sum": "0"}, {}, "not a dict of names and numbers"),
    ("minimum_budget", lambda self: "4", {}, "not a number of tokens"),
    ("capacity", lambda self, budget, prompt=0: budget + 1.5, {}, "returned 7.5, not a number of slots"),
    ("capacity", lambda self, budget, prompt=0: budget, {}, "6 slots for a budget of 6, and needs 7"),
    ("capacity", lambda self, budget, prompt=0: -1, {}, "-1 slots for a budget of 6, and needs 7"),
    ("capacity", lambda self, budget, prompt=0: 32, {}, "32 slots .* of 6: more than 7 need a `victim` or a `tick`"),
    ("capacity", lambda self, budget, prompt=0: 0, {"victim": base.Policy.victim, **COUNTS,
     "tick": lambda self, clock, budget: (True, clock)}, "0 slots for a budget of 6, and needs 1"),
    ("clock", lambda self, clock, new, budget: None, {}, "returned None, not a tuple of numbers"),
    ("tick", lambda self, clock, budget: False, COUNTS, "returned False, not a pair"),
    ("plan", lambda self, attention, valid, budget: budget, {}, "returned 6, not a list of Plan"),
    ("plan", lambda self, attention, valid, budget: [Plan(6, 4)], {}, "4 slots for a budget of 6, and needs 7"),
    ("plan", lambda self, attention, valid, budget: [Plan(6, 9)], {}, "9 slots .* of 6: more than 7 need"),
    ("plan", lambda self, attention, valid, budget: [Plan(9, 9, (9, 4))], {}, "9 slots .* of 9, and needs 10"),
    ("plan", lambda self, attention, valid, budget: [Plan(6, 7, (6, 0))], {}, "a budget of 0: a layer keeps at least"),
    ("plan", lambda self, attention, valid, budget: [], {}, "returned plans of 0 layers, not of 1"),
    ("layer_weights", lambda self, layer: torch.ones(1), RESCORES, "not a list of tensors"),
    ("head_classes", lambda self, heads, budget: [(1, 2)], {}, "not a tuple of HeadClass"),
    ("rescore", lambda self, tokens, key, value, weights: key, {}, "not a dict of names and tensors"),
    ("rescore", lambda self, tokens, key, value, weights: {"size": key}, {}, r"for 'size', not \[B, H', N\]"),
    ("logit_scale", lambda self, count: 2.0, {}, "returned a float, not a tensor: a factor for each count"),
    ("logit_scale", lambda self, count: torch.ones(3), {}, r"of shape \(3,\), not a factor for each count"),
    ("logit_scale", lambda self, count: count * torch.nan, {}, "returned NaN as a factor"),
    ("bias", lambda self, tokens, groups: 1.0, {}, r"returned a float.* broadcast to \[B, Hkv, G, N\]"),
    ("bias", lambda self, tokens, groups: torch.ones(3), {}, r"of shape \(3,\), not float32 that can be broadcast"),
    ("bias", lambda self, tokens, groups: tokens.live[:, :, None], {}, "returned torch.bool .*, not float32"),
    ("bias", lambda self, tokens, groups: tokens.position[:, :, None] / 0 * 0, {}, "returned NaN as a bias"),
    ("merge_evicted", lambda self, tokens, cached_keys, evicted, valid: None, {}, "returned None, not a Merge"),
    ("merge_evicted", lambda *hook_arguments: merge(hook_arguments[-1], into=torch.float32), {}, "for `into`"),
    ("merge_evicted", lambda *hook_arguments: merge(hook_arguments[-1], slot=7), {}, "a slot that is not one of 7"),
    ("merge_evicted", lambda *hook_arguments: merge(hook_arguments[-1], weight=torch.nan), {}, "NaN as a weight"),
    ("merge_evicted", lambda *hook_arguments: merge(hook_arguments[-1], own=None), {}, "not a number for `own`"),
    ("merge_evicted", lambda *hook_arguments: merge(hook_arguments[-1], state={"a": 1}), {}, "it changes 'a'"),
    ("align", lambda self, tokens, key, value, weights, evicted: key, ALIGNS, "not keys, values and the changes"),
    ("align", lambda self, tokens, key, value, weights, evicted: (value, key[..., 1:], {}), ALIGNS, "not values, here"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hook", "more", "said"), HOOK_MISTAKES, ids=lambda each: each if each in HOOKS else ""
)
def test_mistakes_of_hooks_are_reported_by_their_lines(
    name: str, hook: Callable[..., Any], more: dict[str, Any], said: str
) -> None:
    line = f"{__file__}:{hook.__code__.co_firstlineno}"
    with pytest.raises(kvpass.PolicyError, match=said) as refused:
        simulated(policy(**{**more, name: hook})())
    assert str(refused.value).startswith(f"Mine.{name}: {line}: ")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (), (1, 2, 1, 1)], ids=str)
def test_a_bias_may_have_one_entry_for_all_tokens(sizes: tuple[int, ...]) -> None:
    for_all = policy(bias=lambda self, tokens, groups: torch.full(sizes, 0.5))()
    for_each = policy(bias=lambda self, tokens, groups: torch.full((tokens.position.shape[-1],), 0.5))()
    torch.testing.assert_close(run(for_all).logits, run(for_each).logits)


def test_a_layer_without_a_policy_is_refused() -> None:
    with pytest.raises(kvpass.PolicyError, match=r"Mine.for_layer\(0, 1\) returned None: it must return the policy"):
        run(policy(for_layer=lambda self, layer, layers: None)())


def test_reads_on_the_host_are_reported_where_a_model_is_traced() -> None:
    def score(self: Any, tokens: base.Tokens) -> torch.Tensor:
        return tokens.position if tokens.position.max() > 3 else -tokens.position

    with pytest.raises(kvpass.PolicyError, match=rf"score: {__file__}:\d+: it reads a tensor on the host"):
        run(policy(score=score)())


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda self, tokens: tokens.position + tokens.live.nonzero().sum(), "the shape of a result depends on values"),
        (
            lambda self, tokens: tokens.position * ONES[tokens.position.clamp(0)],
            r"FakeTensors.*\(make tensors inside of the hook",
        ),
    ],
)
def test_what_no_traced_hook_can_do_is_explained(score: Callable[..., Any], said: str) -> None:
    with pytest.raises(kvpass.PolicyError, match=rf"(?s)score: {__file__}:\d+: .*{said}"):
        run(policy(score=score)())


def test_slots_beyond_the_budget_are_for_policies_that_choose_among_them() -> None:
    """Check that more slots work with a victim of the policy's own, and with budgets by row."""
    roomy: dict[str, Any] = {"capacity": lambda self, budget, prompt=0: budget + 9}
    own = policy(**roomy, victim=lambda self, tokens: tokens.position.argmin(-1))()
    by_row = policy(plan=lambda self, attention, valid, budget: [Plan(6, 12, (6,) * len(valid))])()
    expected = simulated(policy()())[-1, ..., :6]
    assert torch.equal(simulated(by_row)[-1, ..., :6], expected)
    assert run(own).positions[-1][0].shape[-1] <= 15


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"name": 7}, "Mine.name=7: must be a string"),
        ({"heads": "all"}, "Mine.heads='all': must be 'shared' or 'kv'"),
        ({"positions": "relative"}, "Mine.positions='relative': must be"),
        ({"observation_window": property(lambda self: 0)}, "Mine.observation_window=0: must be at least 1"),
        ({"observation_window": property(lambda self: -3)}, "Mine.observation_window=-3: must be at least 1"),
        ({"observation_window": lambda self: 4}, "Mine.observation_window=<bound method .*: must be at least 1"),
        ({"statistics": {"total"}}, "Mine.statistics={'total'}: must be a frozenset, each item 'total'"),
        ({"statistics": frozenset({"sum"})}, "Mine.statistics=.*: must be a frozenset, each item 'total'"),
        ({"shardable": True}, "Mine.shardable=True: must be"),
        ({"keep": dataclasses.field(default_factory=list), "__annotations__": {"keep": "list"}}, "keep=.*hashable"),
    ],
    ids=lambda each: str(next(iter(each))) if isinstance(each, dict) else "",
)
def test_attributes_and_options_are_checked(body: dict[str, Any], said: str) -> None:
    with pytest.raises(kvpass.PolicyError, match=said):
        policy(**body)()


def test_a_policy_without_a_name_or_a_score_is_refused() -> None:
    with pytest.raises(kvpass.PolicyError, match="Nameless: its attribute `name` is missing"):
        type("Nameless", (base.Policy,), {"__module__": __name__})()
    with pytest.raises(kvpass.PolicyError, match="Mine: it needs the hook `score`, and has none"):
        simulated(policy(score=base.Policy.score)())


def test_a_hook_that_another_attribute_asks_for_is_missed() -> None:
    with pytest.raises(kvpass.PolicyError, match="Mine: its statistics have 'scan', which needs a `scan` or"):
        policy(statistics=frozenset({"scan"}))()
    with pytest.raises(kvpass.PolicyError, match="Mine: it needs the hook `align`, and has none"):
        run(policy(aligns="step")())


class Merging:
    """A mixin with a hook that is not itself a policy."""

    def merge_evicted(
        self, tokens: Tokens, cached_keys: torch.Tensor, evicted: torch.Tensor, valid: torch.Tensor
    ) -> Merge:
        raise NotImplementedError


def test_a_hook_that_the_base_class_hides_is_refused() -> None:
    assert dataclasses.dataclass(frozen=True)(type("First", (Merging, H2O), {"__module__": __name__}))().merges
    with pytest.raises(kvpass.PolicyError, match="Last: the 'merge_evicted' of Merging is hidden by Policy's"):
        dataclasses.dataclass(frozen=True)(type("Last", (H2O, Merging), {"__module__": __name__}))()


def test_a_default_that_no_dataclass_reads_is_refused() -> None:
    """Check the error: the base dataclass would set its own default."""
    cls = type("Heavier", (H2O,), {"__module__": __name__, "__annotations__": {"heavy": "float"}, "heavy": 0.9})
    with pytest.raises(kvpass.PolicyError, match="Heavier: 'heavy' is not an option, as the class is not a dataclass"):
        cls()


def test_an_entry_of_the_state_with_the_name_of_a_buffer_is_refused() -> None:
    with pytest.raises(kvpass.PolicyError, match="Mine: its state cannot have an entry 'key'"):
        simulated(policy(state=lambda self: {"key": torch.float32})())


def test_a_checked_policy_keeps_the_same_tokens() -> None:
    body = {name: hook for name, hook in vars(H2O).items() if not name.startswith("__")}
    made = dataclasses.dataclass(frozen=True)(
        type("Copy", (base.Policy,), {**body, "__module__": __name__, "__annotations__": inspect.get_annotations(H2O)})
    )
    assert hasattr(made.score, "__wrapped__")
    assert not hasattr(H2O.score, "__wrapped__")
    assert torch.equal(simulated(made()), simulated(H2O()))


class Named(Protocol):
    name: str


@dataclasses.dataclass(frozen=True)
class Unusual(base.Policy, Named):
    """A class with a field that is set later, a field without a part in the hash, and a property."""

    last: bool = True
    table: Any = dataclasses.field(init=False)
    memo: dict[str, int] = dataclasses.field(default_factory=dict, init=False, compare=False)
    name = "unusual"
    tick = base.Policy.tick
    bias = base.Policy.bias

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "table", (1, 2))

    @property
    def statistics(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"last"}) if self.last else frozenset()

    @staticmethod
    def state() -> dict[str, torch.dtype]:  # type: ignore[override]
        return {"met": torch.bool}

    def init_token_state(self, key: torch.Tensor, value: torch.Tensor) -> Any:
        return super().init_token_state(key=key, value=value)

    def observe(self, tokens: base.Tokens, attention: base.Attention) -> Any:
        return {"met": torch.ones_like(tokens.position)}

    @staticmethod
    def score(tokens: base.Tokens) -> torch.Tensor:  # type: ignore[override]
        return tokens.position

    def compact(self, tokens: base.Tokens) -> Any:
        return list(super().compact(tokens))


def test_unusual_but_valid_hooks_pass_the_checks() -> None:
    made = Unusual(interval=2)
    assert not made.biases
    assert simulated(made)[-1, 0, 0].max() == 13


def test_a_hook_with_a_decorator_is_reported_by_its_own_line() -> None:
    @torch.no_grad()
    def score(self: Any, tokens: base.Tokens) -> None:
        return None

    with pytest.raises(kvpass.PolicyError, match=rf"score: {__file__}:\d+: it returned a NoneType"):
        simulated(policy(score=score)())


def test_hooks_are_checked_once() -> None:
    made = policy()
    again = dataclasses.dataclass(frozen=True)(
        type("Again", (made,), {"__module__": __name__, "score": vars(made)["score"]})
    )
    assert vars(again)["score"] is vars(made)["score"]


def test_an_entry_of_the_state_with_the_name_of_a_scale_is_refused_where_there_are_scales() -> None:
    made = policy(state=lambda self: {"key_scale": torch.float32})()
    simulated(made)
    model = kvpass.compile(build("Llama", layers=1), made, budget=6, inner="eager", kv_dtype="int8")
    with pytest.raises(kvpass.PolicyError, match="cannot have an entry 'key_scale'"), torch.no_grad():
        model(prompt(1, 9, ())[0], use_cache=True)
