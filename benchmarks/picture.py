"""Draw perplexity, memory and latency over tokens, as the papers on streaming do.

One unbroken text goes through the bundled model token by token, beyond the 2,048 positions of its training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import kvpass
from benchmarks import apart
from benchmarks.memory import MEBIBYTE
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from kvpass import cache_names
from kvpass.apps import corpus
from kvpass.apps.evaluation import plots
from kvpass.apps.evaluation.recall import PROMPT
from kvpass.apps.evaluation.scoring import negative_log_likelihood
from kvpass.apps.evaluation.speed import cache_bytes
from kvpass.apps.models import load

TITLE = "Perplexity, memory and latency against tokens"
FULL = "full, uncompiled"
POLICIES = ("window", "streaming", "cascade", "h2o")
BUDGET, TOKENS, EVERY = 256, 8000, 250


def measure(settings: Settings) -> list[Row]:
    sizes: Row = dict(tokens=1500, policies=POLICIES[1:2]) if settings.quick else dict(tokens=TOKENS, policies=POLICIES)
    rows: list[Row] = apart.run("benchmarks.picture:rows", **sizes)
    return rows


@torch.inference_mode()
def rows(tokens: int, policies: Sequence[str]) -> list[Row]:
    """Return a row for every contender and every 250 tokens."""
    torch._dynamo.config.recompile_limit = 64
    subject = load(None)
    text = corpus.unbroken(subject.encode(corpus.read(corpus.held_out_files())), tokens + 1, subject.bos)
    contenders = {FULL: subject.model} | {
        name: torch.compile(subject.model, backend=kvpass.backend(name, budget=BUDGET)) for name in policies
    }
    ids, blocks = torch.tensor([text]), tokens // EVERY
    with tqdm(total=tokens * len(contenders), unit="token", desc="picture", dynamic_ncols=True) as bar:
        along = {name: _along(forward, ids, bar.update) for name, forward in contenders.items()}
        # They take turns of one block, so that what else the machine does falls on all alike.
        return [{"contender": name, **next(block)} for _ in range(blocks) for name, block in along.items()]


def _along(forward: Callable[..., Any], text: Tensor, tick: Callable[[], object]) -> Iterator[Row]:
    """Yield perplexity and median latency of each 250 tokens, and the bytes of the cache after them."""
    cache = cache_names.returned(forward(text[:, :PROMPT], use_cache=True))
    losses, seconds = [], []
    for place in range(PROMPT, text.shape[1] - 1):
        start = perf_counter()
        out = cache_names.call(forward, text[:, place : place + 1], cache)
        cache = cache_names.returned(out)
        losses.append(float(negative_log_likelihood(out.logits, text[:, place + 1 : place + 2])))
        seconds.append(perf_counter() - start)
        tick()
        if (place + 1) % EVERY == 0:
            perplexity = math.exp(statistics.fmean(losses))
            yield dict(
                tokens=place + 1, perplexity=perplexity, ms=1e3 * statistics.median(seconds), bytes=cache_bytes(cache)
            )
            losses, seconds = [], []


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of the first quarter of the stream, which is in the trained range, and of the last."""
    lines: dict[str, Row] = {}
    last = max(row["tokens"] for row in rows)
    for share, name in ((0.25, "first quarter"), (1.0, "last quarter")):
        for contender in dict.fromkeys(row["contender"] for row in rows):
            mine = [row for row in rows if row["contender"] == contender]
            part = [row for row in mine if (share - 0.25) * last < row["tokens"] <= share * last]
            mean = math.exp(statistics.fmean(math.log(row["perplexity"]) for row in part))
            line = lines.setdefault(contender, {"contender": contender})
            line[f"perplexity, {name}"] = mean
            line[f"ms, {name}"] = statistics.median(row["ms"] for row in part)
            line["cache at the end, MiB"] = mine[-1]["bytes"] / MEBIBYTE
    return [
        Table(f"One stream of {last:,} tokens through the bundled model, budget {BUDGET}, 1 thread", [*lines.values()])
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    scaled = {"perplexity": ("perplexity", 1.0), "cache, MiB": ("bytes", MEBIBYTE), "milliseconds a step": ("ms", 1.0)}
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, (field, unit) in scaled.items():
        for row in rows:
            line = panels.setdefault(title, {}).setdefault(row["contender"], [])
            line.append((row["tokens"], row[field] / unit))
    return {"picture": plots.lines(panels, "tokens", "", columns=3)}
