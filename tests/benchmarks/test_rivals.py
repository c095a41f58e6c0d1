"""Test the comparison with rivals on an engine that counts: the protocol, turns, failures and tables."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from benchmarks import apart, environments
from benchmarks.environments import Unavailable
from benchmarks.rivals import compare, contenders, tables
from benchmarks.rivals.compare import Limits, OutOfTime
from benchmarks.rivals.contenders import REFERENCE, UNCOMPILED, Contender
from benchmarks.rivals.engine import Setup
from benchmarks.worker import Worker

FAKE = "tests.benchmarks.fake_engine:Counting"
FULL, BOUNDED = Contender(UNCOMPILED, FAKE), Contender(REFERENCE, FAKE, budget=50)


def started(weights: str = "", budget: int | None = None, log: Path | None = None) -> Worker:
    setup = json.dumps(dataclasses.asdict(Setup(weights, "bfloat16", 1, budget)))
    command = [sys.executable, "-m", "benchmarks.rivals.engine", FAKE, setup]
    return Worker(command, apart.surroundings(1), log)


def start(contender: Contender, variables: dict[str, str]) -> Worker:
    """Start a fake engine; the package of a contender names its weights."""
    return started(contender.package or "", contender.budget)


def limits(*lengths: int, left: float = 60.0) -> Limits:
    return Limits(lengths, rounds=2, until=time.monotonic() + left)


def silent(*_: object) -> None: ...


def test_a_worker_answers_prompts_and_steps():
    with started() as worker:
        prompt = worker.ask(ids=[[5] * 7, [5] * 7], room=4)
        assert prompt["tokens"] == [7, 7]
        assert prompt["seconds"] > 0
        assert prompt["resident"] > 0
        assert prompt["MiB"] >= 0
        stepped = worker.ask(steps=3, skipped=2)
        assert stepped["tokens"] == [[10, 11, 12]] * 2
        assert 0.001 <= stepped["seconds"] < 0.1
    assert worker.process.returncode == 0


def test_a_worker_reports_an_error_and_goes_on():
    with started("short") as worker:
        with pytest.raises(Unavailable, match="ValueError: a prompt of 990 tokens is too long"):
            worker.ask(ids=[[5] * 990], room=20)
        assert worker.ask(ids=[[5]], room=4)["tokens"] == [1]


def test_an_engine_that_does_not_load_says_why():
    with started("missing") as worker, pytest.raises(Unavailable, match="FileNotFoundError: no such weights"):
        worker.ask(steps=1)


def test_a_worker_that_dies_reports_its_last_output(tmp_path: Path):
    log = tmp_path / "log.txt"
    command, reason = (
        [sys.executable, "-m", "tests.nothing", "{}"],
        "ended with code 1, .*No module named tests.nothing",
    )
    with Worker(command, apart.surroundings(1), log) as worker, pytest.raises(Unavailable, match=reason):
        worker.ask(steps=1)


def test_steps_have_a_row_for_each_contender_and_length():
    rows = [*compare.steps([FULL, BOUNDED], start, 2, limits(300, 400), silent, silent)]
    assert [(row["contender"], row["seen"]) for row in rows] == [
        (UNCOMPILED, 300), (REFERENCE, 300), (UNCOMPILED, 400), (REFERENCE, 400)
    ]  # fmt: skip
    assert all(len(row["steps"]) == 2 for row in rows)
    assert all(len(row["prompts"]) == 1 for row in rows)
    assert all(1 <= row["ms"] < 100 for row in rows)


@pytest.mark.parametrize(("weights", "reason"), [("short", "too long"), ("dying", "ended with code 3")])
def test_a_contender_that_fails_is_left_out_and_the_others_go_on(weights: str, reason: str):
    failing = Contender("other", FAKE, package=weights)
    rows = [*compare.steps([failing, BOUNDED], start, 1, limits(300, 900), silent, silent)]
    assert [(row["contender"], row.get("seen")) for row in rows] == [
        ("other", 300), (REFERENCE, 300), (REFERENCE, 900), ("other", None)
    ]  # fmt: skip
    assert reason in rows[-1]["error"]


def test_nothing_begins_when_the_time_is_over():
    with pytest.raises(OutOfTime):
        next(compare.steps([BOUNDED], start, 1, limits(300, left=-1), silent, silent))
    with pytest.raises(OutOfTime):
        next(compare.starts([BOUNDED], start, [5] * 30, limits(left=-1), silent))


def test_starts_are_of_two_processes_and_count_up():
    rows = [*compare.starts([FULL, BOUNDED], start, [5] * 30, limits(), silent)]
    assert [(row["contender"], row["caches"]) for row in rows] == [
        (name, caches) for name in (UNCOMPILED, REFERENCE) for caches in ("cold", "second process")
    ]
    assert all(0 < row["first"] < row["second"] < row["twentieth"] for row in rows)
    assert rows[0]["tokens"] == [*range(30, 50)]


def test_peaks_have_a_row_for_each_length():
    rows = [*compare.peaks([FULL], start, limits(300, 400), silent)]
    assert [row["seen"] for row in rows] == [300, 400]
    assert all(row["process"] > 0 for row in rows)


ABOUT = {"precision": "bfloat16", "threads": 2, "rows": 1}


def step(contender: str, seen: int, *seconds: float) -> dict[str, object]:
    timed = {"ms": 1e3 * seconds[0], "steps": [*seconds], "s": 2.0, "prompts": [2.0]}
    return {"part": "steps", **ABOUT, "contender": contender, "seen": seen, **timed}


def test_ratios_are_medians_over_turns():
    (table,) = tables.tables([step("other", 100, 0.02, 0.04, 0.09), step(REFERENCE, 100, 0.01, 0.01, 0.03)])
    other, reference = table.rows
    assert other == {
        "": "other", "step at 100, ms": 20.0, f"times {REFERENCE}": pytest.approx(3.0), "prompt of 100, s": 2.0
    }  # fmt: skip
    assert reference[f"times {REFERENCE}"] == 1.0
    assert table.caption.endswith("bfloat16, 1 row, 2 threads, budgets of 512")


def test_ratios_are_those_at_the_most_tokens():
    (table,) = tables.tables([step(*at, 0.02) for at in (("other", 100), (REFERENCE, 100), ("other", 200))])
    assert table.rows[0][f"times {REFERENCE}"] is None
    assert f"times {REFERENCE}" not in table.rows[1]


def test_starts_say_how_many_tokens_are_those_of_the_uncompiled_model():
    times = {"first": 1.0, "second": 2.0, "twentieth": 3.0, "caches": "cold"}
    rows = [
        {"part": "start", **ABOUT, "contender": UNCOMPILED, "tokens": [1, 2, 3], **times},
        {"part": "start", **ABOUT, "contender": "other", "tokens": [1, 2, 4], **times},
    ]
    (table,) = tables.tables(rows)
    assert [row["same tokens"] for row in table.rows] == [3, 2]
    assert table.rows[1]["cold: twentieth"] == 3.0


def test_errors_have_a_table_of_their_own():
    table = tables.tables([{"part": "memory", **ABOUT, "contender": "other", "error": "no such package"}])[-1]
    assert table.rows[0]["error"] == "no such package"
    assert table.caption == "What could not be measured"


def test_an_environment_that_cannot_be_made_says_why():
    with pytest.raises(Unavailable, match="no such thing"):
        environments._run([sys.executable, "-c", "import sys; sys.exit('ERROR: no such thing')"], {})


def test_what_is_compiled_here_has_an_environment_for_each_processor(monkeypatch):
    """Test it because the code of another processor ends with an illegal instruction."""
    made = []
    for flags in ({"avx2"}, {"avx2", "avx512f"}, {"avx512f", "avx2"}):
        monkeypatch.setattr(contenders.processor, "flags_of_processor", lambda flags=flags: frozenset(flags))
        made.append([contenders._environment(package) for package in contenders.PACKAGES])
    assert made[1] == made[2]
    assert [one != other for one, other in zip(*made[:2], strict=True)] == [False, True]


def test_contenders_have_names_of_their_own_and_environments():
    assert len({each.name for each in contenders.ALL}) == len(contenders.ALL)
    assert {each.package for each in contenders.ALL} - {None} == set(contenders.PACKAGES)
    assert {each.budget for each in contenders.ALL} == {None, contenders.BUDGET}
