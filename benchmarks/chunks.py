"""Measure time and peak memory of long prompts: at once, in chunks on a growing cache, and with eviction.

The uncompiled model runs complete prompts and growing caches. Each prompt runs in two processes, after a shorter
prompt that compiles all graphs: one process measures seconds, and one memory. The second returns freed blocks
immediately, and is slower for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tqdm import tqdm

import kvpass
from benchmarks import apart, memory
from benchmarks.bounded import BUDGET, Case
from benchmarks.model import build, tokens
from benchmarks.report import Row, Table, Target, by_tokens, columns
from benchmarks.settings import Settings
from kvpass import model_access

TITLE = "Long prompts in chunks"
WHOLE, GROWING = "whole", "chunks, growing cache"
POLICIES = ("window", "h2o", "cascade")
WAYS = (WHOLE, GROWING, *POLICIES)
LENGTHS = (4096, 16384, 32768, 65536)
CHUNK = 1024
LONG, LONGEST_WHOLE = 32768, 32768
LIMITS = {"MiB": 0.15, "seconds": 0.5}


def measure(settings: Settings) -> list[Row]:
    """Return a row for each way and length; quadratic ways stop at 32,768 tokens."""
    lengths, threads = (1024 * 2, 4096) if settings.quick else LENGTHS, max(settings.threads)
    cases = [(way, n) for way in WAYS for n in lengths if way in POLICIES or n <= LONGEST_WHOLE]
    rows = []
    for way, count in tqdm(cases, unit="prompt", desc="long prompts", dynamic_ncols=True):
        timed, held = (_apart(way, count, threads, how) for how in (memory.SHARING, memory.RETURNING | memory.SHARING))
        rows.append({"threads": threads, **timed, "MiB": held["MiB"]})
    return rows


def _apart(way: str, count: int, threads: int, environment: dict[str, str]) -> Row:
    found: Row = apart.run("benchmarks.chunks:prompt", threads=threads, environment=environment, way=way, count=count)
    return found


@torch.inference_mode()
def prompt(way: str, count: int) -> Row:
    """Return the seconds of a prompt, and the peak MiB that it adds to the process."""
    feed = _ways(build())[way]
    feed(tokens(4 * CHUNK if way in POLICIES else CHUNK))
    ids = tokens(count, seed=1)
    used, began = time.process_time(), time.perf_counter()
    most = memory.added(lambda: feed(ids))
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return {"way": way, "tokens": count, "seconds": seconds, "CPU seconds": used, "MiB": most}


def _ways(model: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
    bounded = {policy: functools.partial(_bounded(model, policy), chunk=CHUNK) for policy in POLICIES}
    return {
        WHOLE: lambda ids: model(ids, use_cache=True, logits_to_keep=1),
        GROWING: lambda ids: _growing(model, ids),
        **bounded,
    }


def _bounded(model: Any, policy: str) -> Callable[..., Any]:
    return functools.partial(kvpass.prefill, torch.compile(model, backend=kvpass.backend(**Case(policy).settings())))


def _growing(model: Any, ids: torch.Tensor) -> Any:
    cache = transformers.DynamicCache()
    for part in ids.split(CHUNK, 1):
        model_access.call_model(model, part, cache, logits_to_keep=1)
    return cache


def tables(rows: Sequence[Row]) -> list[Table]:
    captions = {
        "seconds": "Seconds of a prompt",
        "CPU seconds": "CPU seconds of a prompt, of all threads",
        "MiB": "Peak memory that a prompt adds, MiB",
    }
    under = f"chunks of {CHUNK:,}, budget {BUDGET:,}, float32, {rows[0]['threads']} thread(s), by tokens"
    return [
        Table(f"{caption}, {under}", columns("way", by_tokens(rows, "way", what))) for what, caption in captions.items()
    ]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Compare chunks with eviction with the complete prompt, at 32,768 tokens."""
    return [
        Target("chunks", f"{policy}, {what} of a prompt of {LONG:,} in chunks, of the whole one", limit, ratio)
        for what, limit in LIMITS.items()
        for policy, ratio in _ratios(by_tokens(rows, "way", what)).items()
    ]


def _ratios(lines: dict[str, dict[int, float]]) -> dict[str, float | None]:
    whole = lines.get(WHOLE, {}).get(LONG)
    return {p: lines[p][LONG] / whole if whole and LONG in lines.get(p, {}) else None for p in POLICIES}
