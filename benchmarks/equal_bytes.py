"""Compare formats in equal bytes: twice as many tokens in int8 and four times as many in int4.

Perplexity and recall are those of `benchmarks.quality` and `benchmarks.recall`, on the bundled models; texts are fed
in chunks. The bytes differ a little (docs/quantised.md).

The cost of rounding is the difference between two runs over the same texts with equally many tokens held. Differences
are taken text by text, so they have a standard error over the texts.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks import apart
from benchmarks.recall import planted_in, read
from benchmarks.refusals import with_policy
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from kvpass import policies
from kvpass.apps import corpus
from kvpass.apps.evaluation.recall import right_words
from kvpass.apps.evaluation.scoring import ScoringBatch, score
from kvpass.apps.models import ALIGNER, load, load_memory
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy

TITLE = "Quality in the same bytes"
PERPLEXITY, RECALL = "perplexity", "recall"
BUDGETS = {PERPLEXITY: 64, RECALL: 128}  # tokens in half precision
DOCUMENTS, QUICK_DOCUMENTS = {PERPLEXITY: 12, RECALL: 16}, 2
LENGTH, CHUNK = {PERPLEXITY: 1024, RECALL: 2048}, 16
STORED: tuple[tuple[KVDtype | None, int], ...] = ((None, 1), ("int8", 1), ("int4", 1), ("int8", 2), ("int4", 4))
"""Formats, with the multiple of the budget that each holds."""
EQUAL = ((None, 1), ("int8", 2), ("int4", 4))
LIMITS: dict[KVDtype, float] = {"int8": 0.005, "int4": 0.03}  # of perplexity, with equally many tokens
Cells = dict[tuple[KVDtype | None, int], Row]
Ask = Callable[[Any], list[float]]
"""A function that returns a number for each text, for a compiled model."""


def measure(settings: Settings) -> list[Row]:
    """Return a row for each policy, measure, format and budget, from a process for each policy and measure."""
    names = ["full", "streaming", "h2o"] if settings.quick else sorted(policies.names(), key=effort)
    # The bundled aligner is for another model than the recalling one.
    tasks = [(PERPLEXITY, name) for name in names] + [(RECALL, name) for name in names if not takes_aligner(name)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(_apart, what, name, settings.quick) for what, name in tasks]
        bar = tqdm(concurrent.futures.as_completed(started), total=len(tasks), unit="policy", desc="equal bytes")
        for _ in bar:
            pass
    return [row for each in started for row in each.result()]


def effort(name: str) -> tuple[object, ...]:
    """Return a key that sorts policies by their needs in addition to attention."""
    policy = policies.get(name)
    return policy.evicts, takes_aligner(name), policy.positions == "cache", len(policy.statistics), name


def takes_aligner(name: str) -> bool:
    return takes(name, "aligner")


def takes(name: str, option: str) -> bool:
    return option in {field.name for field in dataclasses.fields(policies.get(name))}


def _apart(what: str, name: str, quick: bool) -> list[Row]:
    found: list[Row] = apart.run("benchmarks.equal_bytes:rows", what=what, name=name, quick=quick)
    return found


@torch.inference_mode()
def rows(what: str, name: str, quick: bool) -> list[Row]:
    """Return the result of one policy in each format, or the reason for a refusal."""
    documents = QUICK_DOCUMENTS if quick else DOCUMENTS[what]
    model, ask = {PERPLEXITY: _texts, RECALL: _pairs}[what](documents)
    policy = policies.resolve(name, {"aligner": ALIGNER} if takes_aligner(name) else {})
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


def _value(model: Any, policy: Policy, what: str, kind: KVDtype | None, times: int, ask: Ask) -> Row:
    slots = policy.fitting_budget(times * BUDGETS[what]) if policy.evicts else LENGTH[what]
    outcome = with_policy(model, policy, slots, "eager", lambda: ask(model), kind)
    if isinstance(outcome, KVPassError):
        found: Row = {"error": str(outcome)}
    else:
        mean = statistics.fmean(outcome)
        found = {"value": math.exp(mean) if what == PERPLEXITY else mean, "texts": outcome}
    return {"budget": slots if policy.evicts else None, **found}


def _texts(documents: int) -> tuple[Any, Ask]:
    """Return the model, and a function for its mean loss in each held-out document, in nats."""
    loaded = load(None)
    encoded = loaded.encode(corpus.read(corpus.held_out_files()))
    texts = corpus.documents(encoded, documents, LENGTH[PERPLEXITY], loaded.bos)
    batch = ScoringBatch.of([text[:1] for text in texts], [text[1:] for text in texts], torch.device("cpu"))

    def ask(model: Any) -> list[float]:
        losses: list[float] = (
            (-score(ModelCall.of(model, model), batch, CHUNK, "chunk").log_likelihoods).mean(1).tolist()
        )
        return losses

    return loaded.model, ask


def _pairs(documents: int) -> tuple[Any, Ask]:
    """Return the recalling model, and a function for the share of recalled words in each text."""
    loaded = load_memory()
    planted = planted_in(loaded, documents, LENGTH[RECALL])

    def ask(model: Any) -> list[float]:
        model_call = ModelCall.of(model)
        cache = read(model_call, planted.text, int)
        numbers = range(len(planted.distances))
        words = [right_words(model_call, planted, number, copy.deepcopy(cache)) for number in numbers]
        found: list[float] = torch.stack(words).float().mean((0, 2)).tolist()
        return found

    return loaded.model, ask


@dataclasses.dataclass(frozen=True)
class Difference:
    """Effect of rounding with equally many tokens held.

    Attributes:
        mean: for perplexity, as a share of it; for recall, as a share of all words.
        error: the standard error of the mean over texts; None if there is one text.
    """

    mean: float
    error: float | None

    @staticmethod
    def between(rounded: Row, plain: Row) -> Difference:
        """Compare text by text; a difference of losses in nats is a share of the perplexity."""
        apart = [one - other for one, other in zip(rounded["texts"], plain["texts"], strict=True)]
        mean = statistics.fmean(apart)
        error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else None
        return Difference(math.expm1(mean) if rounded["measure"] == PERPLEXITY else mean, error)

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} %" + ("" if self.error is None else f" ± {100 * self.error:.2f}")


def _by_policy(rows: Sequence[Row], what: str) -> dict[str, Cells]:
    found: dict[str, Cells] = {}
    for row in rows:
        if row["measure"] == what:
            found.setdefault(row["policy"], {})[row["kv_dtype"], row["times"]] = row
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    values = [Table(_caption(what, rows), list(_lines(rows, what))) for what in (PERPLEXITY, RECALL)]
    lost = "What rounding changes with as many tokens held: perplexity as a share of it, recall in shares of all words"
    return [*values, Table(f"{lost}; ± one standard error over the texts", list(_differences(rows)))]


def _caption(what: str, rows: Sequence[Row]) -> str:
    texts = next((row["documents"] for row in rows if row["measure"] == what), 0)
    more = {
        PERPLEXITY: f"Perplexity of {texts} held-out documents of {LENGTH[what]:,} tokens",
        RECALL: f"Share of planted words recalled from all distances, {texts} texts of {LENGTH[what]:,} tokens",
    }
    return f"{more[what]}, by format and tokens held"


def _lines(rows: Sequence[Row], what: str) -> Iterator[Row]:
    budget = BUDGETS[what]
    for policy, cells in _by_policy(rows, what).items():
        values = {f"{kind or 'plain'}, {times * budget}": _shown(cells.get((kind, times))) for kind, times in STORED}
        yield {"policy": policy, **values}


def _shown(row: Row | None) -> Any:
    return None if row is None else row.get("value", row.get("error"))


def _differences(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield a line for each policy with the effect of each format on each measure."""
    lines: dict[str, Row] = {}
    for what in (PERPLEXITY, RECALL):
        for policy, cells in _by_policy(rows, what).items():
            line = lines.setdefault(policy, {"policy": policy})
            line |= {f"{what}, {kind}": str(more) for kind in LIMITS if (more := difference(cells, kind)) is not None}
    yield from lines.values()


