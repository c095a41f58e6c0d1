"""Measure passkey retrieval by depth, at equal memory: one fact in a text of repeated sentences.

The model is the bundled one that recalls. A fact is a key with a value, which is right if all its words are. The task
is from arXiv:2305.16300; `kvpass eval --measure passkey` asks other models for a number in English.
`python -m benchmarks passkey` prints both tables.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import apart, bounded
from benchmarks.recall import AT_ONCE, BUDGET, LATER, by_way, outcomes, piece_count, read
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from kvpass import model_access
from kvpass.apps.evaluation.recall import LINE, TIMES, VALUE, PairVocabulary, PlantedPairs, likeliest, plant
from kvpass.apps.evaluation.retrieval import NOISE
from kvpass.apps.models import LoadedModel, load_memory
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError

TITLE = "Passkey retrieval"
LENGTH, TRIALS = 1024, 8
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SEED = 2_000_000_033  # seed of the pairs, unused in training and in the demo


def measure(settings: Settings) -> list[Row]:
    names = ["full", *bounded.everything()]
    chosen: dict[str, Any] = dict(policies=["full", "h2o"], trials=2) if settings.quick else dict(policies=names)
    rows: list[Row] = apart.run("benchmarks.passkey:rows", threads=max(settings.threads), **chosen)
    return rows


@torch.inference_mode()
def rows(policies: Sequence[str], trials: int = TRIALS, length: int = LENGTH, budget: int = BUDGET) -> list[Row]:
    """Return the share of right values for every policy, way of asking and depth."""
    loaded, found = load_memory(), []
    planted = [planted_at(loaded, depth, trials, length) for depth in DEPTHS]
    ask = functools.partial(accuracies, ModelCall.of(loaded.model), planted)
    for name, outcome in outcomes("passkey", policies, piece_count(planted[0].text), loaded.model, budget, ask):
        found += _rows(name, outcome)
    return found


def planted_at(loaded: LoadedModel, depth: float, trials: int, length: int) -> PlantedPairs:
    """Return repeated sentences with one pair in them, at a share of the text before the question."""
    sentences = torch.tensor(loaded.encode([NOISE])[0])
    documents = sentences.repeat(length // len(sentences) + 1)[:length].repeat(trials, 1)
    documents[:, 0] = loaded.bos
    behind = length - 1 - TIMES * LINE
    distance = behind - round(depth * behind)
    return plant(documents, PairVocabulary.of(loaded.tokenizer), (distance,), VALUE, SEED, TIMES)


def accuracies(model_call: ModelCall, planted: Sequence[PlantedPairs], tick: Any) -> dict[str, list[float]]:
    """Return accuracies by way of asking and depth; the texts of all depths are rows of one batch."""
    text, asked, answer = (
        torch.cat(parts)
        for parts in zip(*[(each.text, each.question(0), each.answer(0)) for each in planted], strict=True)
    )
    later = likeliest(model_call, torch.cat([asked, answer[:, :-1]], 1), read(model_call, text, tick))[:, 1:]
    prompt = model_access.call_model(model_call.call, torch.cat([text, asked], 1), logits_to_keep=1)
    rest = likeliest(model_call, answer[:, :-1], model_access.cache_of_output(prompt))
    at_once = torch.cat([prompt.logits[:, -1:].argmax(-1), rest], 1)
    return {LATER: _shares(later, answer, len(planted)), AT_ONCE: _shares(at_once, answer, len(planted))}


def _shares(said: Tensor, expected: Tensor, depths: int) -> list[float]:
    shares: list[float] = (said == expected).all(1).float().view(depths, -1).mean(1).tolist()
    return shares


def _rows(name: str, outcome: dict[str, list[float]] | KVPassError) -> Iterator[Row]:
    if isinstance(outcome, KVPassError):
        yield {"policy": name, "error": str(outcome)}
        return
    for way, shares in outcome.items():
        for depth, share in zip(DEPTHS, shares, strict=True):
            yield {"policy": name, "asked": way, "depth": depth, "accuracy": share}


def tables(rows: Sequence[Row]) -> list[Table]:
    what = f"Share of passkeys that are said to the last word, by depth in {LENGTH:,} tokens, budget {BUDGET}"
    return by_way(what, rows, "accuracy", lambda row: f"{row['depth']:.0%}")
