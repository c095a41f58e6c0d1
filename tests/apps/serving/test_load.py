"""Test many clients at once: no request is lost or mixed up with another, and no cache remains."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

from kvpass.cache.layer_cache import LayerCache
from kvpass.decoding.scheduler import RequestScheduler
from tests.apps.serving.load import asked_alone, bombard, resident
from tests.apps.serving.small import NAME, Running


def requests() -> list[dict[str, Any]]:
    """Return requests of many lengths, greedy and sampled, before and after eviction."""
    lengths = ((1, 30), (3, 5), (17, 20), (40, 3), (60, 25), (25, 1), (33, 60))
    sampling = ({"temperature": 0}, {"temperature": 0.9, "seed": 5}, {"temperature": 1, "top_p": 0.8, "seed": 6})
    return [
        {
            "model": NAME,
            "prompt": [(7 * i + k) % 2000 + 3 for k in range(tokens)],
            "max_tokens": most,
            **sampling[i % 3],
        }
        for i, (tokens, most) in enumerate(lengths)
    ]


@pytest.mark.slow
def test_eight_clients(running: Running) -> None:
    questions = asyncio.run(asked_alone(running.url, requests()))
    tally = asyncio.run(bombard(running.url, questions, clients=8, rounds=6))
    running.wait_until_idle()
    caches, memory = layer_caches(), resident(os.getpid())
    again = asyncio.run(bombard(running.url, questions, clients=8, rounds=6))
    running.wait_until_idle()
    for found in (tally, again):
        assert sum(found[kind] for kind in ("whole", "stream", "closed", "wrong")) == 48
        assert min(found[kind] for kind in ("whole", "stream", "closed", "wrong", "later")) > 0
    requests_left = running.service.engine.loop.driver
    assert isinstance(requests_left, RequestScheduler)
    assert not [*requests_left.known, *requests_left.rows, *requests_left.queue]
    assert layer_caches() <= caches
    assert resident(os.getpid()) < memory + 8


def layer_caches() -> int:
    """Return the number of layer caches in memory."""
    gc.collect()
    return sum(isinstance(each, LayerCache) for each in gc.get_objects())
