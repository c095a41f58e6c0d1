"""Run `kvpass eval`: read its arguments, and run every measure under every policy and budget, each once."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from tqdm import tqdm

from kvpass import policies
from kvpass.apps import corpus
from kvpass.apps.evaluation import report
from kvpass.apps.evaluation.agreement import AgreementMeasure
from kvpass.apps.evaluation.full_cache import FullCache
from kvpass.apps.evaluation.perplexity import Perplexity, StreamMeasure
from kvpass.apps.evaluation.recall import RecallMeasure
from kvpass.apps.evaluation.retrieval import Needle, Passkey
from kvpass.apps.evaluation.ruler import RulerMeasure
from kvpass.apps.evaluation.scoring import FullPredictions
from kvpass.apps.evaluation.session import Measure, Row, Session, unless_refused
from kvpass.apps.evaluation.settings import Case, EvaluationSettings, Result, Results, cases
from kvpass.apps.evaluation.speed import Speed
from kvpass.apps.models import LoadedModel, load
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.model_call import ModelCall
from kvpass.errors import KVPassError
from kvpass.policies import Policy
from kvpass.runtime.model_identity import settings_of as model_settings
from kvpass.runtime.model_identity import weight_digest
from kvpass.user_budget import Budget

Tick = Callable[[int], object]
MEASURE_FACTORIES: dict[str, Callable[[argparse.Namespace], Measure]] = {
    "perplexity": lambda parsed: Perplexity(parsed.tokens, parsed.rows),
    "stream": lambda parsed: StreamMeasure(parsed.tokens, parsed.restart),
    "agreement": lambda parsed: AgreementMeasure(parsed.documents, parsed.tokens, parsed.rows, seed=parsed.seed),
    "passkey": lambda parsed: Passkey(*_retrieval_settings(parsed)),
    "needle": lambda parsed: Needle(*_retrieval_settings(parsed)),
    "ruler": lambda parsed: RulerMeasure(
        tuple(parsed.task), tuple(parsed.length), parsed.trials, parsed.question == "after", parsed.seed
    ),
    "recall": lambda parsed: RecallMeasure(tuple(parsed.distance), parsed.trials, parsed.seed),
    "speed": lambda parsed: Speed(max(parsed.length), parsed.rows),
}
"""Constructors of the measures from the arguments; `kvpass.apps.cli.MEASURES` has the names."""
WITHOUT_ROWS = ("stream", "ruler", "recall")
"""Measures that do not read `--rows`: a stream is one row, ruler has one prompt at a time, recall one batch."""


def _retrieval_settings(parsed: argparse.Namespace) -> tuple[Any, ...]:
    return tuple(parsed.length), tuple(parsed.depth), parsed.trials, parsed.rows, parsed.seed


def settings_of(parsed: argparse.Namespace) -> EvaluationSettings:
    """Return the settings that the arguments describe.

    Raises:
        KVPassError: several rows for a measure that does not read them.
    """
    alone = ", ".join(name for name in dict.fromkeys(parsed.measure) if name in WITHOUT_ROWS)
    if parsed.rows > 1 and alone:
        raise KVPassError(
            f"--rows {parsed.rows}: has no effect on {alone}; leave it out, in a separate run with the same --out"
        )
    names = ("prefill", "chunk", "model", "device", "dtype", "kv_dtype", "inner", "out")
    return EvaluationSettings(
        measures=tuple(MEASURE_FACTORIES[name](parsed) for name in dict.fromkeys(parsed.measure)),
        policies=tuple(dict.fromkeys(parsed.policy)),
        budgets=tuple(dict.fromkeys(parsed.bytes or parsed.budget)),
        of_bytes=parsed.bytes is not None,
        texts=tuple(parsed.text),
        **{name: getattr(parsed, name) for name in names},
    )


def main(parsed: argparse.Namespace) -> None:
    """Measure the cases that the folder does not have yet, write the results, and print the tables.

    Raises:
        KVPassError: an invalid policy, a model, text or folder that cannot be read, or no case that could be measured.
    """
    settings = settings_of(parsed)
    all_cases = list(cases(settings))
    results = Results(settings.out)
    texts = corpus.texts_of(settings.texts, settings.model is None)
    loaded = load(settings.model, settings.dtype, settings.device)
    encoded = dict(zip(texts, loaded.encode(list(texts.values())), strict=True))
    digest = digest_of(loaded.model, list(encoded.values()))
    keys = [case.key(settings, digest) for case in all_cases]
    todo = [case for case, key in zip(all_cases, keys, strict=True) if results.of(key) is None]
    for result in _Runner(settings, loaded, encoded).results(todo, digest):
        results.add(result)
    reported = [result for key in keys for result in results.entries if result.key == key]
    print(report.write(settings.out, settings.measures, reported), end="")
    if all(result.error is not None for result in reported):
        raise KVPassError(f"nothing was measured, because every case is refused; the first one: {reported[0].error}")


def digest_of(model: torch.nn.Module, texts: Sequence[Sequence[int]]) -> str:
    """Return a digest of samples of a model's weights, of its configuration, and of texts as token ids.

    Names alone do not identify them: another checkpoint may be at the same path.
    """
    weights = {name: weight_digest(tensor) for name, tensor in model.state_dict().items()}
    described = json.dumps([weights, model_settings(model), texts], default=repr, sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


class _Runner:
    """Measures cases of one model on texts, given as token ids by name."""

    def __init__(self, settings: EvaluationSettings, loaded: LoadedModel, texts: dict[str, list[int]]) -> None:
        self.settings, self.loaded, self.texts = settings, loaded, texts
        self.predictions = FullPredictions(ModelCall.of(loaded.model))

    @cached_property
    def _full_cache(self) -> FullCache:
        return FullCache.of(self.loaded.model)

    def results(self, cases: Sequence[Case], digest: str) -> Iterator[Result]:
        """Yield the result of each case, with one progress bar for cases and one for tokens."""
        with tqdm(total=len(cases), unit="case", dynamic_ncols=True) as bar:
            for (policy, slots), group in groupby(cases, self._policy_and_slots):
                torch.compiler.reset()  # Dynamo allows only a few variants of one function at a time
                loop = unless_refused(partial(self._loop, policy, slots))
                for case in group:
                    key = case.key(self.settings, digest)
                    name = f"{case.measure.name}: {case.policy} {case.budget or ''}".rstrip()
                    with tqdm(unit="token", desc=name, leave=False, dynamic_ncols=True) as tokens:
                        yield self._result(case, key, loop, tokens.update)
                    bar.update()

    def _policy_and_slots(self, case: Case) -> tuple[Policy, Budget | KVPassError]:
        """Return the policy and the slots of a case, which share a loop, or why there are no slots."""
        policy = policies.parse(case.policy)
        full = self._full_cache if case.of_bytes else None
        return policy, unless_refused(partial(case.slots, policy, full))

    def _loop(self, policy: Policy, slots: Budget | KVPassError) -> DecodeLoop:
        if isinstance(slots, KVPassError):
            raise slots
        return DecodeLoop(
            self.loaded.model,
            policy,
            budget=slots,
            kv_dtype=self.settings.kv_dtype,
            inner=self.settings.inner,
            prefill_chunk=self.settings.chunked,
        )

    def _result(self, case: Case, key: Row, loop: DecodeLoop | KVPassError, tick: Tick) -> Result:
        if isinstance(loop, KVPassError):
            return Result(key, [], {}, str(loop))
        rows = unless_refused(partial(self._rows, case, loop, tick))
        if isinstance(rows, KVPassError):
            return Result(key, [], {}, str(rows))
        slots = {} if case.budget in (None, loop.backend.budget) else {"slots": loop.backend.budget}
        return Result(key, rows, {**slots, **case.measure.columns(rows)})

    def _rows(self, case: Case, loop: DecodeLoop, tick: Tick) -> list[Row]:
        settings, slots = self.settings, None if case.budget is None else loop.backend.budget
        session = Session(
            self.loaded, loop, self.texts, settings.prefill, settings.chunked, slots, tick, full=self.predictions
        )
        try:
            return list(case.measure.rows(session))
        except (IndexError, RuntimeError) as error:  # of an embedding; not of steps, which kvpass checks itself
            if not (self.loaded.has_position_table and "index out of" in str(error)):
                raise
            raise KVPassError(
                f"{self.loaded.name} has {self.loaded.trained_length} positions, and this measure feeds more tokens; "
                "choose fewer --tokens, or a smaller --length or --distance"
            ) from error
