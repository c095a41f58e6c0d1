from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import quality
from benchmarks.quality import Case, Settings
from kvpass import policies


def settings(out: Path, **changes) -> Settings:
    chosen = dict(policies=("full", "h2o"), budgets=(8, 16), prompts=(2,), documents=1, length=32, inner="eager")
    return Settings(**{**chosen, **changes}, out=out)


def row(policy: str, budget: int | None, perplexity: float, prompt: int = 2) -> quality.Row:
    return {"policy": policy, "prompt": prompt, "budget": budget, "perplexity": perplexity}


ROWS = [row("h2o", 8, 20.0), row("h2o", 16, 15.0), row("full", None, 12.345)]


def test_every_policy_has_an_expectation():
    assert sorted({*quality.EXPECTED, *quality.LEFT_OUT}) == sorted({*policies.names(), *quality.LEFT_OUT})


def test_a_policy_that_evicts_nothing_is_measured_once(tmp_path):
    found = list(quality.cases(settings(tmp_path)))
    assert found == [Case("full", 2, None), Case("h2o", 2, 8), Case("h2o", 2, 16)]


def test_the_table_has_a_column_for_each_budget_and_full_first():
    lines = quality.table([*ROWS, row("h2o", 8, 99.0, prompt=4)], 2).splitlines()
    assert lines[0] == "| policy | 8 | 16 | expected from the papers |"
    assert [line.split(" | ")[:3] for line in lines[2:]] == [["| full", "12.35", "12.35"], ["| h2o", "20.00", "15.00"]]


def test_rows_of_the_same_run_are_not_measured_again(tmp_path):
    quality.write(settings(tmp_path), ROWS)
    assert quality.written(settings(tmp_path)) == ROWS
    assert quality.written(settings(tmp_path, length=64)) == []


def test_the_plot_has_a_line_for_each_policy_but_full():
    (axes,) = quality.figure(ROWS).axes
    assert [line.get_label() for line in axes.get_lines()][:1] == ["h2o"]
