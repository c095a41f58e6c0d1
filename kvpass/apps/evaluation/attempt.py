"""Run something under a policy, and return kvpass's refusal instead of raising it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

import kvpass
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


def unless_refused(action: Callable[[], T]) -> T | KVPassError:
    """Return `action()`, or the error of kvpass that it raised, also from inside of an error of Dynamo."""
    try:
        return action()
    except Exception as error:
        refusals = [reason for reason in _reasons(error) if isinstance(reason, KVPassError)]
        if not refusals:
            raise
        return refusals[0]


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; Dynamo wraps what a backend raises."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__
