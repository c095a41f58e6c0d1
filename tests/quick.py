"""How tests trace, which is most of what they do."""

from __future__ import annotations

import logging

import torch
import torch._dynamo.guards
import torch._inductor.config


def trace_quickly() -> None:
    """Leave out what Dynamo does for models that are large, or run many times, and what nobody reads.

    It remembers what operations do to fake tensors, and for models this small to look it up takes longer; it empties
    the processor's caches to measure the guards of every graph; and it notes where Python's objects were changed.  Its
    structured trace, which has every graph as text, is made as soon as a handler asks for it, and pytest puts one on
    every logger that does not pass on what it gets.
    """
    torch.set_num_threads(1)  # two on a shared machine are slower than one
    torch._inductor.config.compile_threads = 1  # or every process of tests starts processes that import torch
    torch._dynamo.config.fake_tensor_cache_enabled = False
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):  # torch 2.11 has none
        torch._dynamo.config.side_effect_replay_policy = "silent"
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    logging.getLogger("torch.__trace").propagate = True
