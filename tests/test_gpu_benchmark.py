"""The GPU benchmark on a CPU: that it runs, checks before it measures, and stops when something is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import checks, layer
from benchmarks.gpu.bench import Bench, Row, table


@pytest.fixture
def rehearsal() -> Bench:
    return Bench(torch.device("cpu"), True, 2, time.monotonic() + 60)


def test_kernels_are_checked_against_double_precision(rehearsal: Bench) -> None:
    rows = [*checks.attention(rehearsal), *checks.prompt_scores(rehearsal), *checks.repairs(rehearsal)]
    assert len(rows) == 15
    assert all(row.met for row in rows)
    assert 0 < max(row.value for row in rows) < 1e-4  # float32 here, and something was compared


def test_figures_come_with_their_targets(rehearsal: Bench) -> None:
    rows = list(layer.prompt_scores(rehearsal))
    assert [row.target for row in rows] == ["", "<= 1.35", "<= 1.35", ""]
    assert len(list(table(rows))) == 6


def test_a_wrong_result_stops_it(rehearsal: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(bench: Bench) -> Iterator[Row]:
        yield checks._row("made up", 1.0)

    def never(bench: Bench) -> Any:
        raise AssertionError

    monkeypatch.setattr(script, "CHECKS", (wrong,))
    monkeypatch.setattr(script, "FIGURES", (never,))
    assert script._run(rehearsal, tmp_path) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["rows"][0]["met"] is False
    assert report["rehearsal"]


def test_what_there_is_no_time_for_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Bench(torch.device("cpu"), True, 2, time.monotonic() - 1)
    monkeypatch.setattr(script, "CHECKS", ())
    assert script._run(late, tmp_path) == 0
    assert late.left_out == [figure.__name__ for figure in script.FIGURES]


def test_it_wants_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            script.main([])


@pytest.mark.slow
def test_a_rehearsal_runs_to_the_end(tmp_path: Path) -> None:
    assert script.main(["--rehearse", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["left_out"] == []
    assert {row["section"] for row in report["rows"]} >= {"correctness", "copy", "one row", "tokens a second"}
