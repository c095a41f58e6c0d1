"""Time one caching operation alone, beside concatenation, as table 4 of Cascade does (arXiv:2406.17808).

A token arrives while 4 sinks and 1,024 others are held, in 32 heads of 128.  Concatenation copies all but the oldest
token.  kvpass writes one row of K and one of V, and updates the metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

from benchmarks import apart
from benchmarks.model import DTYPES
from benchmarks.report import Row, Table, Target, under
from benchmarks.settings import Settings
from benchmarks.timing import Local, Plan, interleaved, medians
from kvpass.cache.slots import Layout, Slots
from kvpass.cache.step import Site, decode_step
from kvpass.policies import resolve

TITLE = "One caching operation beside concatenation"
SINKS, RECENT, HEADS, DIM = 4, 1024, 32, 128
CONCATENATION, OURS = "concatenation", "kvpass, streaming"
LIMIT = 50


def measure(settings: Settings) -> list[Row]:
    """Return rows for each dtype and number of threads."""
    given = dict(plan=dataclasses.asdict(settings.plan))
    found = []
    for dtype, threads in tqdm(settings.combinations(), unit="case", desc="caching", dynamic_ncols=True):
        found += apart.run("benchmarks.caching:rows", threads=threads, dtype=dtype, count=threads, **given)
    return found


@torch.inference_mode()
def rows(dtype: str, count: int, plan: Row) -> list[Row]:
    """Return the rows of one dtype and number of threads."""
    contenders = [Local(CONCATENATION, concatenation(DTYPES[dtype])), Local(OURS, in_place(DTYPES[dtype]))]
    found = medians(interleaved(contenders, Plan(**plan)))
    return [{"dtype": dtype, "threads": count, "operation": name, "ms": ms} for name, ms in found.items()]


def concatenation(dtype: torch.dtype) -> Callable[[], Any]:
    """Return a step that concatenates sinks, the recent tokens but the oldest, and a new token."""
    held = {name: torch.randn(1, HEADS, SINKS + RECENT, DIM).to(dtype) for name in "kv"}
    new = torch.randn(1, HEADS, 1, DIM).to(dtype)

    def step() -> None:
        for name, rows in held.items():
            held[name] = torch.cat([rows[:, :, :SINKS], rows[:, :, SINKS + 1 :], new], 2)

    return step


def in_place(dtype: torch.dtype) -> Callable[[], Any]:
    """Return the compiled step of a layer; its attention has no user, so it is left out."""
    layout, held = _full_layer(dtype)

    def function(*tensors: Tensor) -> tuple[()]:
        *state, query, key, value, valid = tensors
        decode_step(layout, Site(DIM**-0.5), held.with_tensors(state), query, key, value, valid)
        return ()

    new = [torch.randn(1, HEADS, 1, DIM).to(dtype) for _ in range(3)]
    arguments = [*held.tensors(), *new, torch.ones(1, dtype=torch.bool)]
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    compiled = torch.compile(traced, dynamic=False)
    for _ in range(3):
        compiled(*arguments)
    return lambda: compiled(*arguments)


def _full_layer(dtype: torch.dtype) -> tuple[Layout, Slots]:
    """Return a layer of `streaming` with one free slot."""
    policy, budget = resolve("streaming", {"sinks": SINKS}), SINKS + RECENT
    capacity = policy.capacity(budget)
    layout = Layout(policy, budget, capacity, 1, HEADS, DIM, DIM, dtype, torch.device("cpu"), ranked=True)
    held = Slots.empty(layout)
    for places in (held.position, held.index, held.rank):
        places.copy_(torch.arange(capacity))
    for places in (held.position, held.index):
        places[..., -1] = -1
    held.free.fill_(capacity - 1)
    held.seen.fill_(budget)
    held.length.fill_(budget)
    return layout, held


def tables(rows: Sequence[Row]) -> list[Table]:
    made: dict[str, Row] = {}
    for row in rows:
        made.setdefault(under(row), {"": under(row)})[f"{row['operation']}, ms"] = row["ms"]
    for line in made.values():
        line["times faster"] = line[f"{CONCATENATION}, ms"] / line[f"{OURS}, ms"]
    return [Table(f"One caching operation, {SINKS} + {RECENT:,} tokens, {HEADS} heads of {DIM}", [*made.values()])]


def targets(rows: Sequence[Row]) -> list[Target]:
    lines = tables(rows)[0].rows
    what = "caching, times faster than concatenation"
    return [Target("caching", f"{what} ({line['']})", LIMIT, line["times faster"], at_least=True) for line in lines]
