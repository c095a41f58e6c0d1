"""Carry the pins of a call to the layers that admit its tokens."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from kvpass.policies.pinned_tokens import Pins

_CALL_PINS: contextvars.ContextVar[Pins | None] = contextvars.ContextVar("kvpass_pins", default=None)


@contextlib.contextmanager
def pinning(pins: Pins | None) -> Iterator[None]:
    """Return a context in which calls of a compiled model pin the new tokens that `pins` marks.

    A model's forward has no argument for pins, and its graph must not depend on them.
    """
    token = _CALL_PINS.set(pins)
    try:
        yield
    finally:
        _CALL_PINS.reset(token)


def call_pins() -> Pins | None:
    """Return the pins of the call that is running, None if it pins nothing."""
    return _CALL_PINS.get()


def pinned_headroom(tokens: int) -> int:
    """Return the slots for `tokens` pinned tokens above the budget: a power of two, so that prompts share graphs."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0
