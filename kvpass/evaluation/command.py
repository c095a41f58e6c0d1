"""From the arguments of `kvpass eval` to its settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from kvpass.evaluation import run
from kvpass.evaluation.needle import Needle
from kvpass.evaluation.passkey import Passkey
from kvpass.evaluation.perplexity import Perplexity
from kvpass.evaluation.recall import Recall
from kvpass.evaluation.session import Measure
from kvpass.evaluation.settings import Settings
from kvpass.evaluation.speed import Speed
from kvpass.evaluation.stream import Stream

MADE: dict[str, Callable[[argparse.Namespace], Measure]] = {
    "perplexity": lambda given: Perplexity(given.tokens, given.rows),
    "stream": lambda given: Stream(given.tokens, given.restart),
    "passkey": lambda given: Passkey(tuple(given.length), tuple(given.depth), given.trials, given.seed),
    "needle": lambda given: Needle(tuple(given.length), tuple(given.depth), given.trials, given.seed),
    "recall": lambda given: Recall(tuple(given.distance), given.trials, given.seed),
    "speed": lambda given: Speed(max(given.length), given.rows),
}
"""How each measure is made of the arguments; `kvpass.cli.MEASURES` has the names."""


def main(given: argparse.Namespace) -> None:
    """Measure.

    Raises:
        KVPassError: see `kvpass.evaluation.run.main`.
    """
    if given.threads:
        torch.set_num_threads(given.threads)
    run.main(settings(given))


def settings(given: argparse.Namespace) -> Settings:
    return Settings(
        measures=tuple(MADE[name](given) for name in dict.fromkeys(given.measure)),
        policies=tuple(dict.fromkeys(given.policy)),
        budgets=tuple(dict.fromkeys(given.budget)),
        prefill=given.prefill,
        chunk=given.chunk,
        model=given.model,
        device=given.device,
        dtype=given.dtype,
        texts=tuple(given.text),
        kv_dtype=given.kv_dtype,
        inner=given.inner,
        out=given.out,
    )
