"""Measure processor time of attention in one layer of SmolLM2-135M for a prompt, and of its column sums.

The layer has 9 query and 3 KV heads of 64. "Masked" uses the causal mask as a boolean tensor, like a padded batch.
"Library" is torch's attention. "In one" is the operator that a prompt runs: it computes attention and the sums.
"Without sums" is the same operator for a policy that reads none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import apart
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from kvpass.lowering.attention_statistics import StatisticsArguments, attention_statistics
from kvpass.policies.types import Statistic

TITLE = "Column sums of one layer"
QUERY_HEADS, HEADS, DIM = 9, 3, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TURNS = 5
LIMITS = {"float32": 0.4, "bfloat16": 0.25}
"""The largest share of attention's time that the sums may add, in one operator and without a mask."""


def measure(settings: Settings) -> list[Row]:
    """Return rows of milliseconds, from one process with one thread."""
    cases = [(1, 1024)] if settings.quick else [(1, 1024), (1, 4096), (8, 2048)]
    rows: list[Row] = apart.run("benchmarks.prompt_scores:times", threads=1, cases=cases)
    return rows


@torch.inference_mode()
def times(cases: Sequence[tuple[int, int]]) -> list[Row]:
    """Return milliseconds by dtype, rows, tokens and mask."""
    each = [(dtype, rows, count, masked) for rows, count in cases for dtype in DTYPES for masked in (False, True)]
    return [_row(*case) for case in tqdm(each, unit="case", desc="column sums", dynamic_ncols=True)]


def _row(dtype: str, rows: int, count: int, masked: bool) -> Row:
    query = torch.randn(rows, count, QUERY_HEADS, DIM).to(DTYPES[dtype]).transpose(1, 2)
    key, value = (torch.randn(rows, HEADS, count, DIM).to(DTYPES[dtype]) for _ in range(2))
    mask = torch.ones(1, 1, count, count, dtype=torch.bool).tril() if masked else None
    valid = torch.ones(rows, count, dtype=torch.bool)

    def attention() -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, mask, is_causal=not masked, enable_gqa=True)

    def statistics(value: Tensor | None, *names: Statistic) -> Callable[[], object]:
        request = StatisticsArguments(names, not masked, DIM**-0.5, None, HEADS).to_text()
        return lambda: attention_statistics(query, key, value, mask, None, valid, None, request)

    calls = {
        "library": attention,
        "without sums": statistics(value),
        "sums alone": statistics(None, "total"),
        "in one": statistics(value, "total"),
    }
    for call in calls.values():
        call()  # compiles missing kernels
    turns = [{name: _spent(call) for name, call in calls.items()} for _ in range(TURNS)]
    found = {name: min(turn[name] for turn in turns) for name in calls}
    return {"dtype": dtype, "rows": rows, "tokens": count, "mask": "masked" if masked else "causal", **found}


def _spent(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def tables(rows: Sequence[Row]) -> list[Table]:
    shown = [{**row, "adds": f"{_added(row):.0%} of the library"} for row in rows]
    return [Table("Milliseconds of processor time, the least of five, one thread", shown)]


def _added(row: Row) -> float:
    return float(row["in one"] / row["library"] - 1)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Yield the targets for the longest causal prompts of one row."""
    for dtype, limit in LIMITS.items():
        found = [row for row in rows if (row["dtype"], row["rows"], row["mask"]) == (dtype, 1, "causal")]
        longest = max(found, key=lambda row: row["tokens"], default=None)
        ratio = None if longest is None else _added(longest)
        yield Target("prompt_scores", f"{dtype}, share of attention that sums add", limit, ratio)
