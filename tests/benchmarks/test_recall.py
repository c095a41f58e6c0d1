"""The benchmark of recall asks after the text, and at the end of a prompt."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from benchmarks import recall
from kvpass.decoding.prefill import Caller
from tests.apps.evaluation.test_recall import Copier, planted


def test_a_window_recalls_what_lies_in_it_in_both_ways():
    found = recall.asked(Caller.of(Copier(60)), planted(), lambda: None, turns=2)
    assert found.distances == (16, 32, 64, 128)
    assert found.later == (1.0, 1.0, 0.0, 0.0)
    assert found.at_once == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(("rows", "turns"), [(1, 1), (3, 1), (4, 2), (5, 4)])
def test_every_distance_is_asked_of_some_row_at_the_end_of_a_prompt(rows, turns):
    text, asked = planted(rows=rows), []

    def model(tokens, past_key_values=None, **more):
        if past_key_values is None:
            asked.extend((row, text.pairs[row, :, 1].tolist().index(key)) for row, key in enumerate(tokens[:, -1]))
        return Copier(1000)(tokens, past_key_values, **more)

    assert recall.right_at_once(Caller.of(model), text, turns) == (1.0,) * 4
    assert {number for _, number in asked} == set(range(4))
    assert len(set(asked)) == len(asked) == rows * max(turns, 5 - rows)
