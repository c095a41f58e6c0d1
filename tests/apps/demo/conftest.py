from importlib.util import find_spec

import pytest
import torch

from kvpass.apps.demo.stream import HeldSnapshot, StreamRun

# These tests need the extra `demo` beside `test`.
needed = ("transformers", "matplotlib", "tqdm")
collect_ignore_glob = [] if all(find_spec(name) for name in needed) else ["test_*.py"]


@pytest.fixture
def make_run():
    """A `StreamRun` with a loss of `loss` nats everywhere, of 2 rows and 32 tokens by default."""

    def make(loss: float = 1.0, tokens: int = 32) -> StreamRun:
        return StreamRun(
            losses=torch.full((2, tokens - 1), loss),
            seconds=[9.0] + [0.5] * (tokens - 3),
            busy=[True] + [False] * (tokens - 3),
            snapshots=[HeldSnapshot(step, list(range(max(0, step - 8), step))) for step in range(4, tokens + 1, 4)],
            cache_bytes=2**20,
            full_bytes=4 * 2**20,
            decode_graphs=1,
            graph_breaks=0,
        )

    return make