def targets(rows: Sequence[Row]) -> list[Target]:
    """Return the targets for the perplexity of each format with equally many tokens held."""
    found = _by_policy(rows, PERPLEXITY)
    return [
        Target("equal_bytes", f"{policy}: perplexity in {kind}, of the same tokens unrounded: {more}", limit, more.mean)
        for policy, cells in found.items()
        for kind, limit in LIMITS.items()
        if (more := difference(cells, kind)) is not None
    ]


def difference(cells: Cells, kind: KVDtype) -> Difference | None:
    """Return the difference between a format and plain rows; None if either was refused."""
    rounded, plain = (cells.get((each, 1), {}) for each in (kind, None))
    return Difference.between(rounded, plain) if "texts" in rounded and "texts" in plain else None


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw policies side by side, with a bar for each format in the same bytes."""
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
    return {"equal_bytes": grouped(panels)}


def grouped(panels: Mapping[str, Mapping[str, Mapping[str, float]]], spread: float = 4.0) -> Figure:
    """Draw a column of panels, one for each title, with bars for each kind and name that has a value.

    Args:
        spread: an axis is logarithmic if its largest value is this many times the middle one.
    """
    figure = Figure(figsize=(11, 3.6 * len(panels)), layout="constrained")
    for (title, kinds), axes in zip(panels.items(), figure.subplots(len(panels), 1, squeeze=False).flat, strict=True):
        names = list(dict.fromkeys(name for values in kinds.values() for name in values))
        width = 0.8 / max(1, len(kinds))
        for number, (kind, values) in enumerate(kinds.items()):
            places = [names.index(name) + (number - (len(kinds) - 1) / 2) * width for name in values]
            axes.bar(places, list(values.values()), width, label=kind)
        heights = sorted(value for values in kinds.values() for value in values.values())
        if heights and heights[-1] > spread * heights[len(heights) // 2] > 0:
            axes.set_yscale("log")
        axes.set_xticks(range(len(names)), labels=names, rotation=30)
        axes.set_title(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure
