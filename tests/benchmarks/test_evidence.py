"""Test the comparison at equal bytes: its jobs, its tables, and the digest of the books."""

from __future__ import annotations

import itertools
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import books, evidence
from kvpass import policies
from kvpass.apps import cli
from kvpass.apps.evaluation.run import settings_of


@pytest.fixture
def no_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "paths", lambda: [Path(name) for name in books.NAMES])


@pytest.mark.usefixtures("no_books")
def test_every_policy_has_a_job_that_the_command_line_takes(tmp_path: Path) -> None:
    jobs = evidence.jobs(tmp_path)
    kinds = itertools.product(evidence.FORMATS, ("", *evidence.QUESTIONS))
    for kv_dtype, question in (kind for kind in kinds if kind[0] is None or not kind[1]):
        of_kind = [job for job in jobs if (job.kv_dtype, job.question) == (kv_dtype, question)]
        names = [text.partition(":")[0] for job in of_kind for text in job.policies]
        assert sorted([*names, "kv_align"]) == sorted(policies.names())
    assert len(jobs) == evidence.GROUPS * (len(evidence.FORMATS) + len(evidence.QUESTIONS))
    assert len({job.folder(tmp_path) for job in jobs}) == len(jobs)
    for job in jobs:
        found = settings_of(cli.parser().parse_args(job.arguments(tmp_path, quick=False)))
        assert found.of_bytes
        assert found.kv_dtype == job.kv_dtype
        assert found.budgets == ((0.25,) if job.question else evidence.SHARES)


def row(policy: str, share: float | None, kl: float, **more: Any) -> dict[str, Any]:
    columns = {evidence.KL: kl, evidence.SAME: 1 - kl, "perplexity": 22.0, "full perplexity": 20.0, "slots": 9}
    return {"policy": policy, "kv_dtype": "bfloat16", "measure": "agreement", "share": share, **columns, **more}


def test_tables_have_a_line_for_each_policy() -> None:
    rows = [
        row("full", None, 0.0, **{"KL, before": 0.001, "same, before": 0.99}),
        row("h2o", 0.5, 0.1),
        row("h2o", 0.25, 0.2),
        row("d2o", 0.5, 0.3),
    ]
    answers = {"measure": "ruler", "kv_dtype": "bfloat16", "policy": "h2o", "share": 0.25}
    rows += [{**answers, "question": "after", "single": 0.5}, {**answers, "question": "inside", "error": "why"}]
    rows += [row("knorm", 0.25, 0.0, error="no budget of 'knorm' takes at most that")]
    compared, sizes, asked = evidence.tables(rows)
    assert [line["policy"] for line in compared.rows] == ["full", "h2o", "d2o", "knorm"]
    full, h2o, _, knorm = compared.rows
    assert [full[f"KL, {share} %"] for share in ("50", "25", "12.5", "6.25")] == [0.001] * 4
    assert (h2o["KL, 50 %"], h2o["KL, 25 %"], h2o["KL, 6.25 %"]) == (0.1, 0.2, None)
    assert (knorm["KL, 25 %"], knorm["KL, 50 %"]) == ("no budget", None)
    assert sizes.rows[1]["perplexity / full, 50 %"] == pytest.approx(1.1)
    assert sizes.rows[1]["slots, 50 %"] == 9
    assert (asked.rows[0]["single, after"], asked.rows[0]["single, inside"]) == (0.5, "why")
    assert set(evidence.figures(rows)) == {"evidence"}


def test_a_budget_that_holds_the_whole_text_agrees_as_before_an_eviction() -> None:
    """Check int4, where half of the bytes are more slots than the text has tokens."""
    row = {"policy": "h2o", "kv_dtype": "int4", "measure": "agreement", "question": "", "share": 0.5, "slots": 2519}
    compared, sizes = evidence.tables([{**row, "KL, before": 0.02, "same, before": 0.9}])
    assert compared.rows[0]["KL, 50 %"] == 0.02
    assert sizes.rows[0]["slots, 50 %"] == 2519


def test_books_of_other_content_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> Any:
        with tarfile.open(Path(command[-1]) / f"{books.PACKAGE}-{books.VERSION}.tar.gz", "w:gz") as archive:
            archive.add(__file__, "other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(RuntimeError, match="has the digest .* not " + books.SHA256):
        books.paths()
    assert not list(tmp_path.rglob("*.txt"))
