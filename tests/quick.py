"""Speed up tracing, which takes most of the time of the tests."""

from __future__ import annotations

import logging

import torch
import torch._dynamo.guards
import torch._inductor.config


def trace_quickly() -> None:
    """Switch off work of torch that pays only for large models or many runs, or whose output nobody reads.

    - The fake tensor cache: for models this small a lookup takes longer than the operation.
    - Guard profiling: it empties the processor's caches to time the guards of each graph.
    - Records of replayed side effects.
    - The structured trace, with every graph as text: torch writes it as soon as its logger has a handler, and pytest
      adds one to each logger that does not propagate.
    """
    torch.set_num_threads(1)  # two threads on a shared machine are slower than one
    torch._inductor.config.compile_threads = 1  # otherwise each test process starts compile workers that import torch
    torch._dynamo.config.fake_tensor_cache_enabled = False
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):  # missing in torch 2.11
        torch._dynamo.config.side_effect_replay_policy = "silent"
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    logging.getLogger("torch.__trace").propagate = True
