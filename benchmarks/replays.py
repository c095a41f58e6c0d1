"""Time steps with and without the Python wrapper that Inductor writes around its kernels.

The clock is the thread's processor time, because the wrapper is processor work; see `kvpass.lowering.replay`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

import kvpass
from benchmarks import apart, bounded
from benchmarks.bounded import LEAST, NOTHING, Case
from benchmarks.model import LAYERS, Conversation, build
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from benchmarks.step import PROMPT
from benchmarks.timing import Local, Plan, interleaved, medians
from kvpass.runtime import backend_base

TITLE = "Steps without generated Python"
CASES = {"the floor": LEAST, "no policy": NOTHING, "h2o": Case("h2o")}
REPEATED, AS_COMPILED = "repeated", "as compiled"


def measure(settings: Settings) -> list[Row]:
    """Return a row for each case, from a process for each dtype."""
    found: list[Row] = []
    for dtype in dict.fromkeys(dtype for dtype, _ in settings.combinations()):
        given = dict(dtype=dtype, names=["h2o"] if settings.quick else list(CASES))
        found += apart.run("benchmarks.replays:rows", plan=dataclasses.asdict(settings.plan), **given)
    return found


@torch.inference_mode()
def rows(dtype: str, names: Sequence[str], plan: Row) -> list[Row]:
    """Return milliseconds of a step of each case, with and without the wrapper."""
    torch._dynamo.config.recompile_limit = 256  # each contender is a compilation of the same `forward`
    model, contenders = build(dtype), []
    for name in tqdm(names, unit="case", desc=f"replays, {dtype}", dynamic_ncols=True):
        for way, replays in ((AS_COMPILED, False), (REPEATED, True)):
            talk = _talk(model, CASES[name], replays)
            contenders.append(Local(f"{name}, {way}", talk.step, time.thread_time))
    found = medians(interleaved(contenders, Plan(**plan)))
    return [
        {"case": name, "dtype": dtype, **{way: found[f"{name}, {way}"] for way in (AS_COMPILED, REPEATED)}}
        for name in names
    ]


def _talk(model: Any, case: Case, replays: bool) -> Conversation:
    """Return a conversation whose steps are recorded if `replays` is true."""
    talk = bounded.conversation(model, case, PROMPT)
    talk.forward = torch.compile(model, backend=kvpass.backend(**case.settings()))
    with contextlib.nullcontext() if replays else mock.patch.object(backend_base, "Replayed", lambda run: run):
        for _ in range(3):  # the steps are compiled here
            talk.step()
    return talk


def tables(rows: Sequence[Row]) -> list[Table]:
    lines = [
        {
            "": row["case"],
            "dtype": row["dtype"],
            "as compiled, ms": row[AS_COMPILED],
            "repeated, ms": row[REPEATED],
            "of it": row[REPEATED] / row[AS_COMPILED],
        }
        for row in rows
    ]
    return [Table(f"A step of {LAYERS} layers, one row, milliseconds of its thread", lines)]
