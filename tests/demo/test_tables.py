import json
import math

import pytest
import torch

from kvpass.demo import tables
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


def test_text_is_aligned_in_mebibytes_with_errors_below(make_run):
    rows = [tables.cost("h2o", make_run()), tables.cost("picky", PolicyError("needs aligner"))]
    caption, heading, rule, h2o, picky, error = tables.text("Caption.", rows).split("\n")
    assert caption == "Caption."
    assert "full cache MiB" in heading
    assert {len(heading), len(rule), len(h2o), len(picky)} == {len(rule)}
    assert h2o.split() == ["h2o", "2.718", "4.0", "1.00", "4.00", "1", "0"]
    assert picky.split() == ["picky", *"------"]
    assert error == "picky: needs aligner"


def test_written_tables_are_json(tmp_path, make_run):
    row = tables.cost("h2o", make_run())
    tables.write(tmp_path / "table.json", "Caption.", [row])
    assert json.loads((tmp_path / "table.json").read_text()) == {"caption": "Caption.", "rows": [row]}


def test_an_unknown_speed_is_null_in_json(tmp_path, make_run):
    tables.write(tmp_path / "table.json", "", [tables.cost("h2o", make_run(tokens=3))])
    assert json.loads((tmp_path / "table.json").read_text())["rows"][0]["tokens_per_second"] is None
