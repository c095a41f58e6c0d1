"""Time to the first tokens of a fresh process, beside stock torch.compile, with cold and with warm caches.

What is timed is a prompt of 64 tokens and two steps, from the first call on: two graphs are traced and compiled.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from tqdm import tqdm

import kvpass
from benchmarks import apart
from benchmarks.bounded import Case
from benchmarks.model import build, tokens
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from benchmarks.timing import timed

TITLE = "Compile time to the first tokens"
STATIC, DYNAMIC = "torch.compile, StaticCache", "torch.compile, DynamicCache"
POLICIES = ("streaming", "h2o", "tova", "d2o", "cascade")
PROMPT, ROOM = 64, 1024
OF_STOCK, WARM_OF_COLD = 1.25, 1 / 3


def measure(settings: Settings) -> list[Row]:
    """Two processes for each contender and repetition, the second on the caches that the first one filled."""
    contenders = [STATIC, DYNAMIC, *(POLICIES[1:2] if settings.quick else POLICIES)]
    turns = [name for _ in range(1 if settings.quick else 2) for name in contenders]
    rows = []
    with tqdm(turns, unit="pair", dynamic_ncols=True) as bar:
        for name in bar:
            bar.set_description(f"compilation: {name}")
            rows += _cold_and_warm(name)
    return rows


def _cold_and_warm(name: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for caches in ("cold", "warm"):
            found = apart.run(
                "benchmarks.compilation:first", environment={"TORCHINDUCTOR_CACHE_DIR": folder}, name=name
            )
            yield {"contender": name, "caches": caches, **found}


@torch.inference_mode()
def first(name: str) -> Row:
    """Seconds of the prompt and of the two steps after it, in this process."""
    model = build()
    forward, cache = _contender(model, name)
    state: list[Any] = [tokens(PROMPT), cache]

    def call() -> None:
        out = forward(state[0], past_key_values=state[1], use_cache=True, logits_to_keep=1)
        state[:] = [out.logits[:, -1:].argmax(-1), out.past_key_values]

    return {"prompt": timed(call), "steps": timed(call) + timed(call)}


def _contender(model: Any, name: str) -> tuple[Callable[..., Any], Any]:
    """The compiled model, and the cache that it begins with."""
    if name == STATIC:
        return torch.compile(model), transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    if name == DYNAMIC:
        return torch.compile(model), None
    return torch.compile(model, backend=kvpass.backend(**Case(name).settings())), None


def _seconds(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Median totals by contender and caches."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row["contender"], {}).setdefault(row["caches"], []).append(row["prompt"] + row["steps"])
    return {name: {kind: statistics.median(x) for kind, x in kinds.items()} for name, kinds in found.items()}


def tables(rows: Sequence[Row]) -> list[Table]:
    totals = _seconds(rows)
    lines = [
        {
            "contender": name,
            "cold, s": kinds["cold"],
            "warm, s": kinds["warm"],
            "cold, of StaticCache": kinds["cold"] / totals[STATIC]["cold"],
            "warm, of cold": kinds["warm"] / kinds["cold"],
        }
        for name, kinds in totals.items()
    ]
    return [Table(f"A prompt of {PROMPT} tokens and two steps in a fresh process, imports left out", lines)]


def targets(rows: Sequence[Row]) -> list[Target]:
    return [target for line in tables(rows)[0].rows for target in _targets(line)]


def _targets(line: Row) -> Iterator[Target]:
    if line["contender"] not in (STATIC, DYNAMIC):
        what = f"{line['contender']}: compile time, of {STATIC}"
        yield Target("compilation", what, OF_STOCK, line["cold, of StaticCache"])
        yield Target("compilation", f"{line['contender']}: warm, of cold", WARM_OF_COLD, line["warm, of cold"])


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    return {}
