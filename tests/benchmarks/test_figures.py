"""Test how the benchmark processes measurements: medians, verdicts, tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import compilation, equal_bytes, overhead, passkey, prompt, recall, report, step, stream
from benchmarks.recall import AT_ONCE, LATER, RecallOutcome
from benchmarks.report import Row, Target, replaced, verdicts
from benchmarks.timing import Plan, interleaved, medians, spread
from kvpass.errors import KVPassError


class Scripted:
    """A contender that takes scripted times, and records its turns."""

    def __init__(self, name: str, turns: list[str], seconds: list[float]) -> None:
        self.name, self.turns, self.script = name, turns, seconds

    def seconds(self, count: int) -> list[float]:
        self.turns.append(self.name)
        return self.script[:count]


def test_contenders_take_turns_and_the_first_steps_of_a_turn_are_left_out():
    turns: list[str] = []
    both = [Scripted("a", turns, [9.0, 1.0, 2.0]), Scripted("b", turns, [8.0, 3.0, 4.0])]
    taken = interleaved(both, Plan(rounds=2, steps=2, skipped=1))
    assert turns == ["a", "b", "b", "a"]
    assert taken == {"a": [1.0, 2.0, 1.0, 2.0], "b": [3.0, 4.0, 3.0, 4.0]}


def test_medians_are_in_milliseconds_and_the_spread_is_a_share():
    taken = {"a": [0.001, 0.002, 0.003, 0.004, 0.100]}
    assert medians(taken) == {"a": 3.0}
    assert spread({"steady": [2.0] * 4, "once": [1.0]}) == {"steady": 0.0, "once": 0.0}
    assert spread(taken)["a"] > 1


def test_fewer_rounds_are_at_least_three():
    assert Plan(rounds=12).fewer(0.5).rounds == 6
    assert Plan(rounds=12).fewer(0.1).rounds == 3
    assert Plan(rounds=2, steps=3, skipped=1).total == 8


@pytest.mark.parametrize(
    ("at_least", "measured", "met", "verdict"),
    [
        (False, 1.2, True, "yes"),
        (False, 1.3, False, "NO"),
        (True, 1.2, False, "NO"),
        (True, None, None, "not measured"),
    ],
)
def test_a_target_is_met_or_not_or_was_not_measured(at_least, measured, met, verdict):
    target = Target("part", "figure", 1.25, measured, at_least)
    assert target.met is met
    (row,) = verdicts([target])
    assert row["met"] == verdict
    assert row["target"] == ("≥ 1.25" if at_least else "≤ 1.25")


def test_only_what_stands_between_the_comments_is_replaced():
    text = "before\n<!-- x -->\nold\n<!-- /x -->\nafter"
    assert replaced(text, "x", "new") == "before\n<!-- x -->\nnew\n<!-- /x -->\nafter"
    with pytest.raises(ValueError, match="there is no <!-- y -->"):
        replaced(text, "y", "new")


def test_rows_are_read_as_they_were_written(tmp_path: Path):
    report.save(tmp_path / "part.json", [{"x": 1}], {"quick": True})
    assert report.load(tmp_path / "part.json") == [{"x": 1}]
    assert report.load(tmp_path / "other.json") == []


def at(contender: str, ms: float, seen: int = 16384) -> Row:
    return {"dtype": "float32", "threads": 1, "seen": seen, "contender": contender, "ms": ms, "spread": 0.0}


def test_steps_are_held_against_the_fastest_press_and_every_other_contender():
    ours = [at("kvpass, a", 10.0), at("kvpass, b", 20.0), at(step.FLOOR, 1.0)]
    theirs = [at("kvpress, slow", 60.0), at("kvpress, fast", 30.0), at(step.UNCOMPILED, 150.0)]
    held = {target.what: target.measured for target in step.targets([*ours, *theirs])}
    assert held["b: times faster than kvpress, fast at 16,384 (float32, 1 thread)"] == 1.5
    assert held["middle policy: times faster than uncompiled, DynamicCache at 16,384 (float32, 1 thread)"] == 10.0
    assert held["times faster than torch.compile, StaticCache at 16,384 (float32, 1 thread)"] is None
    (table,) = step.tables([*ours, {"dtype": "float32", "threads": 1, "contender": "kvpress", "error": "why"}])
    assert table.rows[-1] == {"milliseconds a step": "kvpress", "refused": "why"}


def test_overhead_is_beside_no_policy_and_the_floor():
    def case(name: str, ms: float) -> Row:
        return {"dtype": "float32", "threads": 2, "case": name, "slots": 9, "ms": ms, "spread": 0.0}

    rows = [case(overhead.PLAIN, 10.0), case(overhead.FLOOR, 8.0), case("h2o", 12.0)]
    held = {target.what: (target.measured, target.met) for target in overhead.targets(rows)}
    assert held["h2o, of no policy (float32, 2 threads)"] == (1.2, False)
    assert held["h2o, of the floor (float32, 2 threads)"] == (1.5, False)
    assert held["no policy, 1,024 slots, of the floor (float32, 2 threads)"] == (1.25, True)


def test_prompts_are_beside_the_one_without_statistics():
    def one(policy: str, **value: float) -> Row:
        return {"threads": 1, "policy": policy, "tokens": prompt.LONG, **value}

    rows = [one("window", seconds=2.0), one("h2o", seconds=3.2), one("window", MiB=100.0), one("h2o", MiB=110.0)]
    assert [(t.measured, t.met) for t in prompt.targets(rows)] == [(1.6, False), (1.1, True)]
    assert prompt.targets([{**row, "tokens": 1024} for row in rows])[0].met is None


def test_compile_times_are_held_beside_the_static_cache_of_their_depth():
    def run(name: str, layers: int, caches: str, seconds: float) -> Row:
        each = {"prompt": seconds, "steps": 2 * seconds, "again": seconds}
        return {"contender": name, "layers": layers, "caches": caches, **each}

    times = {(compilation.STATIC, 32): (20, 5), ("h2o", 32): (6, 3), ("h2o", 4): (5, 4), ("d2o", 16): (7, 1)}
    rows = [run(*key, c, s) for key, pair in times.items() for c, s in zip(("cold", "warm"), pair, strict=True)]
    held = {target.what: target.measured for target in compilation.targets(rows)}
    assert held["h2o: 32 layers, of 4"] == 6 / 5
    assert held["h2o: 32 layers, of torch.compile, StaticCache"] == 6 / 20
    assert held["d2o: 16 layers, of torch.compile, StaticCache"] is None
    assert held["h2o: seconds to the first token in a second process, 32 layers"] == 3


def test_a_stream_is_judged_after_its_warm_up():
    def row(tokens: int, ms: float, mib: float) -> Row:
        return {"tokens": tokens, "ms": ms, "floor": 2.0 * ms, "MiB": mib, "compiled": 0}

    rows = [row(0, 99.0, 50.0), *(row(n, 10.0, 100.0) for n in range(1, 20)), row(20, 11.0, 103.0)]
    growth, compiled, end, relative = stream.targets(rows)
    assert growth.measured == pytest.approx(0.03)
    assert compiled.met
    assert end.measured == pytest.approx(1.1)
    assert relative.measured == pytest.approx(1.0)


def test_recall_has_a_table_for_each_way_of_asking():
    outcome = RecallOutcome((16, 64), later=(1.0, 0.5), at_once=(0.75, 0.25))
    rows = [*recall._rows("a", outcome), *recall._rows("b", KVPassError("why"))]
    refused = {"policy": "b", "refused": "why"}
    later, at_once = recall.tables(rows)
    assert later.rows == [{"policy": "a", "16": 1.0, "64": 0.5}, refused]
    assert at_once.rows == [{"policy": "a", "16": 0.75, "64": 0.25}, refused]


def test_passkeys_have_a_table_for_each_way_of_asking():
    outcome = {LATER: [1.0, 0.5, 0.0, 0.0, 1.0], AT_ONCE: [1.0] * 5}
    rows = [*passkey._rows("a", outcome), *passkey._rows("b", KVPassError("why"))]
    later, at_once = passkey.tables(rows)
    refused = {"policy": "b", "refused": "why"}
    assert later.rows == [{"policy": "a", "0%": 1.0, "25%": 0.5, "50%": 0.0, "75%": 0.0, "100%": 1.0}, refused]
    assert [*at_once.rows[0].values()] == ["a", 1.0, 1.0, 1.0, 1.0, 1.0]


def stored(kind: str | None, times: int, texts: list[float], what: str = equal_bytes.PERPLEXITY) -> Row:
    return {
        "measure": what, "documents": len(texts), "policy": "h2o", "kv_dtype": kind, "times": times, "budget": 64,
        "value": sum(texts) / len(texts), "texts": texts,
    }  # fmt: skip


def test_the_cost_of_rounding_is_paired_by_text():
    plain, rounded = stored(None, 1, [1.0, 2.0, 6.0]), stored("int8", 1, [1.01, 2.0, 6.02])
    found = equal_bytes.Difference.between(rounded, plain)
    assert found.mean == pytest.approx(math.expm1(0.01))
    assert found.error == pytest.approx(0.01 / math.sqrt(3))  # although losses differ much more between texts
    assert str(found) == "+1.01 % ± 0.58"
    assert equal_bytes.Difference.between(stored("int8", 1, [1.0]), stored(None, 1, [1.0])).error is None


def test_recall_differs_by_shares_of_all_words():
    rounded, plain = (stored(kind, 1, [x, x], equal_bytes.RECALL) for kind, x in (("int8", 0.25), (None, 0.5)))
    assert equal_bytes.Difference.between(rounded, plain) == equal_bytes.Difference(-0.25, 0.0)


def test_same_bytes_are_compared_by_policy_and_format():
    rows = [stored(kind, times, [1.0, 1.1]) for kind, times in equal_bytes.STORED]
    rows += [stored(kind, times, [0.5, 0.5], equal_bytes.RECALL) for kind, times in equal_bytes.STORED[:3]]
    rows.append({**stored("int8", 1, [1.0]), "policy": "other", "error": "refused"})
    perplexity, _, differences = equal_bytes.tables(rows)
    assert perplexity.caption.startswith("Perplexity of 2 held-out documents")
    assert list(perplexity.rows[0]) == ["policy", "plain, 64", "int8, 64", "int4, 64", "int8, 128", "int4, 256"]
    assert differences.rows[0]["perplexity, int8"] == "+0.00 % ± 0.00"
    assert [target.met for target in equal_bytes.targets(rows)] == [True, True]
    assert list(equal_bytes.figures(rows)) == ["equal_bytes"]
