"""Run the GPU benchmark on a CPU: it checks before it measures, and stops at errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import checks, layer, roofline
from benchmarks.gpu.bench import Bench, Row, predicted, table
from tests.gpu.listing import Counts, Instruction


@pytest.fixture
def rehearsal() -> Bench:
    return Bench(torch.device("cpu"), True, 2, time.monotonic() + 60)


def test_kernels_are_checked_against_double_precision(rehearsal: Bench) -> None:
    rows = [*checks.attention(rehearsal), *checks.prompt_scores(rehearsal), *checks.repairs(rehearsal)]
    assert len(rows) == 15
    assert all(row.met for row in rows)
    assert 0 < max(row.value for row in rows) < 1e-4  # float32 here; above zero, because something was compared


def test_figures_come_with_their_targets(rehearsal: Bench) -> None:
    rows = list(layer.prompt_scores(rehearsal))
    assert [row.target for row in rows] == ["", "<= 1.35", "", "<= 1.35", "", "", ""]
    assert len(list(table(rows))) == 2 + 7


def test_a_wrong_result_stops_the_benchmark(rehearsal: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_figures_left_out_for_time_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Bench(torch.device("cpu"), True, 2, time.monotonic() - 1)
    monkeypatch.setattr(script, "CHECKS", ())
    assert script._run(late, tmp_path) == 0
    assert late.left_out == [figure.__name__ for figure in script.FIGURES]


def test_predictions_stand_beside_what_was_measured(
    rehearsal: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(bench: Bench) -> Iterator[Row]:
        yield Row("attend, of copy", "batch 8, 4096 slots", 0.5, "")
        yield Row("attend, of copy", "a case that nobody thought of", 0.5, "")

    monkeypatch.setattr(script, "CHECKS", ())
    monkeypatch.setattr(script, "FIGURES", (measured,))
    monkeypatch.setattr(script, "_device", lambda bench: "NVIDIA H100 80GB HBM3")
    assert script._run(rehearsal, tmp_path) == 0
    first, second = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert 0.5 < first["predicted"] < 1
    assert second["predicted"] is None


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_every_case_of_attention_is_predicted(device: str) -> None:
    known = predicted(device)
    assert all(0 < known["attend, of copy", case.name] < 1 for case in layer.cases())
    assert known["prompt", "sums"] > 0
    assert predicted("a GPU that nobody thought of") == {}


def work(programs: int, times: dict[str, float], **given: Any) -> roofline.Work:
    counts = Counts({Instruction(name): often for name, often in times.items()})
    figures: dict[str, Any] = dict(warps=4, resident=2, memory=0, cache=0, waits=0)
    return roofline.Work(programs, counts=counts, **{**figures, **given})


def test_a_launch_takes_what_its_slowest_part_takes() -> None:
    gpu = roofline.Gpu("made up", memory=1e12, cache=1e13, processors=10, clock=1e9)
    read = roofline.seconds(gpu, work(20, {"NOP": 1}, memory=1e9))
    assert read.bound == "memory"
    assert read.total == pytest.approx(roofline.LAUNCH + 1e-3 / roofline.REACHED)
    issued = roofline.seconds(gpu, work(20, {"NOP": 1e6}, resident=8))
    assert issued.bound == "latency"  # two programs for each multiprocessor leave its schedulers idle
    filled = roofline.seconds(gpu, work(80, {"NOP": 1e6}, resident=8))
    assert filled.bound == "issue"
    assert filled.total == pytest.approx(roofline.LAUNCH + 8 * 1e-3)
    again = roofline.seconds(gpu, work(90, {"NOP": 1e6}, resident=8))  # another wave of ten programs
    assert again.total == pytest.approx(filled.total + roofline.ALONE * 1e-3)


def test_special_functions_and_tensor_cores_have_pipes_of_their_own() -> None:
    gpu = roofline.GPUS[0]
    counts = Counts({Instruction("MUFU.EX2"): 4, Instruction("HGMMA.64x64x16.F32.BF16"): 8})
    busy = roofline.cycles(gpu, counts, 4)
    assert busy["functions"] == 32
    assert busy["tensor cores"] == 8 * 2 * 64 * 64 * 16 / gpu.tensor
    halves = roofline.cycles(gpu, Counts({Instruction("HMMA.1688.F32.TF32"): 1}), 1)
    assert halves["tensor cores"] == pytest.approx(2 * 2 * 16 * 8 * 8 / gpu.tensor / gpu.warp_tensor)


def test_the_benchmark_ends_without_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            script.main([])


@pytest.mark.slow
def test_a_rehearsal_runs_to_the_end(tmp_path: Path) -> None:
    assert script.main(["--rehearse", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["left_out"] == []
    assert {row["section"] for row in report["rows"]} >= {"correctness", "copy", "one row", "tokens a second"}
