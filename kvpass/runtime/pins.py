"""Pass the tokens that a caller pins around the model's own code to the caches: `pinning`.

A model's forward has no argument for pins, and its graph must not depend on them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch

from kvpass.cache.handle import LayerCache
from kvpass.policies.pinned_tokens import PINNED, Pins, check_pinned
from kvpass.runtime.caches import adapt

_GIVEN: contextvars.ContextVar[Pins | None] = contextvars.ContextVar("kvpass_pins", default=None)


@contextlib.contextmanager
def pinning(pins: Pins | None) -> Iterator[None]:
    """Return a context in which a call of a compiled model pins these of its new tokens."""
    token = _GIVEN.set(pins)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def given_pins() -> Pins | None:
    """Return the pins of the call that is running, None if it pins nothing."""
    return _GIVEN.get()


def pins_for(cache: LayerCache) -> Pins | None:
    """Return the pins of the running call for a layer that the backend's policy governs, else None."""
    return _GIVEN.get() if cache.layout.policy is cache.backend.policy else None


def make_room(cache: LayerCache, pins: Pins) -> None:
    """Prepare slots for a call that pins some of its new tokens, before anything of the call runs.

    Raises:
        BudgetError: the pinned tokens leave less of the budget than the policy needs.
    """
    layout, slots = cache.layout, cache.slots
    policy, capacity = layout.policy, layout.capacity
    new = torch.full_like(pins.later, pins.mask.shape[1]) if policy.keep_prompt else pins.mask.sum(-1) + pins.later
    if pins.on_top:
        most = max(limit + more for limit, more in zip(cache.limits, new.tolist(), strict=True))
        capacity = max(capacity, policy.capacity(layout.budget + room_on_top(most - layout.budget)))
    elif PINNED in slots.state or bool(new.any()):
        held = (slots.state[PINNED] & (slots.position >= 0)).sum(-1).amax(-1) if PINNED in slots.state else 0
        counts = (held + new).tolist()
        rest, pinned = min((limit - count, count) for limit, count in zip(cache.limits, counts, strict=True))
        check_pinned(policy, pinned, rest)
    wanted = layout.with_pins(pins.on_top)
    adapt(cache, pins=wanted.pins, row_budgets=wanted.row_budgets, capacity=capacity)


def pin_next(cache: LayerCache, pins: Pins) -> None:
    """Pin the token of a decode step, before the step writes it to the free slot."""
    cache.slots.pin_next(pins)
    if pins.on_top:
        cache.limits = tuple(limit + int(more) for limit, more in zip(cache.limits, pins.mask[:, 0], strict=True))


def room_on_top(tokens: int) -> int:
    """Return the slots for `tokens` pinned tokens beside the budget: a power of two, so that prompts share graphs."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0
