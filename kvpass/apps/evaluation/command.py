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

MEASURE_FACTORIES: dict[str, Callable[[argparse.Namespace], Measure]] = {
    "perplexity": lambda parsed: Perplexity(parsed.tokens, parsed.rows),
    "stream": lambda parsed: StreamMeasure(parsed.tokens, parsed.restart),
    "agreement": lambda parsed: AgreementMeasure(parsed.documents, parsed.tokens, parsed.rows, seed=parsed.seed),
    "passkey": lambda parsed: Passkey(
        tuple(parsed.length), tuple(parsed.depth), parsed.trials, parsed.rows, parsed.seed
    ),
    "needle": lambda parsed: Needle(tuple(parsed.length), tuple(parsed.depth), parsed.trials, parsed.rows, parsed.seed),
    "ruler": lambda parsed: RulerMeasure(
        tuple(parsed.task), tuple(parsed.length), parsed.trials, parsed.question == "after", parsed.seed
    ),
    "recall": lambda parsed: RecallMeasure(tuple(parsed.distance), parsed.trials, parsed.seed),
    "speed": lambda parsed: Speed(max(parsed.length), parsed.rows),
}
"""Constructors of the measures from the arguments; `kvpass.apps.cli.MEASURES` has the names."""


def main(parsed: argparse.Namespace) -> None:
    """Measure what the arguments name.

    Raises:
        KVPassError: see `kvpass.apps.evaluation.run.main`.
    """
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    run.main(settings(parsed))


def settings(parsed: argparse.Namespace) -> EvaluationSettings:
    return EvaluationSettings(
        measures=tuple(MEASURE_FACTORIES[name](parsed) for name in dict.fromkeys(parsed.measure)),
        policies=tuple(dict.fromkeys(parsed.policy)),
        budgets=tuple(dict.fromkeys(parsed.bytes or parsed.budget)),
        of_bytes=parsed.bytes is not None,
        prefill=parsed.prefill,
        chunk=parsed.chunk,
        model=parsed.model,
        device=parsed.device,
        dtype=parsed.dtype,
        texts=tuple(parsed.text),
        kv_dtype=parsed.kv_dtype,
        inner=parsed.inner,
        out=parsed.out,
    )
