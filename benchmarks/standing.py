"""Rank planted values among all tokens of a text by the scores that policies use.

    python -m benchmarks.standing

A policy that keeps one of sixteen tokens by a score keeps a token if fewer than 6 % of the tokens score higher. The
model is the bundled one that recalls, with the texts of `python -m benchmarks recall`, after a complete prompt.
docs/quality.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.recall import AT_ONCE, LATER, LENGTH, planted_in
from benchmarks.report import Row
from kvpass.apps.evaluation.recall import PlantedPairs
from kvpass.apps.evaluation.tables import markdown
from kvpass.apps.models import load_memory

TEXTS, LAST = 2, 32


def total(attention: Tensor) -> Tensor:
    """Sum attention [B, Hq, T, T] over all queries, as h2o and d2o do; returns [B, Hq, T]."""
    return attention.sum(2)


def mean(attention: Tensor) -> Tensor:
    """Average attention over the queries that saw the token, as roco does."""
    count = attention.shape[2]
    return attention.sum(2) / torch.arange(count, 0, -1)


def last(attention: Tensor) -> Tensor:
    """Average attention over the last queries, as snapkv does."""
    return attention[:, :, -LAST:].mean(2)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {"sum": total, "mean": mean, f"last {LAST} queries": last}


@torch.no_grad()
def rows(texts: int = TEXTS, length: int = LENGTH) -> list[Row]:
    """Return the share of tokens that score higher than a planted word, in the best head, by distance."""
    loaded = load_memory()
    planted = planted_in(loaded, texts, length)
    loaded.model.set_attn_implementation("eager")
    before = _attention(loaded.model, planted.text)
    found: dict[tuple[str, str], Row] = {}
    for number, distance in enumerate(planted.distances):
        asked = torch.cat([planted.text, planted.question(number)], 1)
        for way, attention in ((LATER, before), (AT_ONCE, _attention(loaded.model, asked))):
            for name, score in SCORES.items():
                row = found.setdefault((way, name), {"asked": way, "score": name})
                row[str(distance)] = _above([score(layer) for layer in attention], planted, number)
    return [found[way, name] for way in (LATER, AT_ONCE) for name in SCORES]


def _attention(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """Return the attention of each layer, [B, Hq, T, T]."""
    layers: tuple[Tensor, ...] = model(tokens, output_attentions=True, use_cache=False).attentions
    return layers


def _above(scores: list[Tensor], planted: PlantedPairs, number: int) -> float:
    """Return the mean share over rows and words, in the best head and the best copy of the pair.

    Args:
        scores: [B, Hq, T] of each layer.
    """
    lines = torch.arange(planted.text.shape[1])[planted.span(number)].view(planted.times, -1)
    every = [_surpassing(score, words) for score in scores for words in lines[:, 2:-1]]
    return torch.stack(every).amin((0, 2)).mean().item()  # [layers * times, B, Hq]


def _surpassing(score: Tensor, words: Tensor) -> Tensor:
    """Return the share of tokens that score higher, averaged over words [V]: [B, Hq]."""
    return (score[..., None, :] > score[..., words, None]).float().mean((-1, -2))


def main() -> None:
    print(markdown(rows()))


if __name__ == "__main__":
    main()
