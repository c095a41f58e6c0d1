import json
import math

import pytest
import torch

from kvpass.apps.demo import tables
from kvpass.apps.demo.recall import AT_ONCE, LATER, RecallOutcome
from kvpass.errors import PolicyError


def test_cost_says_what_the_run_says(make_run):
    assert tables.cost("h2o", make_run(loss=1.0)) == {
        "policy": "h2o",
        "perplexity": pytest.approx(math.e, abs=1e-3),
        "tokens_per_second": 4.0,
        "cache_bytes": 2**20,
        "full_cache_bytes": 4 * 2**20,
        "decode_graphs": 1,
        "graph_breaks": 0,
    }


def test_a_refusal_is_a_row():
    assert tables.cost("picky", PolicyError("needs aligner")) == {"policy": "picky", "error": "needs aligner"}


def test_the_trained_range_ends_after_as_many_losses(make_run):
    run = make_run()
    run.losses[:] = torch.where(torch.arange(31) < 10, 1.0, 2.0)
    row = tables.cost_along("full", run, trained=10)
    assert row["perplexity_in_range"] == pytest.approx(math.exp(1), abs=1e-3)
    assert row["perplexity_beyond"] == pytest.approx(math.exp(2), abs=1e-3)


@pytest.mark.parametrize("trained", [None, 31, 100])
def test_a_stream_within_the_trained_range_is_not_split(make_run, trained):
    assert tables.cost_along("full", make_run(), trained) == tables.cost("full", make_run())


def test_a_table_is_printed_as_it_fills_up_in_mebibytes(make_run, capsys):
    def printed():
        return capsys.readouterr().out.split("\n")[:-1]

    table, refused = tables.PrintedTable("Caption."), tables.cost("picky", PolicyError("needs aligner"))
    assert printed() == ["", "Caption."]
    table.add([refused])
    assert printed() == ["picky: needs aligner"]
    table.add([tables.cost("h2o", make_run())])
    heading, rule, h2o = printed()
    assert "full cache MiB" in heading
    assert {len(heading), len(rule), len(h2o)} == {len(rule)}
    assert h2o.split() == ["h2o", "2.718", "4.0", "1.00", "4.00", "1", "0"]
    table.add([{**tables.cost("tova", make_run()), "tokens_per_second": None}, {"policy": "sage"}])
    tova, sage = printed()
    assert len(tova) == len(sage) == len(rule)
    assert sage.split() == ["sage", *"------"]
    assert [row["policy"] for row in table.rows] == ["picky", "h2o", "tova", "sage"]


def test_recall_has_a_row_for_each_way_of_asking_and_a_column_for_each_distance():
    assert tables.recalled("h2o", RecallOutcome((16, 64), later=(1.0, 0.504), at_once=(0.25, 0.0))) == [
        {"policy": "h2o", "asked": LATER, "16": 1.0, "64": 0.5},
        {"policy": "h2o", "asked": AT_ONCE, "16": 0.25, "64": 0.0},
    ]
    assert tables.recalled("picky", PolicyError("needs aligner")) == [{"policy": "picky", "error": "needs aligner"}]


def test_answers_stand_under_their_questions_and_refusals_at_the_end():
    questions = [{"distance": d, "planted": f"$ key value {d}", "prompt": "$ key"} for d in (16, 64)]
    rows = tables.answered(questions, {"a": [" value 16", " nothing"], "b": PolicyError("why")})
    assert [row.get("completion") for row in rows] == [" value 16", " nothing", None]
    first, second = tables.conversation(rows).split("\n64 tokens after")
    assert "16 tokens after '$ key value 16'" in first
    assert "' value 16'" in first
    assert "' nothing'" in second
    assert second.endswith("b: why")


def test_written_tables_are_json(tmp_path, make_run):
    row = tables.cost("h2o", make_run())
    tables.write(tmp_path / "table.json", "Caption.", [row])
    assert json.loads((tmp_path / "table.json").read_text()) == {"caption": "Caption.", "rows": [row]}


def test_an_unknown_speed_is_null_in_json(tmp_path, make_run):
    tables.write(tmp_path / "table.json", "", [tables.cost("h2o", make_run(tokens=3))])
    assert json.loads((tmp_path / "table.json").read_text())["rows"][0]["tokens_per_second"] is None
