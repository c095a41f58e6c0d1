"""What has been measured: `results.json`, which an interrupted run goes on with."""

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
    """What came of a case.

    Attributes:
        key: see `Case.key`.
        rows: what was measured; columns: the same as a line of a table; both empty if there is an error.
        error: why kvpass refused.
    """

    key: dict[str, Any]
    rows: list[Row]
    columns: Row
    error: str | None = None

    @property
    def label(self) -> str:
        """Policy and budget."""
        budget = self.key["budget"]
        return self.key["policy"] if budget is None else f"{self.key['policy']} {budget}"


class Results:
    """All that a folder has; every addition is written at once."""

    def __init__(self, folder: Path) -> None:
        """Raises: KVPassError: the folder, or what is in it, cannot be read or made."""
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else []
            self.all = [Result(**each) for each in found]
        except (OSError, TypeError, ValueError) as error:
            raise KVPassError(f"cannot go on with the results in {folder}: {error}") from error

    def of(self, key: dict[str, Any]) -> Result | None:
        """The result of a case; a refusal is tried again, as the next version may do it."""
        return next((result for result in self.all if result.key == key and result.error is None), None)

    def add(self, result: Result) -> None:
        """In the place of an older one of the same case; a run that is killed here leaves the old file."""
        self.all = [*(each for each in self.all if each.key != result.key), result]
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([dataclasses.asdict(each) for each in self.all], indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)
