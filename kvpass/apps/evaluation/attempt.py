"""Run something, and return kvpass's refusal instead of raising it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from kvpass.errors import KVPassError

T = TypeVar("T")


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
