"""Run something under a policy, and return kvpass's refusal instead of raising it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import kvpass
from kvpass.apps.evaluation.session import unless_refused
from kvpass.errors import KVPassError
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy

T = TypeVar("T")


def with_policy(
    model: Any,
    policy: str | Policy,
    budget: int | None,
    inner: str,
    action: Callable[[], T],
    kv_dtype: KVDtype | None = None,
) -> T | KVPassError:
    """Return `action()` with the model compiled in place for a policy, or the reason why kvpass refuses.

    Args:
        model: a causal language model; compiled code of this process is dropped first.
        policy, budget, inner, kv_dtype: see `kvpass.compile`.
    """

    def compiled() -> T:
        torch.compiler.reset()
        kvpass.compile(model, policy=policy, budget=budget, inner=inner, kv_dtype=kv_dtype)
        return action()

    return unless_refused(compiled)
