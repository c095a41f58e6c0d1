"""How tests trace, which is most of what they do."""

from __future__ import annotations

import torch
import torch._dynamo.guards


def trace_quickly() -> None:
    """Leave out what Dynamo does for models that are large, or run many times.

    It remembers what operations do to fake tensors, and for models this small to look it up takes longer; and it
    empties the processor's caches to measure the guards of every graph.
    """
    torch.set_num_threads(1)  # two on a shared machine are slower than one
    torch._dynamo.config.fake_tensor_cache_enabled = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
