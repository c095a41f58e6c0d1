"""Examine an architecture in a separate process, so that a crash or an endless loop costs one verdict."""

from __future__ import annotations

import multiprocessing
import queue
import time
import warnings
from typing import Any

import torch
import transformers

from tests.architectures.check import Verdict, examine

SECONDS = 300


def examine_apart(name: str, padding: int, canonical: bool = True, table: str = "causal") -> Verdict:
    """Run `tests.architectures.check.examine` in a process with a time limit."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit its threads' locks
    context.set_forkserver_preload(["tests.architectures.apart"])
    results = context.Queue()
    process = context.Process(target=_job, args=((name, padding, canonical, table), results), daemon=True)
    process.start()
    verdict = _answer(process, results) or Verdict(name, "error", f"no answer in {SECONDS} s, or a crash")
    process.kill()
    process.join()
    return verdict


def _job(what: tuple[str, int, bool, str], results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    results.put(examine(*what))


def _answer(process: Any, results: Any) -> Verdict | None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        alive = process.is_alive()  # checked first: a result that was put before the process ended is still found
        try:
            verdict: Verdict = results.get(timeout=2)
        except queue.Empty:
            if not alive:
                return None
        else:
            return verdict
    return None
