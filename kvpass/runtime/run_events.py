"""Collect the prompts and steps that run in a context, for loops and exports."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

_LISTENER: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("kvpass_listener", default=None)


@contextlib.contextmanager
def collect_runs() -> Iterator[list[Any]]:
    """Return a context that collects the prompts and steps that run inside it, see `PromptResult` and `StepResult`."""
    ran: list[Any] = []
    token = _LISTENER.set(ran)
    try:
        yield ran
    finally:
        _LISTENER.reset(token)


def publish_run(*ran: Any) -> None:
    """Tell the context of `collect_runs`, if there is one, of prompts and steps that ran."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.extend(ran)
