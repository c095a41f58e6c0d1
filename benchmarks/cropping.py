"""Time steps and chunks with and without `crop`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import apart, bounded
from benchmarks.bounded import Case
from benchmarks.model import Conversation, build, tokens
from benchmarks.report import Row, Table, Target, under
from benchmarks.settings import Settings
from benchmarks.step import PROMPT
from benchmarks.timing import Local, Plan, interleaved, medians, spread
from kvpass import model_access

TITLE = "Steps and chunks whose tokens can be taken back"
CROP = 8
LIMIT = 1.05
POLICIES = ("window", "streaming", "h2o", "d2o")
WHAT = {"step": 1, "chunk of 5": 5}


def measure(settings: Settings) -> list[Row]:
    """Return all rows in the first dtype, from a process for each number of threads."""
    policies = POLICIES[2:] if settings.quick else POLICIES
    given = dict(plan=dataclasses.asdict(settings.plan), policies=policies, dtype=settings.dtypes[0])
    return [
        row
        for threads in settings.threads
        for row in apart.run("benchmarks.cropping:rows", threads=threads, count=threads, **given)
    ]


@torch.inference_mode()
def rows(dtype: str, count: int, policies: Sequence[str], plan: Row) -> list[Row]:
    """Return the rows of one number of threads."""
    torch._dynamo.config.recompile_limit = 256  # each contender compiles the same `forward`
    model, found = build(dtype), []
    for policy in tqdm(policies, unit="policy", desc="cropping", dynamic_ncols=True):
        talks = {crop: bounded.conversation(model, Case(policy), PROMPT, crop=crop) for crop in (0, CROP)}
        for what, new in WHAT.items():
            timed = [Local(str(crop), _call(talk, new)) for crop, talk in talks.items()]
            for contender in timed:
                contender.seconds(3)  # compiles
            taken = interleaved(timed, Plan(**plan))
            middle, width = medians(taken), spread(taken)
            common = dict(dtype=dtype, threads=count, policy=policy, what=what)
            found.append({**common, "off": middle["0"], "on": middle[str(CROP)], "spread": width["0"]})
    return found


def _call(talk: Conversation, new: int) -> Callable[[], Any]:
    """Return a call that runs a step, or a chunk of `new` tokens."""
    return talk.step if new == 1 else functools.partial(_chunk, talk, tokens(new))


def _chunk(talk: Conversation, ids: torch.Tensor) -> None:
    talk.cache = model_access.cache_of_output(model_access.call_model(talk.forward, ids, talk.cache))


def tables(rows: Sequence[Row]) -> list[Table]:
    made: dict[str, list[Row]] = {}
    for row in rows:
        line = {
            "policy": row["policy"],
            "what": row["what"],
            "milliseconds": row["off"],
            f"with crop={CROP}": row["on"],
            "ratio": row["on"] / row["off"],
            "spread (quartiles), %": 100 * row["spread"],
        }
        made.setdefault(under(row), []).append(line)
    return [Table(f"With crop={CROP} and without, {title}", lines) for title, lines in made.items()]


def targets(rows: Sequence[Row]) -> list[Target]:
    return [
        Target("cropping", f"{row['policy']}, step with crop={CROP} ({under(row)})", LIMIT, row["on"] / row["off"])
        for row in rows
        if row["what"] == "step"
    ]
