"""Choose the tests that `make test` leaves to `make slow`, from the durations of a run.

    python -m pytest -m "not slow" --durations=0 --durations-min=0 -q | python -m tests.lanes

A test function is longer if its cases take more than `LIMIT` seconds on average.  What fixtures of a file take is
divided among its functions.  The shortest function of a file stays, unless it takes more than `MOST` seconds.
"""

from __future__ import annotations

import collections
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

LIMIT, MOST = 1.5, 10.0
FILE = Path(__file__).parent / "longer.txt"
_DURATION = re.compile(r"([\d.]+)s (setup|call|teardown)\s+((\S+?)::\w+)(\[.*)?$")
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
    fixtures: dict[str, float] = collections.defaultdict(float)
    functions: dict[str, set[str]] = collections.defaultdict(set)
    for found in filter(None, map(_DURATION.match, durations)):
        seconds, phase, function, file, case = found.groups()
        cases[function][case or ""] += 0 if phase == "setup" else float(seconds)
        fixtures[file] += float(seconds) if phase == "setup" else 0
        functions[file].add(function)
    longer: list[str] = []
    for file, group in functions.items():
        shared = fixtures[file] / len(group)
        takes = {function: statistics.mean(cases[function].values()) + shared for function in group}
        shortest = min(group, key=takes.__getitem__)
        longer += [each for each in group if takes[each] > (MOST if each == shortest else limit)]
    return sorted(longer)


if __name__ == "__main__":
    FILE.write_text("\n".join([_HEAD + "#", *choose(sys.stdin)]) + "\n", encoding="utf-8")
