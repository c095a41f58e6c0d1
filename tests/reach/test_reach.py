"""Compare every row with its verdict on the page, if the package that it needs is installed."""

from __future__ import annotations

import pytest

from tests.reach.__main__ import PAGE, page, read
from tests.reach.check import Verdict, examine
from tests.reach.rows import ROWS, Row


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_what_the_page_says(row: Row) -> None:
    if row.missing:
        pytest.skip(f"{row.missing} is not installed: see constraints-reach.txt")
    verdict = examine(row)
    assert verdict.acceptable, verdict
    assert verdict.word == read(PAGE.read_text())[row.name].word, verdict


def test_the_page_has_every_row_and_no_defects() -> None:
    verdicts = read(PAGE.read_text())
    assert [(verdict.group, verdict.name) for verdict in verdicts.values()] == [(row.group, row.name) for row in ROWS]
    assert all(verdict.acceptable for verdict in verdicts.values())
    assert all(verdict.reason for verdict in verdicts.values() if verdict.word != "works")


def test_a_page_is_read_as_it_was_written() -> None:
    made = [
        Verdict("A", "one", "works", 2),
        Verdict("A", "two", "refused", 1, "why"),
        Verdict("B", "three", "works", 2),
    ]
    assert list(read(page(made)).values()) == made


def test_a_row_whose_package_is_not_there_says_so() -> None:
    assert Row("", "", package="no_such_package.part").missing == "no_such_package.part"
    assert Row("", "", package="torch").missing is None
