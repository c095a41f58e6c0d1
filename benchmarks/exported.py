"""Time an exported loop and a compiling loop from loaded weights to the second token.

python -m benchmarks.exported [--policies h2o streaming] [--threads 2] [--rounds 3]

A real checkpoint (kvpass.apps.checkpoint) gets a prompt of 300 tokens, of which 256 are kept. Every line is the median
of separate processes. A compiling loop has empty Inductor caches in its first process, and full ones later.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import kvpass
from benchmarks import apart
from benchmarks.report import Row, about
from kvpass.apps import checkpoint, corpus
from kvpass.apps.evaluation.tables import markdown

TOKENS, BUDGET = 300, 256


def export(folder: str, policy: str, dtype: str) -> float:
    """Export a loop, and return the seconds taken."""
    model, _ = checkpoint.load(getattr(torch, dtype))
    began = time.perf_counter()
    kvpass.export(model, folder, policy=policy, budget=BUDGET)
    return time.perf_counter() - began


def start(folder: str | None, policy: str, dtype: str) -> Row:
    """Decode two tokens with an exported loop, or with one that compiles, and return the seconds of each part."""
    model, tokenizer = checkpoint.load(getattr(torch, dtype))
    ids = torch.tensor([tokenizer("\n".join(corpus.prose().values())).input_ids[:TOKENS]])
    times = [time.perf_counter()]
    loop = kvpass.load(folder, model) if folder else kvpass.DecodeLoop(model, policy, budget=BUDGET)
    times.append(time.perf_counter())
    loop.prompt(ids)
    times.append(time.perf_counter())
    made = loop.generate(2)
    times.append(time.perf_counter())
    return {
        "loop": times[1] - times[0],
        "prompt": times[2] - times[1],
        "first two steps": times[3] - times[2],
        "second token after": times[3] - times[0],
        "tokens": torch.cat([made, loop.generate(30)], 1)[0].tolist(),
    }


def measure(policy: str, dtype: str, threads: int, rounds: int) -> list[Row]:
    """Return a line for the exported loop, and for one that compiles with full and with empty caches."""
    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "exported")
        how = dict(threads=threads, environment={"TORCHINDUCTOR_CACHE_DIR": caches}, policy=policy, dtype=dtype)
        cold, *warm = [apart.run("benchmarks.exported:start", folder=None, **how) for _ in range(1 + rounds)]
        apart.run("benchmarks.exported:export", folder=folder, **how)
        loaded = [apart.run("benchmarks.exported:start", folder=folder, **how) for _ in range(rounds)]
    ways = {"exported": loaded, "compiled, full caches": warm, "compiled, empty caches": [cold]}
    return [{"policy": policy, "dtype": dtype, "way": way, **_medians(starts)} for way, starts in ways.items()]


def _medians(starts: list[Row]) -> Row:
    return {name: statistics.median(row[name] for row in starts) for name in starts[0] if name != "tokens"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exported", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policies", nargs="+", default=["h2o", "streaming"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    lines = [
        line
        for dtype in given.dtypes
        for policy in given.policies
        for line in measure(policy, dtype, given.threads, given.rounds)
    ]
    print(markdown(lines))
    print("\n" + ", ".join(f"{name}: {value}" for name, value in about().items()), f"threads: {given.threads}")


if __name__ == "__main__":
    main()
