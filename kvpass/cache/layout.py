"""Define the layout of one layer's slots, on which its compiled decode graph depends."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from kvpass.lowering.formats import Format, KVDtype, format_of
from kvpass.policies.base import Policy
from kvpass.policies.budgets import HeadClass
from kvpass.policies.fair_spans import FairSpans
from kvpass.policies.heads import HeadSharding
from kvpass.policies.periodic import PeriodicEviction
from kvpass.policies.pinned_tokens import PINNED, PinnedTokens
from kvpass.policies.types import State

ROW_BUDGET = "row_budget"
"""The entry of the state that holds each row's budget, int64 [B, H', 1], if rows have different budgets."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The properties on which a compiled decode graph depends; another layout needs another graph.

    Attributes:
        policy: the eviction policy.
        budget: tokens kept between steps.
        row_budgets: whether each row has its own budget, which is in the slots' state for the steps.
        pins: whether the caller pins tokens; the state then has `PINNED`, as it has under `keep_prompt`.
        capacity: the number of slots, including the slot for the token that is written next.
        batch, heads, key_dim, value_dim: B, Hkv, D and Dv.
        dtype, device: of keys and values.
        stores_unrotated_keys: keys are stored before their rotary embedding and rotated by rank (positions="cache").
        layer: the layer's index, for policies that read it; else 0, so that equal layers have equal layouts.
        kv_dtype: the storage format of keys and values; None for `dtype`.
        sharding: how the layer's heads are sharded over processes; `heads` counts this process's heads.
        crops: whether a chunk also returns the inputs of its statistics, so that its last tokens can be cropped.
        exact_capacity: the capacity was computed for this prompt and layer; others have other capacities.
        classes: the classes of KV heads with different budgets; `budget` is their mean and `capacity` their
            largest number of slots; () for equal heads.
    """

    policy: Policy
    budget: int
    capacity: int
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    stores_unrotated_keys: bool
    layer: int = 0
    kv_dtype: KVDtype | None = None
    sharding: HeadSharding | None = None
    crops: bool = False
    exact_capacity: bool = False
    row_budgets: bool = False
    pins: bool = False
    classes: tuple[HeadClass, ...] = ()

    @property
    def by_class(self) -> tuple[Layout, ...]:
        """The layout of each class of heads; this layout for equal heads."""
        return tuple(
            dataclasses.replace(self, heads=heads, budget=budget, capacity=self.policy.capacity(budget), classes=())
            for heads, budget in self.classes
        ) or (self,)

    @property
    def head_slices(self) -> tuple[slice, ...]:
        """The slice of each class among the heads in the order of the classes."""
        ends = [*itertools.accumulate(each.heads for each in self.by_class)]
        return tuple(slice(end - each.heads, end) for each, end in zip(self.by_class, ends, strict=True))

    def with_head_classes(self) -> Layout:
        """Return the layout with the classes of heads that `Policy.head_classes` returns."""
        classes = self.policy.head_classes(self.heads, self.budget)
        if not classes:
            return self
        return dataclasses.replace(self, classes=classes, capacity=self.policy.capacity(classes[0].budget))

    @property
    def metadata_heads(self) -> int:
        """H', the number of sets of metadata of the layer."""
        return 1 if self.policy.heads == "shared" else self.heads

    def __post_init__(self) -> None:
        _ = self.key_format, self.value_format  # raises for vectors that cannot be stored

    @property
    def eviction(self) -> Policy | PinnedTokens | FairSpans | PeriodicEviction:
        """The hooks that evict tokens."""
        hooks = self.pinned_tokens or (FairSpans(self.policy) if self.policy.spans else self.policy)
        return PeriodicEviction(hooks, self.policy) if self.policy.interval > 1 else hooks

    @property
    def pinned_tokens(self) -> PinnedTokens | None:
        """The hooks around the policy's that keep pinned tokens, None if no tokens can be pinned."""
        return PinnedTokens(self.policy) if self.pins or self.policy.keep_prompt else None

    def with_pins(self, on_top: bool = False) -> Layout:
        """Return the layout for caches with pinned tokens; `on_top` if they count on top of the budget."""
        return dataclasses.replace(self, pins=not self.policy.keep_prompt, row_budgets=self.row_budgets or on_top)

    @property
    def key_format(self) -> Format:
        return format_of(self.kv_dtype, self.key_dim, self.dtype, rotated=self.stores_unrotated_keys)

    @property
    def value_format(self) -> Format:
        return format_of(self.kv_dtype, self.value_dim, self.dtype, keys=False)

    def state(self) -> dict[str, torch.dtype]:
        """Return names and dtypes of the state per token: the policy's, and the entry that marks pinned tokens."""
        return {**self.policy.state(), **({PINNED: torch.bool} if self.pinned_tokens else {})}

    def row_state(self) -> dict[str, int | float]:
        """Return names and initial values of the state per row and head: the policy's, and the row's budget."""
        return {**self.policy.row_state(), **({ROW_BUDGET: 0} if self.row_budgets else {})}

    def budget_in(self, state: State) -> int | Tensor:
        """Return the budget of slots with this state, a number or int64 [B, H', 1]."""
        return state[ROW_BUDGET] if self.row_budgets else self.budget

    @property
    def policy_weights(self) -> list[Tensor]:
        """The policy's weights for the layer, on the device of the slots."""
        return [tensor.to(self.device) for tensor in self.policy.layer_weights(self.layer)]

    @property
    def tracks_rank(self) -> bool:
        """True if decode steps maintain `Slots.rank`."""
        return self.stores_unrotated_keys or self.policy.reads_rank
