"""Recall of planted key-value pairs as a function of distance, at equal memory.

On the bundled model that has learnt to recall (`examples/train_recall.py`), with the pairs of the demo but other texts
and other words.  `python -m benchmarks recall` prints both tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import apart, bounded
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from kvpass import policies
from kvpass.apps import corpus
from kvpass.apps.demo import recall
from kvpass.apps.demo.job import attempt
from kvpass.apps.demo.pairs import PlantedPairs, Tongue
from kvpass.apps.demo.recall import AT_ONCE, LATER, RecallOutcome
from kvpass.apps.evaluation import plots
from kvpass.apps.models import LoadedModel, load_memory
from kvpass.errors import KVPassError

TITLE = "Recall of planted pairs against distance"
BUDGET, DOCUMENTS, LENGTH = 128, 16, 2048
T = TypeVar("T")
TURNS = 4  # prompts of all documents, each with another question
SEED = 2_000_000_011  # of the pairs; neither training nor the demo has it


def measure(settings: Settings) -> list[Row]:
    names = ["full", *bounded.everything()]
    chosen = dict(policies=["full", "streaming", "h2o"], documents=8) if settings.quick else dict(policies=names)
    rows: list[Row] = apart.run("benchmarks.recall:rows", threads=max(settings.threads), **chosen)
    return rows


@torch.inference_mode()
def rows(policies: Sequence[str], documents: int = DOCUMENTS, length: int = LENGTH, budget: int = BUDGET) -> list[Row]:
    """The share of words of the values that are recalled, for every policy, way of asking and distance."""
    subject, found = load_memory(None), []
    planted = planted_in(subject, documents, length)
    ask = functools.partial(recall.measure, subject.model, planted, turns=TURNS)
    for name, outcome in outcomes("recall", policies, recall.pieces(planted.text), subject.model, budget, ask):
        found += _rows(name, outcome)
    return found


def outcomes(
    what: str, names: Sequence[str], pieces: int, model: Any, budget: int, ask: Callable[..., T]
) -> Iterator[tuple[str, T | KVPassError]]:
    """What each policy answers, or why it refuses.

    Args:
        pieces: how often a policy ticks.
        ask: asks the model, which is compiled for the policy; called with `tick`.
    """
    with tqdm(total=len(names) * pieces, unit="piece", dynamic_ncols=True) as bar:
        for name in names:
            bar.set_description(f"{what}: {name}")
            slots = budget if policies.get(name).evicts else None
            yield name, attempt(model, name, slots, "eager", lambda: ask(tick=bar.update))


def planted_in(subject: LoadedModel, documents: int, length: int) -> PlantedPairs:
    """Held-out texts with a pair at each distance."""
    text = subject.encode(corpus.read(corpus.held_out_files()))
    tokens = torch.tensor([token for part in text for token in (subject.bos, *part)])
    return recall.planted(tokens, subject.bos, Tongue.of(subject.tokenizer), length, rows=documents, seed=SEED)


def _rows(name: str, outcome: RecallOutcome | KVPassError) -> Iterator[Row]:
    if isinstance(outcome, KVPassError):
        yield {"policy": name, "error": str(outcome)}
        return
    for way, shares in outcome.ways.items():
        for distance, share in zip(outcome.distances, shares, strict=True):
            yield {"policy": name, "asked": way, "distance": distance, "recall": share}


def tables(rows: Sequence[Row]) -> list[Table]:
    what = f"Share of the words of planted values that are recalled, by distance in tokens, budget {BUDGET}"
    return by_way(what, rows, "recall", lambda row: str(row["distance"]))


def by_way(what: str, rows: Sequence[Row], share: str, column: Callable[[Row], str]) -> list[Table]:
    """A table for each way of asking: a line for each policy with the shares, then what was refused."""
    refused = [{"policy": row["policy"], "refused": row["error"]} for row in rows if "error" in row]
    return [Table(f"{what}, {way}", [*_lines(rows, way, share, column), *refused]) for way in (LATER, AT_ONCE)]


def _lines(rows: Sequence[Row], way: str, share: str, column: Callable[[Row], str]) -> list[Row]:
    lines: dict[str, Row] = {}
    for row in rows:
        if row.get("asked") == way:
            lines.setdefault(row["policy"], {"policy": row["policy"]})[column(row)] = row[share]
    return [*lines.values()]


def targets(rows: Sequence[Row]) -> list[Target]:
    return []


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if "recall" in row:
            panel = panels.setdefault(f"budget {BUDGET}, {row['asked']}", {})
            panel.setdefault(row["policy"], []).append((row["distance"], row["recall"]))
    return {"recall": plots.lines(panels, "distance", "recall")}
