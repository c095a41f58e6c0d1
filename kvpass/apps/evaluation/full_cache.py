"""Measure the full cache of a model, and find budgets whose slots take a share of its bytes."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.arguments import require
from kvpass.cache.layout import Layout
from kvpass.cache.slots import empty_slots
from kvpass.errors import BudgetError
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy
from kvpass.policies.window import policy_beside_window


@dataclasses.dataclass(frozen=True)
class CacheLayer:
    """The rows that one attention layer caches per token: keys [Hkv, D] and values [Hkv, Dv].

    Attributes:
        window: the number of last tokens that the model stores, None for all.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes that the model's own cache takes for `tokens` tokens."""
        return self.row_bytes * (tokens if self.window is None else min(tokens, self.window))

    def slot_bytes(self, policy: Policy, budget: int, kv_dtype: KVDtype | None) -> int:
        """Return the bytes of the slots of a budget, the policy's metadata and the scales of rows included.

        A layer whose own window fits into the budget keeps that window, under any policy.
        """
        policy = policy_beside_window(policy, budget, self.window)
        if self.window is not None:
            budget = min(budget, self.window)
        layout = Layout(
            policy=policy,
            budget=budget,
            capacity=policy.capacity(budget),
            batch=1,
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            device=torch.device("meta"),
            stores_unrotated_keys=policy.positions == "cache",
            kv_dtype=kv_dtype,
        )
        return empty_slots(layout.with_head_classes()).nbytes


@dataclasses.dataclass(frozen=True)
class FullCache:
    """The cache that a model makes without kvpass."""

    layers: tuple[CacheLayer, ...]

    @staticmethod
    @torch.no_grad()
    def of(model: Any) -> FullCache:
        """Run the model on one token and return the cached layers; layers without keys and values are left out."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model_access.device_of(model))
        cache = model_access.cache_of_output(model.forward(input_ids=ids, use_cache=True))
        layers = [
            CacheLayer(key.shape[1], key.shape[-1], value.shape[-1], key.dtype, window)
            for (key, value), window in zip(
                model_access.keys_and_values(cache), model_access.stored_windows(cache), strict=True
            )
            if isinstance(key, Tensor) and isinstance(value, Tensor)
        ]
        return FullCache(tuple(layers))

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of a conversation of `tokens` tokens."""
        return sum(layer.bytes_of(tokens) for layer in self.layers)

    def budget(self, share: float, tokens: int, policy: Policy, kv_dtype: KVDtype | None) -> int:
        """Return the largest budget whose slots take at most `share` of the bytes of `tokens` cached tokens.

        Policies that give layers different budgets are counted with the mean of the budgets.

        Raises:
            BudgetError: the smallest budget of the policy takes more bytes.
        """
        require(0 < share <= 1, "share", share, "must be above 0 and at most 1")
        max_bytes, layer_counts = int(share * self.bytes_of(tokens)), collections.Counter(self.layers)

        def slot_bytes(budget: int) -> int:
            return sum(count * layer.slot_bytes(policy, budget, kv_dtype) for layer, count in layer_counts.items())

        upper, lower = 8 * tokens, max(1, policy.fitting_budget(0))  # `upper`: more than four bits instead of 32 allow
        largest = bisect.bisect_right(range(upper), max_bytes, lo=lower, hi=max(lower, upper), key=slot_bytes) - 1
        budget = policy.fitting_budget(largest) if largest else 0
        if not 0 < budget <= largest:
            raise BudgetError(
                f"no budget of {policy.name!r} takes at most {share:.3g} of the bytes of a full cache of {tokens} "
                "tokens; give a larger share or more tokens"
            )
        return budget
