"""Test studies of the papers' tables: command lines, tables of results, and their sections on the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks import books, papers
from benchmarks.report import PAGES
from kvpass import policies
from kvpass.apps import cli
from kvpass.apps.evaluation.run import settings_of
from kvpass.apps.evaluation.settings import Result, Results

PAGE = next(page for page in PAGES if page.name == "papers.md")


@pytest.mark.parametrize("study", papers.STUDIES, ids=lambda study: study.name)
def test_a_study_is_one_of_the_command_line_with_budgets_that_its_policies_have(
    study: papers.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "paths", lambda: [Path(name) for name in books.NAMES])
    found = settings_of(cli.parser().parse_args(study.arguments(tmp_path, quick=False)))
    assert found.policies == study.policies
    for text in study.policies:
        policy = policies.parse(text)
        for budget in found.budgets if policy.evicts else ():
            assert policy.fitting_budget(int(budget)) == budget


def test_names_of_studies_differ_and_each_paper_has_its_block_on_the_page() -> None:
    assert len({study.name for study in papers.STUDIES}) == len(papers.STUDIES)
    for study in papers.STUDIES:
        assert f"<!-- papers {study.paper} -->" in PAGE.read_text(encoding="utf-8")


def result(policy: str, budget: int | None, error: str | None = None, **columns: Any) -> Result:
    return Result({"policy": policy, "budget": budget}, [], columns, error)


def test_a_table_has_a_line_for_each_policy_and_a_column_for_each_budget(tmp_path: Path) -> None:
    study = next(study for study in papers.STUDIES if study.name == "buzz-slots")
    results = Results(study.folder(tmp_path))
    for each in (
        result("full", None, perplexity=7.0),
        result("buzz", 50, perplexity=9.0),
        result("buzz", 100, perplexity=8.0),
        result("window", 50, error="refused"),
    ):
        results.add(each)
    rows = papers.rows_in(tmp_path)
    (table,) = papers.tables(rows)
    assert table.caption == study.caption
    assert table.rows == [
        {"policy": "full", "perplexity, 50 slots": 7.0, "perplexity, 100 slots": 7.0},
        {"policy": "buzz", "perplexity, 50 slots": 9.0, "perplexity, 100 slots": 8.0},
        {"policy": "window", "perplexity, 50 slots": "refused"},
    ]
    assert papers.blocks(rows) == {"papers buzz": [table]}


def test_one_budget_needs_no_name() -> None:
    study = dataclasses.replace(papers.STUDIES[0], budgets=(9,), columns={"says": "accuracy"})
    assert study.table([result("h2o", 9, accuracy=0.5)]).rows == [{"policy": "h2o", "says": 0.5}]
