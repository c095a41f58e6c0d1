"""Perplexity and recall in the same bytes: as many tokens in half precision, twice as many in int8, four times in int4.

On the bundled models, as `benchmarks.quality` and `benchmarks.recall` have them, but texts go in by chunks.  Bytes are
nearly the same: docs/quantised.md has by how much they differ.
"""

from __future__ import annotations

import concurrent.futures
import copy
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import apart
from benchmarks.recall import planted_in
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from kvpass import policies
from kvpass.decoding.prefill import Caller
from kvpass.demo import corpus, job, recall
from kvpass.demo.settings import Settings as DemoSettings
from kvpass.demo.subject import load, load_memory
from kvpass.errors import KVPassError
from kvpass.evaluation import plots
from kvpass.evaluation.perplexity import exponential
from kvpass.evaluation.scoring import Batch, score
from kvpass.policies import Policy
from kvpass.storage import KVDtype

TITLE = "Quality in the same bytes"
PERPLEXITY, RECALL = "perplexity", "recall"
BUDGETS = {PERPLEXITY: 64, RECALL: 128}  # tokens in half precision
DOCUMENTS, LENGTH, CHUNK = 8, {PERPLEXITY: 1024, RECALL: 2048}, 16
STORED: tuple[tuple[KVDtype | None, int], ...] = ((None, 1), ("int8", 1), ("int4", 1), ("int8", 2), ("int4", 4))
"""Formats, and how many times the budget they hold."""
EQUAL = ((None, 1), ("int8", 2), ("int4", 4))
LIMITS: dict[KVDtype, float] = {"int8": 0.005, "int4": 0.03}  # of perplexity, at as many tokens


def measure(settings: Settings) -> list[Row]:
    """A row for each policy, measure, format and budget; a process for each policy and measure, one on each core."""
    asked = DemoSettings(policies=("full", "streaming", "h2o") if settings.quick else tuple(policies.names()))
    tasks = [(PERPLEXITY, name) for name in asked.chosen] + [(RECALL, name) for name in asked.remembering]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(_apart, what, name, settings.quick) for what, name in tasks]
        bar = tqdm(concurrent.futures.as_completed(started), total=len(tasks), unit="policy", desc="equal bytes")
        for _ in bar:
            pass
    return [row for each in started for row in each.result()]


def _apart(what: str, name: str, quick: bool) -> list[Row]:
    found: list[Row] = apart.run("benchmarks.equal_bytes:rows", what=what, name=name, quick=quick)
    return found


@torch.inference_mode()
def rows(what: str, name: str, quick: bool) -> list[Row]:
    """What one policy reaches in each format, or why it refuses."""
    documents = 2 if quick else DOCUMENTS
    model, ask = {PERPLEXITY: _texts, RECALL: _pairs}[what](documents)
    policy = DemoSettings().policy(name)
    return [
        {
            "measure": what,
            "documents": documents,
            "policy": name,
            "kv_dtype": kind,
            "times": times,
            **_value(model, policy, what, kind, times, ask),
        }
        for kind, times in (STORED if policy.evicts else STORED[:3])
    ]


def _value(model: Any, policy: Policy, what: str, kind: KVDtype | None, times: int, ask: Callable[[Any], float]) -> Row:
    slots = policy.fitting_budget(times * BUDGETS[what]) if policy.evicts else LENGTH[what]
    outcome = job.attempt(model, policy, slots, "eager", lambda: ask(model), kind)
    found = {"error": str(outcome)} if isinstance(outcome, KVPassError) else {"value": outcome}
    return {"budget": slots if policy.evicts else None, **found}


def _texts(documents: int) -> tuple[Any, Callable[[Any], float]]:
    """The model that text is streamed through, and its perplexity over held-out documents."""
    subject = load(None)
    encoded = subject.encode(corpus.read(corpus.held_out_files()))
    texts = corpus.documents(encoded, documents, LENGTH[PERPLEXITY], subject.bos)
    batch = Batch.of([text[:1] for text in texts], [text[1:] for text in texts], torch.device("cpu"))

    def ask(model: Any) -> float:
        scored = score(Caller.of(model, model), batch, CHUNK, "chunk")
        return exponential((-scored.log_likelihoods).flatten().tolist())

    return subject.model, ask


def _pairs(documents: int) -> tuple[Any, Callable[[Any], float]]:
    """The model that recalls, and the share of planted words that it does, of all distances."""
    subject = load_memory(None)
    planted = planted_in(subject, documents, LENGTH[RECALL])

    def ask(model: Any) -> float:
        cache = recall.read(model, planted.text, int)
        numbers = range(len(planted.distances))
        return statistics.fmean(recall.right(model, planted, number, copy.deepcopy(cache)) for number in numbers)

    return subject.model, ask


def _by_policy(rows: Sequence[Row], what: str) -> dict[str, dict[tuple[KVDtype | None, int], Row]]:
    found: dict[str, dict[tuple[KVDtype | None, int], Row]] = {}
    for row in rows:
        if row["measure"] == what:
            found.setdefault(row["policy"], {})[row["kv_dtype"], row["times"]] = row
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    documents = rows[0]["documents"]
    return [Table(_caption(what, documents), list(_lines(rows, what))) for what in (PERPLEXITY, RECALL)]


def _caption(what: str, documents: int) -> str:
    more = {
        PERPLEXITY: f"Perplexity of {documents} held-out documents of {LENGTH[what]:,} tokens",
        RECALL: f"Share of planted words recalled from all distances, {documents} texts of {LENGTH[what]:,} tokens",
    }
    return f"{more[what]}, by format and tokens held"


def _lines(rows: Sequence[Row], what: str) -> Iterator[Row]:
    budget = BUDGETS[what]
    for policy, cells in _by_policy(rows, what).items():
        values = {f"{kind or 'plain'}, {times * budget}": _shown(cells.get((kind, times))) for kind, times in STORED}
        yield {"policy": policy, **values}


def _shown(row: Row | None) -> Any:
    return None if row is None else row.get("value", row.get("error"))


def targets(rows: Sequence[Row]) -> list[Target]:
    """How much more perplexity a format costs, as many tokens held."""
    found = _by_policy(rows, PERPLEXITY)
    return [
        Target("equal_bytes", f"{policy}: perplexity in {kind}, beside the same tokens unrounded, less 1", limit, more)
        for policy, cells in found.items()
        for kind, limit in LIMITS.items()
        if (more := _more(cells, kind)) is not None
    ]


def _more(cells: dict[tuple[KVDtype | None, int], Row], kind: KVDtype) -> float | None:
    rounded, plain = (cells.get((each, 1), {}).get("value") for each in (kind, None))
    return rounded / plain - 1 if rounded and plain else None


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Policies side by side, a bar for each format, all in the same bytes."""
    panels = {
        f"{what}, {'lower' if what == PERPLEXITY else 'higher'} is better": {
            f"{kind or 'half precision'}, {times} times the tokens": {
                policy: cells[kind, times]["value"]
                for policy, cells in _by_policy(rows, what).items()
                if "value" in cells.get((kind, times), {})
            }
            for kind, times in EQUAL
        }
        for what in (PERPLEXITY, RECALL)
    }
    return {"equal_bytes": plots.grouped(panels)}
