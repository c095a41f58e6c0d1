"""Turn the arguments of `kvpass eval` into its settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from kvpass.apps.evaluation import run
from kvpass.apps.evaluation.agreement import AgreementMeasure
from kvpass.apps.evaluation.perplexity import Perplexity
from kvpass.apps.evaluation.recall import RecallMeasure
from kvpass.apps.evaluation.retrieval import Needle, Passkey
from kvpass.apps.evaluation.ruler import RulerMeasure
from kvpass.apps.evaluation.session import Measure
from kvpass.apps.evaluation.settings import EvaluationSettings
from kvpass.apps.evaluation.speed import Speed
from kvpass.apps.evaluation.stream import StreamMeasure

MADE: dict[str, Callable[[argparse.Namespace], Measure]] = {
    "perplexity": lambda given: Perplexity(given.tokens, given.rows),
    "stream": lambda given: StreamMeasure(given.tokens, given.restart),
    "agreement": lambda given: AgreementMeasure(given.documents, given.tokens, given.rows, seed=given.seed),
    "passkey": lambda given: Passkey(tuple(given.length), tuple(given.depth), given.trials, given.rows, given.seed),
    "needle": lambda given: Needle(tuple(given.length), tuple(given.depth), given.trials, given.rows, given.seed),
    "ruler": lambda given: RulerMeasure(
        tuple(given.task), tuple(given.length), given.trials, given.question == "after", given.seed
    ),
    "recall": lambda given: RecallMeasure(tuple(given.distance), given.trials, given.seed),
    "speed": lambda given: Speed(max(given.length), given.rows),
}
"""Constructors of the measures from the arguments; `kvpass.apps.cli.MEASURES` has the names."""


def main(given: argparse.Namespace) -> None:
    """Measure what the arguments name.

    Raises:
        KVPassError: see `kvpass.apps.evaluation.run.main`.
    """
    if given.threads:
        torch.set_num_threads(given.threads)
    run.main(settings(given))


def settings(given: argparse.Namespace) -> EvaluationSettings:
    return EvaluationSettings(
        measures=tuple(MADE[name](given) for name in dict.fromkeys(given.measure)),
        policies=tuple(dict.fromkeys(given.policy)),
        budgets=tuple(dict.fromkeys(given.bytes or given.budget)),
        of_bytes=given.bytes is not None,
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
