"""Define settings, cases and results of `kvpass eval`; an interrupted run continues from `results.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpass import policies, tensor_files
from kvpass.apps.evaluation.full_cache import FullCache
from kvpass.apps.evaluation.scoring import Feed
from kvpass.apps.evaluation.session import Measure, Row
from kvpass.errors import KVPassError
from kvpass.lowering.formats import KVDtype
from kvpass.policies import Policy
from kvpass.user_budget import Budget

FILE = "results.json"
MAX_PREALLOCATED_SLOTS = 16_384
"""The most slots that are made before they are needed, which saves compiling each time they double."""


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation: every measure runs under every policy and budget.

    Attributes:
        policies: names, optionally with options, as `kvpass.policies.parse` reads them.
        budgets: tokens kept, or shares of the prompt, or of the bytes of a full cache.
        of_bytes: whether budgets are shares of the bytes that a full cache of a measure's tokens has.
        model: name or path for transformers; None is the bundled model.
        texts: UTF-8 files; without any, see `kvpass.apps.corpus.texts_of`.
    """

    measures: tuple[Measure, ...]
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    of_bytes: bool = False
    prefill: Feed = "token"
    chunk: int = 512
    model: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    texts: tuple[Path, ...] = ()
    kv_dtype: KVDtype | None = None
    inner: str = "inductor"
    out: Path = Path("out/eval")

    @property
    def chunked(self) -> int | None:
        """Tokens that are fed together; None for whole prompts."""
        return {"whole": None, "chunk": self.chunk, "token": 1}[self.prefill]


@dataclasses.dataclass(frozen=True)
class Case:
    """One measure under one policy and budget, which is None for a policy that evicts nothing."""

    measure: Measure
    policy: str
    budget: Budget
    kv_dtype: KVDtype | None = None
    of_bytes: bool = False

    def slots(self, policy: Policy, full: FullCache | None) -> Budget:
        """Return the nearest budget that the policy can have; for one that evicts nothing, free slots or None."""
        if self.budget is None:
            return self.measure.needed_slots if self.measure.needed_slots <= MAX_PREALLOCATED_SLOTS else None
        if self.of_bytes:
            assert full is not None
            return full.budget(self.budget, self.measure.needed_slots, policy, self.kv_dtype)
        return policy.fitting_budget(self.budget) if isinstance(self.budget, int) else self.budget

    def key(self, settings: EvaluationSettings, inputs: str) -> dict[str, Any]:
        """Return everything except the machine that a result depends on, with a digest of the model and the texts."""
        names = ("prefill", "model", "device", "dtype", "kv_dtype", "inner")
        shared = {name: getattr(settings, name) for name in names}
        fields: dict[str, Any] = dataclasses.asdict(self.measure)  # type: ignore[call-overload]
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        case = {"measure": self.measure.name, "policy": self.policy, "budget": self.budget}
        case |= {"of": "bytes"} if self.of_bytes else {}
        case |= {"options": policies.to_json(policies.parse(self.policy))}  # with digests of files that it names
        return {**case, **shared, "chunk": settings.chunked, "inputs": inputs, "settings": fields}


def cases(settings: EvaluationSettings) -> Iterator[Case]:
    """Yield all cases, budget by budget, because measures of one policy and budget share compiled code.

    A policy that evicts nothing has one case for all budgets.
    """
    evicting = {text: policies.parse(text).evicts for text in settings.policies}
    for policy, evicts in evicting.items():
        for budget in settings.budgets if evicts else (None,):
            for measure in settings.measures:
                yield Case(measure, policy, budget, settings.kv_dtype, settings.of_bytes and evicts)


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one case: the measured rows, or why kvpass refused."""

    key: dict[str, Any]  # see `Case.key`
    rows: list[Row]
    columns: Row  # the rows as one line of a table
    error: str | None = None

    @property
    def label(self) -> str:
        """Policy and budget, for a legend."""
        budget = self.key["budget"]
        return self.key["policy"] if budget is None else f"{self.key['policy']} {budget}"


class Results:
    """All results in a folder; every addition is written immediately."""

    def __init__(self, folder: Path) -> None:
        """Read or make a folder; KVPassError if neither works, or if it takes no results."""
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVPassError(f"cannot write results to the folder {folder}: {error}; choose another --out") from error
        for path in (self.path, self.path.with_suffix(".md")):
            tensor_files.check_writable(path, KVPassError)
        self.entries = self._stored()

    def of(self, key: dict[str, Any]) -> Result | None:
        """Return the result of a case; None if there is none, or a refusal, which a later version may lift."""
        return next((result for result in self.entries if result.key == key and result.error is None), None)

    def add(self, result: Result) -> None:
        """Add a result to the file, or replace the same case's.

        Results that another run has added meanwhile stay.  A run that is killed here leaves the old file.

        Raises:
            KVPassError: the file cannot be written.
        """
        with tensor_files.locked(self.path.parent):
            self.entries = [*(entry for entry in self._stored() if entry.key != result.key), result]
            text = json.dumps([dataclasses.asdict(entry) for entry in self.entries], indent=1) + "\n"
            remedy = "; free space there, and run the command again: it continues after the last complete result"
            tensor_files.write_text(self.path, text, KVPassError, remedy)

    def _stored(self) -> list[Result]:
        """Return the results in the file, or raise KVPassError if it has something else."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else []
            return [Result(**entry) for entry in stored]
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise KVPassError(f"cannot continue with {self.path}: {error}; choose another --out") from error
