"""Measure the recall of planted key-value pairs by distance, at equal memory.

The model is the bundled one that recalls (`examples/train_recall.py`). Pairs are made as in the demo, from other texts
and words. `python -m benchmarks recall` prints both tables.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import apart, bounded
from benchmarks.refusals import with_policy
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from kvpass import model_access, policies
from kvpass.apps import corpus
from kvpass.apps.evaluation.recall import PairVocabulary, PlantedPairs, likeliest, plant_pairs, right_words
from kvpass.apps.models import LoadedModel, load_memory
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError
from kvpass.torch_private import dynamo

TITLE = "Recall of planted pairs against distance"
BUDGET, DOCUMENTS, LENGTH = 128, 16, 2048
DISTANCES = (16, 32, 64, 128, 256, 512, 1024, 2000)
PROMPT = 2  # tokens of the shortest first piece, because torch.compile specialises sizes of one
PIECE = 32  # tokens of a text that are fed together
T = TypeVar("T")
LATER, AT_ONCE = "asked after the text", "asked at the end of the prompt"
TURNS = 4  # prompts of all documents, each with another question
SEED = 2_000_000_011  # seed of the pairs, unused in training and in the demo


@dataclasses.dataclass(frozen=True)
class RecallOutcome:
    """Share of the values' words that were the most likely token, by distance.

    Attributes:
        later: results for a text fed in pieces, with the questions after it.
        at_once: results for text and question in one prompt, after which the policy evicts. The first word of a value
            is not counted, because the complete prompt predicts it.
    """

    distances: tuple[int, ...]
    later: tuple[float, ...]
    at_once: tuple[float, ...]

    @property
    def ways(self) -> dict[str, tuple[float, ...]]:
        """Return the shares by way of asking."""
        return {LATER: self.later, AT_ONCE: self.at_once}


def measure(settings: Settings) -> list[Row]:
    names = ["full", *bounded.everything()]
    chosen = dict(policies=["full", "streaming", "h2o"], documents=8) if settings.quick else dict(policies=names)
    rows: list[Row] = apart.run("benchmarks.recall:rows", threads=max(settings.threads), **chosen)
    return rows


@torch.inference_mode()
def rows(policies: Sequence[str], documents: int = DOCUMENTS, length: int = LENGTH, budget: int = BUDGET) -> list[Row]:
    """Return the share of recalled words for every policy, way of asking and distance."""
    loaded, found = load_memory(), []
    planted = planted_in(loaded, documents, length)
    ask = functools.partial(asked, ModelCall.of(loaded.model), planted, turns=TURNS)
    for name, outcome in outcomes("recall", policies, piece_count(planted.text), loaded.model, budget, ask):
        found += _rows(name, outcome)
    return found


def outcomes(
    what: str, names: Sequence[str], pieces: int, model: Any, budget: int, ask: Callable[..., T]
) -> Iterator[tuple[str, T | KVPassError]]:
    """Yield the answer of each policy, or the reason for its refusal.

    Args:
        pieces: number of ticks of a policy.
        ask: asks the model, which is compiled for the policy; called with `tick`.
    """
    with tqdm(total=len(names) * pieces, unit="piece", dynamic_ncols=True) as bar:
        for name in names:
            bar.set_description(f"{what}: {name}")
            slots = budget if policies.get(name).evicts else None
            yield name, with_policy(model, name, slots, "eager", lambda: ask(tick=bar.update))


def asked(model_call: ModelCall, planted: PlantedPairs, tick: Callable[[], object], turns: int) -> RecallOutcome:
    """Ask a model, compiled or not, about every pair.

    Args:
        tick: function to call after every piece of the text.
        turns: number of prompts of the texts, each with one question at its end.
    """
    numbers, cache = range(len(planted.distances)), read(model_call, planted.text, tick)
    later = [share_of_right_words(model_call, planted, number, copy.deepcopy(cache)) for number in numbers]
    return RecallOutcome(planted.distances, tuple(later), right_at_once(model_call, planted, turns))


@torch.no_grad()
def read(model_call: ModelCall, text: Tensor, tick: Callable[[], object]) -> Any:
    """Return the cache after text int64 [B, T], fed in pieces of one length; a shorter prompt precedes them."""
    first = text[:, : text.shape[1] - piece_count(text) * PIECE]
    dynamo.mark_dynamic_dim(first, 1)  # prompts with a question are longer
    cache = model_access.cache_of_output(model_access.call_model(model_call.call, first))
    for start in range(first.shape[1], text.shape[1], PIECE):
        out = model_access.call_model(model_call.call, text[:, start : start + PIECE], cache)
        cache = model_access.cache_of_output(out)
        tick()
    return cache


def piece_count(text: Tensor) -> int:
    """Return the number of ticks of `read` for text int64 [B, T]."""
    return (text.shape[1] - PROMPT) // PIECE


def share_of_right_words(model_call: ModelCall, planted: PlantedPairs, number: int, cache: Any) -> float:
    """Return the share of a value's words that follow its key, each after the right ones before it."""
    return right_words(model_call, planted, number, cache).float().mean().item()


def right_at_once(model_call: ModelCall, planted: PlantedPairs, turns: int) -> tuple[float, ...]:
    """Return the share of a value's words but the first, by distance, when a question ends the prompt."""
    rows, count = len(planted.text), len(planted.distances)
    shares: list[list[float]] = [[] for _ in range(count)]
    for turn in range(max(turns, count - rows + 1)):  # so that some row is asked about every distance
        numbers = [(row + turn) % count for row in range(rows)]
        for number, share in zip(numbers, _right_in_turn(model_call, planted, torch.tensor(numbers)), strict=True):
            shares[number].append(share)
    return tuple(sum(each) / len(each) for each in shares)


def _right_in_turn(model_call: ModelCall, planted: PlantedPairs, numbers: Tensor) -> list[float]:
    """Return each row's share of right words if the prompt ends with the question of that number."""
    lines = planted.pairs[torch.arange(len(numbers)), numbers]  # [B, 3 + V]
    question, answer = lines[:, :2], lines[:, 2:-1]
    prompt = torch.cat([planted.text, question], 1)
    cache = model_access.cache_of_output(model_access.call_model(model_call.call, prompt, logits_to_keep=1))
    found: list[float] = (likeliest(model_call, answer[:, :-1], cache) == answer[:, 1:]).float().mean(1).tolist()
    return found


def planted_in(loaded: LoadedModel, documents: int, length: int) -> PlantedPairs:
    """Return held-out texts with a pair at each distance."""
    text = loaded.encode(corpus.read(corpus.held_out_files()))
    tokens = torch.tensor([token for part in text for token in (loaded.bos, *part)])
    return plant_pairs(tokens, loaded.bos, PairVocabulary.of(loaded.tokenizer), length, DISTANCES, documents, SEED)


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
    """Return a table for each way of asking: a line of shares for each policy, then the refusals."""
    refused = [{"policy": row["policy"], "refused": row["error"]} for row in rows if "error" in row]
    return [Table(f"{what}, {way}", [*_lines(rows, way, share, column), *refused]) for way in (LATER, AT_ONCE)]


def _lines(rows: Sequence[Row], way: str, share: str, column: Callable[[Row], str]) -> list[Row]:
    lines: dict[str, Row] = {}
    for row in rows:
        if row.get("asked") == way:
            lines.setdefault(row["policy"], {"policy": row["policy"]})[column(row)] = row[share]
    return [*lines.values()]
