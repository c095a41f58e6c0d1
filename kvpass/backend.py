"""The backend that users hand to torch.compile."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from kvpass import budget as budgets
from kvpass import policies
from kvpass.errors import PolicyError
from kvpass.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Backend:
    policy: Policy
    budget: int | float | None
    positions: Literal["absolute", "cache"] | None
    inner: Any
    mode: str | None
    options: tuple
    strict: bool

    @property
    def ranked(self) -> bool:
        return (self.positions or self.policy.positions) == "cache"


def backend(policy="full", *, budget=None, positions=None, inner="inductor", mode=None, options=None, strict=True, **policy_options):
    p = policies.resolve(policy, policy_options)
    budgets.check(p, budget)
    return Backend(p, budget, positions, inner, mode, tuple(sorted((options or {}).items())), strict)
