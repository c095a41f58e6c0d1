"""Choose the tests that `make test` leaves to `make slow`, from the durations of a run.

    python -m pytest -m "not slow" --durations=0 --durations-min=0 -q | python -m tests.lanes

A test function whose cases take more than `LIMIT` seconds on average is longer, unless it is the shortest of its file.
"""

from __future__ import annotations

import collections
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

LIMIT = 2.0
FILE = Path(__file__).parent / "longer.txt"
_DURATION = re.compile(r"([\d.]+)s (?:setup|call|teardown)\s+(\S+?::\w+)(\[.*)?$")
_HEAD = f"""\
# Tests that `make test` leaves out, though they are not marked slow: a case takes more than {LIMIT} seconds on average.
# Written by tests/lanes.py.
"""


def longer_tests() -> frozenset[str]:
    """Return the test functions that are listed, as `tests/file.py::function`."""
    return frozenset(line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


def choose(durations: Iterable[str], limit: float = LIMIT) -> list[str]:
    """Return the longer test functions, sorted, from lines of pytest's report of durations."""
    cases: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for found in filter(None, map(_DURATION.match, durations)):
        seconds, function, case = found.groups()
        cases[function][case or ""] += float(seconds)
    means = {function: statistics.mean(seconds.values()) for function, seconds in cases.items()}
    shortest = {min(group, key=means.__getitem__) for group in _by_file(means).values()}
    return sorted(function for function, mean in means.items() if mean > limit and function not in shortest)


def _by_file(functions: Iterable[str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for function in functions:
        files.setdefault(function.partition("::")[0], []).append(function)
    return files


if __name__ == "__main__":
    FILE.write_text("\n".join([_HEAD + "#", *choose(sys.stdin)]) + "\n", encoding="utf-8")
