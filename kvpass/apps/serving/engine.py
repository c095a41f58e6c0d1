"""Drive a `DecodeLoop` in its own thread, for requests that an asyncio event loop hands over.

The thread is the only one that touches the loop.  The event loop sends it commands through a queue, and gets outputs
back in one call for each step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

from kvpass.apps.serving.metrics import Metrics
from kvpass.apps.serving.schemas import ApiError
from kvpass.apps.serving.text import TextStream
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.requests import GenerationOutput
from kvpass.decoding.scheduler import RequestScheduler
from kvpass.errors import KVPassError, PolicyError, RequestError

log = logging.getLogger("kvpass.serve")

SHORTEST, LONGEST = 1, 60  # seconds of Retry-After

Outputs: TypeAlias = "asyncio.Queue[tuple[Job, GenerationOutput | ApiError]]"


@dataclasses.dataclass(eq=False)
class Job:
    """One request to the loop, as the event loop sees it.

    Attributes:
        name: the request's id.
        options: the other arguments of `DecodeLoop.add`.
        before: the number of tokens of its prefix.
        evicted: how many tokens of its prefix, and at its end of all seen tokens, were evicted.
        outputs: receives the loop's outputs, or the error that ended the request; jobs may share it.
        text: the text of its tokens; the loop's thread does not touch it.
        index: its number among the choices of an HTTP request.
        reason: why its text has ended; None before.
        added: done when the loop has accepted the request; has the error if it has refused it.
        began: when the request came, in seconds of `time.perf_counter`.
        first: when its first token came; None before.
    """

    name: str
    prompt: list[int]
    options: dict[str, Any]
    outputs: Outputs
    text: TextStream
    index: int = 0
    reason: Literal["stop", "length"] | None = None
    before: int = 0
    evicted: float = 0.0
    added: asyncio.Future[None] = dataclasses.field(default_factory=lambda: asyncio.get_running_loop().create_future())
    began: float = dataclasses.field(default_factory=time.perf_counter)
    first: float | None = None
    finished: bool = False


class Engine:
    """A thread that steps a `DecodeLoop`, and the requests that it has.

    Attributes:
        rows: the number of requests that are decoded together.
        slots: the number of tokens that all rows can cache.
        max_requests: the number of requests, waiting ones included, above which others are refused.
        ready: whether the loop has compiled all that it needs.
        failure: the error that ended the thread; None while it runs.
        on_failure: called in the event loop when the thread has ended with an error.
    """

    def __init__(self, loop: DecodeLoop, rows: int, waiting: int, metrics: Metrics) -> None:
        self.loop, self.rows, self.max_requests, self.metrics = loop, rows, rows + waiting, metrics
        self.ready = False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.jobs: dict[str, Job] = {}  # of the event loop, until their last output
        self._added: dict[str, Job] = {}  # of the thread
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._count_answer: asyncio.Future[float] | None = None
        self._stopped = threading.Event()
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kvpass-engine", daemon=True)
        self._seconds = 1.0  # a running mean of the time between two requests that end, as long as one is there
        self._last_end = 0.0
        self.slots = rows * int(loop.backend.budget or 0)

    # -- in the event loop -------------------------------------------------------------------------------------------

    def start(self, prepare: Callable[[], object]) -> None:
        """Start the thread, which calls `prepare` first to compile; called in the running event loop."""
        self._events, self._prepare = asyncio.get_running_loop(), prepare
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended; after `stop` it still compiles then."""
        return self._thread.is_alive()

    def check_room(self, count: int) -> None:
        """Raise ApiError: status 429 if `count` more requests are too many, 503 if none can be served."""
        if self.failure is not None:
            raise ApiError(f"the server has failed: {self.failure}", 503, "server_error")
        if self._stopped.is_set():
            raise _shutting_down()
        if count > self.max_requests:
            raise ApiError(f"{count} choices for one request; this server takes up to {self.max_requests}", param="n")
        if len(self.jobs) + count > self.max_requests:
            self.metrics.requests.labels("rejected").inc(count)
            raise ApiError(
                f"the server already has {len(self.jobs)} requests, its maximum; try again later",
                *(429, "rate_limit_error"),
                code="too_many_requests",
                retry_after=self._seconds_until_room(),
            )

    def _seconds_until_room(self) -> int:
        waiting = max(1, len(self.jobs) - self.rows)
        return min(LONGEST, max(SHORTEST, round(self._seconds * waiting)))

    def submit(self, job: Job) -> None:
        """Hand a request to the thread; `Job.added` says whether the loop accepts it."""
        self.jobs[job.name] = job
        self._commands.put(functools.partial(self._add, job))

    def cancel(self, job: Job) -> None:
        """End a request whose outputs nobody waits for any more."""
        if not job.finished:
            self._commands.put(functools.partial(self.loop.cancel, job.name))

    async def cached_tokens(self) -> float:
        """Return how many slots of rows in use have a token, the mean over layers and heads; counted between steps.

        Calls that wait at the same time share one answer, so that they do not pile up during a long step.
        """
        if self._count_answer is None or self._count_answer.done():
            self._count_answer = asyncio.get_running_loop().create_future()
            self._commands.put(functools.partial(self._answer_count, self._count_answer))
        return await asyncio.shield(self._count_answer)

    def interrupt(self) -> None:
        """End all requests with an error, and the thread after the step that it is in."""
        self._stopped.set()
        self._commands.put(lambda: None)
        self._end_all(list(self.jobs.values()), _shutting_down())

    async def stop(self) -> None:
        """Interrupt the requests, and wait for the end of the thread.

        A thread that still compiles is not waited for: it ends with the process.
        """
        self.interrupt()
        if self.ready and self.is_running:
            await asyncio.to_thread(self._thread.join)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            self.ready = True
            while not self._stopped.is_set():
                self._run_commands()
                if self.loop.pending:
                    self._step()
        except BaseException as error:
            log.exception("the engine has failed")
            self.failure = error
            self._call_in_event_loop(self.on_failure)
        finally:
            self._stopped.set()
            self._call_in_event_loop(lambda: self._end_all(list(self.jobs.values()), _shutting_down()))

    def _run_commands(self) -> None:
        """Carry out commands; wait for one if the loop has nothing to do."""
        try:
            command = self._commands.get(block=not self.loop.pending)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _add(self, job: Job) -> None:
        try:
            self.loop.add(job.prompt, request_id=job.name, **job.options)
        except (RequestError, PolicyError) as error:
            self._call_in_event_loop(self._end, job, ApiError(str(error), code="request_refused"))
        except KVPassError as error:  # a prefix of other settings
            self._call_in_event_loop(self._end, job, ApiError(str(error), 409, code="request_refused"))
        except Exception as error:
            log.exception("a request cannot be added")
            self._call_in_event_loop(self._end, job, ApiError(f"it cannot be added: {error}", 500, "server_error"))
        else:
            self._added[job.name] = job
            self._call_in_event_loop(_settle, job.added, None)

    def _step(self) -> None:
        begun = time.perf_counter()
        try:
            result = self.loop.step()
        except Exception as error:
            log.exception("a step has failed")
            self._fail_all(ApiError(f"a step has failed: {error}", 500, "server_error"))
            return
        self.metrics.step.observe(time.perf_counter() - begun)
        job_outputs = [
            (self._added[output.request_id], output) for output in result if output.request_id in self._added
        ]
        for job, output in job_outputs:
            if output.is_finished():
                del self._added[job.name]
        if job_outputs:
            self._call_in_event_loop(self._hand_out, job_outputs)

    def _fail_all(self, error: ApiError) -> None:
        """End all requests that the loop has."""
        failed, self._added = list(self._added.values()), {}
        for job in failed:
            self.loop.cancel(job.name)
        self._call_in_event_loop(self._end_all, failed, error)

    def _answer_count(self, answer: asyncio.Future[float]) -> None:
        try:
            count = self._count_cached_tokens()
        except Exception:
            log.exception("the cached tokens cannot be counted")
            count = math.nan
        self._call_in_event_loop(_settle, answer, count)

    def _count_cached_tokens(self) -> float:
        requests = cast("RequestScheduler", self.loop.driver)
        return 0.0 if requests.batch is None else sum(map(requests.batch.cached_tokens, requests.rows))

    def _call_in_event_loop(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the event loop, if that still runs."""
        assert self._events is not None
        try:
            self._events.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop has ended")

    # -- in the event loop, called by the thread ---------------------------------------------------------------------

    def _hand_out(self, job_outputs: list[tuple[Job, GenerationOutput]]) -> None:
        now = time.perf_counter()
        for job, output in job_outputs:
            if job.first is None and output.new_tokens:
                job.first = now
                self.metrics.first_token.observe(now - job.began)
                self.metrics.prompt_tokens.inc(len(job.prompt))
            self.metrics.generated_tokens.inc(len(output.new_tokens))
            if output.is_finished():
                self._count(job, output, now)
                self._end(job, output)
            else:
                job.outputs.put_nowait((job, output))

    def _count(self, job: Job, output: GenerationOutput, now: float) -> None:
        self._seconds += 0.1 * (now - max(job.began, self._last_end) - self._seconds)
        self._last_end = now
        self.metrics.requests.labels(str(output.finish_reason)).inc()
        if output.cached_tokens is not None:
            seen = job.before + len(job.prompt) + len(output.generated_tokens) - 1
            earlier, job.evicted = job.evicted, seen - output.cached_tokens
            self.metrics.evicted.inc(max(0.0, job.evicted - earlier))

    def _end_all(self, jobs: Sequence[Job], error: ApiError) -> None:
        for job in jobs:
            self._end(job, error)

    def _end(self, job: Job, last: GenerationOutput | ApiError) -> None:
        job.finished = True
        self.jobs.pop(job.name, None)
        if isinstance(last, ApiError):
            self.metrics.requests.labels("error" if job.added.done() else "refused").inc()
            if not job.added.done():
                job.added.set_exception(last)
        job.outputs.put_nowait((job, last))


def _shutting_down() -> ApiError:
    return ApiError("the server is shutting down", 503, "server_error", code="shutting_down")


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
