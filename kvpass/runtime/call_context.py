"""Carry the pins of a call to the layers that admit its tokens, and collect prompts and steps that run."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeVar

from kvpass.policies.pinned_tokens import Pins

T = TypeVar("T")

_CALL_PINS: contextvars.ContextVar[Pins | None] = contextvars.ContextVar("kvpass_pins", default=None)
_LISTENER: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("kvpass_listener", default=None)


@contextlib.contextmanager
def _holding(variable: contextvars.ContextVar[Any], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def pinning(pins: Pins | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which calls of a compiled model pin the new tokens that `pins` marks.

    A model's forward has no argument for pins, and its graph must not depend on them.
    """
    return _holding(_CALL_PINS, pins)


def call_pins() -> Pins | None:
    """Return the pins of the call that is running, None if it pins nothing."""
    return _CALL_PINS.get()


def collect_runs() -> contextlib.AbstractContextManager[list[Any]]:
    """Return a context that collects the prompts and steps that run inside it, see `PromptResult` and `StepResult`."""
    return _holding(_LISTENER, list[Any]())


def publish_run(*ran: Any) -> None:
    """Append results of prompts and steps to the list of the active `collect_runs`, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.extend(ran)
