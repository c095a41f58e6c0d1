"""Who runs the tasks: this process, or several that each load the model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pickle
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from kvpass.apps.demo.job import Job, prepare
from kvpass.apps.demo.settings import DemoSettings
from kvpass.errors import KVPassError

PATIENCE = 0.2  # seconds between two looks at what the processes have done
STRIDE = 32  # steps that are reported together


@dataclasses.dataclass(frozen=True)
class Task:
    """One policy under one measurement, `method` of `Job`, which ticks `ticks` times."""

    method: str
    policy: str
    ticks: int


Progress = Callable[[Task, int], object]
Outcomes = Iterator[tuple[Task, Any]]


def perform(job: Job, tasks: Sequence[Task], progress: Progress) -> Outcomes:
    """Each task with its outcome, in the order of the tasks; what has begun is told to `progress`."""
    return _alone(job, tasks, progress) if job.settings.jobs == 1 else _apart(job.settings, tasks, progress)


def _alone(job: Job, tasks: Sequence[Task], progress: Progress) -> Outcomes:
    for task in tasks:
        yield task, _run(job, task, functools.partial(progress, task))


def _run(job: Job, task: Task, progress: Callable[[int], object]) -> Any:
    """The outcome; all of the task's ticks are reported when it is over, whatever came of it."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if done % STRIDE == 0:
            progress(STRIDE)

    progress(0)
    outcome = getattr(job, task.method)(task.policy, tick)
    progress(task.ticks - done // STRIDE * STRIDE)
    return outcome


def _apart(settings: DemoSettings, tasks: Sequence[Task], progress: Progress) -> Outcomes:
    """In `settings.jobs` processes, which are started anew so that none inherits a thread pool."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, _compilers_for(settings.jobs):
        ticks = manager.Queue()
        with ProcessPoolExecutor(settings.jobs, context) as pool:
            started = {task: pool.submit(_in_a_process, settings, task, ticks) for task in _dearest_first(tasks)}
            try:
                for task in tasks:
                    _follow(started[task], ticks, progress)
                    yield task, pickle.loads(started[task].result())
            finally:
                pool.shutdown(cancel_futures=True)


def _dearest_first(tasks: Sequence[Task]) -> list[Task]:
    """Tasks as they are begun: the last, which costs most, before its like, so that nothing waits for it alone."""
    place = next(i for i, task in enumerate(tasks) if task.method == tasks[-1].method)
    return [*tasks[:place], tasks[-1], *tasks[place:-1]]


def _follow(future: Future[bytes], ticks: queue.Queue[tuple[Task, int]], progress: Progress) -> None:
    """Pass on what all processes report until this future is done."""
    over = False
    while not over:
        over = bool(wait([future], PATIENCE).done)
        with contextlib.suppress(queue.Empty):
            while True:
                progress(*ticks.get_nowait())


def _in_a_process(settings: DemoSettings, task: Task, ticks: queue.Queue[tuple[Task, int]]) -> bytes:
    """The outcome, pickled: tensors would else be sent as handles to memory of this process."""
    outcome = _run(_prepared(settings), task, lambda count: ticks.put((task, count)))
    # An error of ours may hold what cannot be sent; its text is all that is shown.
    return pickle.dumps(KVPassError(str(outcome)) if isinstance(outcome, KVPassError) else outcome)


@functools.lru_cache(maxsize=1)
def _prepared(settings: DemoSettings) -> Job:
    """The model, loaded once in each process."""
    return prepare(settings)


@contextlib.contextmanager
def _compilers_for(jobs: int) -> Iterator[None]:
    """Let each process compile in its share of the cores."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    before = os.environ.get(name)
    os.environ[name] = before or str(max(1, (os.cpu_count() or 1) // jobs))
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
