"""Measure time and peak memory of prompts, with and without statistics for the policy.

`window` with the same budget needs no statistics. Prompts are timed by turns in one process. Peaks are the memory that
each prompt adds to a separate process.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

import kvpass
from benchmarks import apart, memory
from benchmarks.bounded import Case
from benchmarks.model import build, tokens
from benchmarks.report import Row, Table, Target, by_tokens, columns
from benchmarks.settings import Settings
from benchmarks.timing import Contender, Local, Plan, interleaved

TITLE = "Prompts with and without statistics"
PLAIN = "window"
POLICIES = (PLAIN, "h2o", "d2o", "tova", "roco", "cascade")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LONG = 8192
LIMITS = {"seconds": 1.5, "MiB": 1.15}
WARM = (640, 700)  # the graph is compiled at the second prompt


def measure(settings: Settings) -> list[Row]:
    """Return rows of times from one process, and rows of peaks from a process for each policy."""
    policies, lengths = (POLICIES[:2], (1024, 4096)) if settings.quick else (POLICIES, LENGTHS)
    threads = max(settings.threads)
    rows: list[Row] = apart.run("benchmarks.prompt:times", threads=threads, policies=policies, lengths=lengths)
    for policy in tqdm(policies, unit="process", desc="prompt: peak memory", dynamic_ncols=True):
        given: dict[str, Any] = dict(policy=policy, lengths=lengths)
        rows += apart.run("benchmarks.prompt:peaks", threads=threads, environment=memory.RETURNING, **given)
    return [{"threads": threads, **row} for row in rows]


def _compiled(model: Any, policy: str) -> Any:
    """Return the model with a prompt graph that is compiled for any length."""
    compiled = torch.compile(model, backend=kvpass.backend(**Case(policy).settings()))
    for count in WARM:
        compiled(tokens(count), use_cache=True, logits_to_keep=1)
    return compiled


@torch.inference_mode()
def times(policies: Sequence[str], lengths: Sequence[int]) -> list[Row]:
    """Return the median seconds of each policy at each length; longer prompts have fewer turns."""
    torch._dynamo.config.recompile_limit = 64
    model = build()
    with tqdm(total=sum(map(_turns, lengths)) * len(policies), unit="prompt", dynamic_ncols=True) as bar:
        bar.set_description("prompt: compiling")
        compiled = {policy: _compiled(model, policy) for policy in policies}
        return [row for length in lengths for row in _times(compiled, length, bar)]


def _turns(length: int) -> int:
    return 5 if length < LONG else 3 if length == LONG else 1


def _times(compiled: dict[str, Any], length: int, bar: tqdm[Any]) -> Iterator[Row]:
    bar.set_description(f"prompt of {length:,}")
    ids = tokens(length)
    contenders: list[Contender] = [
        Local(policy, lambda run=run: run(ids, use_cache=True, logits_to_keep=1)) for policy, run in compiled.items()
    ]
    found = interleaved(contenders, Plan(_turns(length), steps=1, skipped=0), bar.update)
    for policy, seconds in found.items():
        yield {"policy": policy, "tokens": length, "seconds": statistics.median(seconds)}


@torch.inference_mode()
def peaks(policy: str, lengths: Sequence[int]) -> list[Row]:
    """Return the peak MiB that a prompt of each length adds to the process."""
    compiled, rows = _compiled(build(), policy), []
    for length in lengths:
        ids = tokens(length)
        most = memory.added(lambda ids=ids: compiled(ids, use_cache=True, logits_to_keep=1))
        rows.append({"policy": policy, "tokens": length, "MiB": most})
    return rows


def tables(rows: Sequence[Row]) -> list[Table]:
    captions = {"seconds": "Seconds of a prompt", "MiB": "Peak memory that a prompt adds, MiB"}
    return [
        Table(
            f"{caption}, float32, {rows[0]['threads']} thread(s), by tokens",
            columns("policy", by_tokens(rows, "policy", what)),
        )
        for what, caption in captions.items()
    ]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Compare prompts of 8,192 tokens with and without statistics."""
    return [
        target for what, limit in LIMITS.items() for target in _targets(by_tokens(rows, "policy", what), what, limit)
    ]


def _targets(lines: dict[str, dict[int, float]], what: str, limit: float) -> Iterator[Target]:
    plain = lines.get(PLAIN, {}).get(LONG)
    for policy, line in lines.items():
        if policy != PLAIN:
            ratio = line[LONG] / plain if plain and LONG in line else None
            yield Target("prompt", f"{policy}, {what} of a prompt of {LONG:,}, of {PLAIN}", limit, ratio)
