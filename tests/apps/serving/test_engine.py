"""Test the thread that steps a loop: its commands do not end it, and do not pile up."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvpass.apps.serving.engine import Engine, Job
from kvpass.apps.serving.metrics import Metrics
from kvpass.apps.serving.schemas import ApiError
from kvpass.apps.serving.text import TextStream
from kvpass.decoding.requests import GenerationOutput, RequestStatus


def engine_on(loop: Any) -> Engine:
    """Return an engine whose thread has not started, on a stand-in for a `DecodeLoop`."""
    loop.pending = 0
    loop.backend = SimpleNamespace(budget=8)
    return Engine(loop, 2, 2, Metrics())


def test_calls_that_wait_for_the_count_share_one_command() -> None:
    engine = engine_on(SimpleNamespace(driver=SimpleNamespace(batch=None)))

    async def scrape() -> list[float]:
        engine._events = asyncio.get_running_loop()
        waiting = [asyncio.ensure_future(engine.cached_tokens()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting.pop().cancel()  # a scrape that timed out; the others still get their answer
        assert engine._commands.qsize() == 1
        engine._commands.get()()
        return await asyncio.gather(*waiting)

    assert asyncio.run(scrape()) == [0, 0]
    assert asyncio.run(scrape()) == [0, 0]  # and a later one gets an answer of its own


def test_tokens_that_cannot_be_counted_are_unknown() -> None:
    engine = engine_on(SimpleNamespace(driver=SimpleNamespace(batch=SimpleNamespace(), rows=[0])))

    async def scrape() -> float:
        engine._events = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(engine.cached_tokens())
        await asyncio.sleep(0)
        engine._commands.get()()
        return await waiting

    assert math.isnan(asyncio.run(scrape()))


def test_an_error_of_one_request_is_its_own() -> None:
    def add(*_: Any, **__: Any) -> None:
        raise TypeError("of a kind that nobody expects")

    engine = engine_on(SimpleNamespace(add=add))

    async def submit() -> Any:
        engine._events = asyncio.get_running_loop()
        job = Job("a", [1], {}, asyncio.Queue(), TextStream(None))
        engine.submit(job)
        engine._commands.get()()
        with pytest.raises(ApiError, match="of a kind that nobody expects"):
            await job.added
        return (await job.outputs.get())[1]

    assert asyncio.run(submit()).status == 500
    assert not engine.jobs


def test_the_time_until_a_row_is_free_does_not_count_the_wait_for_it() -> None:
    """Let requests arrive together and end one after the other, two seconds apart."""
    engine = engine_on(SimpleNamespace())

    async def serve() -> None:
        jobs = [Job(str(i), [1], {}, asyncio.Queue(), TextStream(None, []), began=100.0) for i in range(40)]
        done = GenerationOutput("0", [1], [2], [2], RequestStatus.FINISHED, "length")
        for number, job in enumerate(jobs, 1):
            engine._count(job, done, 100.0 + 2 * number)
        engine.jobs = {job.name: job for job in jobs[:5]}

    asyncio.run(serve())
    assert engine._seconds_until_room() == 6  # three requests wait for one of two rows
