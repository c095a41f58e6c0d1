"""Run `kvpass eval`: every measure under every policy and budget, each once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import torch
from tqdm import tqdm

from kvpass import policies
from kvpass.apps import corpus
from kvpass.apps.evaluation import report
from kvpass.apps.evaluation.attempt import unless_refused
from kvpass.apps.evaluation.results import Result, Results
from kvpass.apps.evaluation.session import Row, Session
from kvpass.apps.evaluation.settings import Budget, Case, EvaluationSettings, cases
from kvpass.apps.models import LoadedModel, load
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import KVPassError
from kvpass.policies import Policy
from kvpass.torch_private import dynamo

Tick = Callable[[int], object]


def main(settings: EvaluationSettings) -> None:
    """Measure the cases that the folder does not have yet, write the results, and print the tables.

    Raises:
        KVPassError: an invalid policy, or a model, text or folder that cannot be read.
    """
    chosen = list(cases(settings))
    results = Results(settings.out)
    texts = corpus.texts_of(settings.texts, settings.model is None)
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:16]
    keys = [case.key(settings, digest) for case in chosen]
    todo = [(case, key) for case, key in zip(chosen, keys, strict=True) if results.of(key) is None]
    if todo:
        subject = load(settings.model, _dtype(settings.dtype), settings.device)
        encoded = dict(zip(texts, subject.encode(list(texts.values())), strict=True))
        for case, rows in _measured(settings, subject, encoded, [case for case, _ in todo]):
            results.add(_result(case, case.key(settings, digest), rows))
    found = [result for key in keys for result in results.all if result.key == key]
    print(report.write(settings.out, settings.measures, found), end="")


def _dtype(name: str) -> torch.dtype | str:
    known: torch.dtype | str = name if name == "auto" else getattr(torch, name)
    return known


def _measured(
    settings: EvaluationSettings, subject: LoadedModel, texts: dict[str, list[int]], todo: list[Case]
) -> Iterator[tuple[Case, list[Row] | KVPassError]]:
    """Yield each case with its rows or its refusal, with one progress bar for cases and one for tokens."""
    with tqdm(total=len(todo), unit="case", dynamic_ncols=True) as bar:
        for (policy, slots), group in groupby(todo, _held):
            dynamo.forget_compiled_code()
            loop = unless_refused(partial(_loop, settings, subject, policy, slots))
            for case in group:
                name = f"{case.measure.name}: {case.policy} {case.budget or ''}".rstrip()
                with tqdm(unit="token", desc=name, leave=False, dynamic_ncols=True) as tokens:
                    yield case, _rows(settings, subject, texts, case, loop, tokens.update)
                bar.update()


def _held(case: Case) -> tuple[Policy, Budget | None]:
    """Return the policy and the slots of a case, which share a loop."""
    policy = policies.parse(case.policy)
    return policy, case.slots(policy)


def _loop(settings: EvaluationSettings, subject: LoadedModel, policy: Policy, slots: Budget | None) -> DecodeLoop:
    return DecodeLoop(
        subject.model,
        policy,
        budget=slots,
        kv_dtype=settings.kv_dtype,
        inner=settings.inner,
        prefill_chunk=settings.chunked,
    )


def _rows(
    settings: EvaluationSettings,
    subject: LoadedModel,
    texts: dict[str, list[int]],
    case: Case,
    loop: DecodeLoop | KVPassError,
    tick: Tick,
) -> list[Row] | KVPassError:
    if isinstance(loop, KVPassError):
        return loop
    budget = case.slots(policies.parse(case.policy)) if case.budget is not None else None
    session = Session(subject, loop, texts, settings.prefill, settings.chunked, budget, tick)
    return unless_refused(lambda: list(case.measure.rows(session)))


def _result(case: Case, key: Row, rows: list[Row] | KVPassError) -> Result:
    if isinstance(rows, KVPassError):
        return Result(key, [], {}, str(rows))
    return Result(key, rows, case.measure.columns(rows))
