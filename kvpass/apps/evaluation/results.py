"""Store results in `results.json`, from which an interrupted run continues."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from kvpass.apps.evaluation.session import Row
from kvpass.errors import KVPassError

FILE = "results.json"


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one case.

    Attributes:
        key: see `Case.key`.
        rows: what was measured; empty if there is an error.
        columns: the rows as one line of a table.
        error: why kvpass refused; None if it did not.
    """

    key: dict[str, Any]
    rows: list[Row]
    columns: Row
    error: str | None = None

    @property
    def label(self) -> str:
        """Policy and budget, for a legend."""
        budget = self.key["budget"]
        return self.key["policy"] if budget is None else f"{self.key['policy']} {budget}"


class Results:
    """All results in a folder; every addition is written at once."""

    def __init__(self, folder: Path) -> None:
        """Read or make a folder.

        Raises:
            KVPassError: the folder or its file cannot be read or made.
        """
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else []
            self.all = [Result(**each) for each in found]
        except (OSError, TypeError, ValueError) as error:
            raise KVPassError(f"cannot go on with the results in {folder}: {error}; choose another --out") from error

    def of(self, key: dict[str, Any]) -> Result | None:
        """Return the result of a case; None if there is none, or a refusal, which a later version may lift."""
        return next((result for result in self.all if result.key == key and result.error is None), None)

    def add(self, result: Result) -> None:
        """Add a result, or replace that of the same case; a run that is killed here leaves the old file."""
        self.all = [*(each for each in self.all if each.key != result.key), result]
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([dataclasses.asdict(each) for each in self.all], indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)
