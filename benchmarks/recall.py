"""Recall of planted key-value pairs as a function of distance, at equal memory.

A line of one document, cut into a key and a value, is planted near the beginning of another one.  After so many
tokens the key is said again, on a copy of the cache; what counts is how many tokens of the value are then predicted.
Without any planted pair some are, too: the row "nothing planted" is what a guess is worth.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from benchmarks import apart, bounded, plots
from benchmarks.report import Row, Table, Target
from benchmarks.settings import Settings
from kvpass.demo import corpus
from kvpass.demo.job import attempt
from kvpass.demo.subject import load
from kvpass.errors import KVPassError

TITLE = "Recall of planted pairs against distance"
BEFORE, KEY, VALUE = 32, 4, 8
DISTANCES = (16, 32, 64, 128, 256, 512)
BUDGET, DOCUMENTS = 128, 32
ABSENT = "nothing planted"


@dataclasses.dataclass(frozen=True)
class Trials:
    """Planted documents, a row of a batch each.

    Attributes:
        text: int64 [B, BEFORE + KEY + VALUE + the longest distance], the pair at `BEFORE`.
        key: int64 [B, KEY]; value: int64 [B, VALUE].
    """

    text: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def planted(documents: Tensor, longest: int) -> Trials:
        """Trials from documents int64 [B, T]; each row's pair is from another row, from where no text reaches."""
        start = BEFORE + longest
        pair = documents.roll(1, 0)[:, start : start + KEY + VALUE]
        text = torch.cat([documents[:, :BEFORE], pair, documents[:, BEFORE:start]], 1)
        return Trials(text, pair[:, :KEY], pair[:, KEY:])

    def unplanted(self) -> Trials:
        """The same questions about a text in which the pair does not occur."""
        text = torch.cat([self.text[:, :BEFORE], self.text[:, BEFORE + KEY + VALUE :]], 1)
        return dataclasses.replace(self, text=text)

    @property
    def question(self) -> Tensor:
        """int64 [B, KEY + VALUE - 1]: the key and, as they would be said, all but the last of the value."""
        return torch.cat([self.key, self.value[:, :-1]], 1)


def measure(settings: Settings) -> list[Row]:
    names = ["full", *bounded.everything()]
    chosen = dict(policies=["full", "streaming", "h2o"], documents=8) if settings.quick else dict(policies=names)
    rows: list[Row] = apart.run("benchmarks.recall:rows", threads=max(settings.threads), **chosen)
    return rows


@torch.inference_mode()
def rows(
    policies: Sequence[str], documents: int = DOCUMENTS, distances: Sequence[int] = DISTANCES, budget: int = BUDGET
) -> list[Row]:
    """The share of tokens of the value that are predicted, for every policy and distance."""
    subject, longest = load(None), max(distances)
    texts = subject.encode(corpus.read(corpus.held_out_files()))
    length = BEFORE + longest + KEY + VALUE
    trials = Trials.planted(torch.tensor(corpus.documents(texts, documents, length, subject.bos)), longest)
    found = _found(subject.model, trials.unplanted(), ABSENT, [distances[0]])
    with tqdm(total=len(policies) * longest, unit="token", dynamic_ncols=True) as bar:
        for name in policies:
            bar.set_description(f"recall: {name}")
            slots = length * 2 if name == "full" else budget

            def one(name: str = name) -> list[Row]:
                return _found(subject.model, trials, name, distances, bar.update)

            outcome = attempt(subject.model, name, slots, "inductor", one)
            found += [{"policy": name, "error": str(outcome)}] if isinstance(outcome, KVPassError) else outcome
    return found


def _found(
    model: Any, trials: Trials, name: str, distances: Sequence[int], tick: Callable[[], object] = lambda: None
) -> list[Row]:
    return [{"policy": name, "distance": d, "recall": share} for d, share in recalled(model, trials, distances, tick)]


def recalled(
    model: Any, trials: Trials, distances: Sequence[int], tick: Callable[[], object] = lambda: None
) -> Iterator[tuple[int, float]]:
    """Distances and shares of predicted tokens; the text goes in token by token after a prompt of two."""
    start = trials.text.shape[1] - max(distances)
    cache = model(trials.text[:, :2], use_cache=True).past_key_values
    for place in range(2, trials.text.shape[1]):
        if place - start in distances:
            yield place - start, _answered(model, trials, copy.deepcopy(cache))
        cache = model(trials.text[:, place : place + 1], past_key_values=cache, use_cache=True).past_key_values
        tick()
    yield max(distances), _answered(model, trials, cache)


def _answered(model: Any, trials: Trials, cache: Any) -> float:
    """The share of the value's tokens that are the likeliest ones after the key, said token by token."""
    said = []
    for column in trials.question.split(1, 1):
        out = model(column, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        said.append(out.logits[:, -1].argmax(-1))
    return float((torch.stack(said[KEY - 1 :], 1) == trials.value).float().mean())


def tables(rows: Sequence[Row]) -> list[Table]:
    lines: dict[str, Row] = {}
    for row in rows:
        line = lines.setdefault(row["policy"], {"policy": row["policy"]})
        line[str(row.get("distance", "refused"))] = row.get("recall", row.get("error"))
    what = f"Share of the {VALUE} tokens of a planted value that are predicted, by distance in tokens, budget {BUDGET}"
    return [Table(what, [*lines.values()])]


def targets(rows: Sequence[Row]) -> list[Target]:
    return []


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "recall" in row and row["policy"] != ABSENT:
            lines.setdefault(row["policy"], []).append((row["distance"], row["recall"]))
    return {"recall": plots.lines({f"budget {BUDGET}": lines}, "distance", "recall")}
