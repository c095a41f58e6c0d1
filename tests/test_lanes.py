"""Test which functions `make test` leaves out."""

from __future__ import annotations

from pathlib import Path

from tests import lanes

ROOT = Path(__file__).parents[1]
REPORT = """\
============================= slowest durations ==============================
3.00s setup    tests/test_a.py::test_long[x]
2.00s call     tests/test_a.py::test_long[x]
1.00s call     tests/test_a.py::test_long[y]
9.00s call     tests/test_a.py::test_longest
1.00s call     tests/test_a.py::test_short[an id with spaces]
5.00s call     tests/test_b.py::test_alone
11.00s call     tests/test_c.py::test_alone
5160 passed in 480.00s
"""


def test_the_shortest_function_of_a_file_stays_unless_it_takes_too_long() -> None:
    alone, long, longest = "tests/test_c.py::test_alone", "tests/test_a.py::test_long", "tests/test_a.py::test_longest"
    assert lanes.choose(REPORT.splitlines(), 2.4) == [long, longest, alone]
    assert lanes.choose(REPORT.splitlines(), 2.6) == [longest, alone]


def test_listed_functions_exist() -> None:
    listed = [name.split("::") for name in lanes.longer_tests()]
    assert not [(file, function) for file, function in listed if f"def {function}(" not in (ROOT / file).read_text()]
    assert {file for file, _ in listed} <= {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
