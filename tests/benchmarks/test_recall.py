"""Test the benchmark of recall, which feeds a text in pieces and asks in it and after a prompt."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import recall
from kvpass.decoding.model_call import ModelCall
from tests.apps.evaluation.test_recall import Copier, planted


def copying(window: int) -> ModelCall:
    return ModelCall.of(Copier(window))


def test_a_window_recalls_what_lies_in_it():
    text = planted()
    cache = recall.read(copying(60), text.text, lambda: None)
    assert text.distances == (16, 32, 64, 128)
    shares = [recall.share_of_right_words(copying(60), text, number, cache) for number in range(4)]
    assert shares == [1.0, 1.0, 0.0, 0.0]


def test_each_word_of_a_value_counts():
    text = planted()
    text.pairs[:, 1, 3] = 299  # differs from the text: wrong itself, and nothing is known to follow it
    cache = recall.read(copying(1000), text.text, lambda: None)
    assert recall.share_of_right_words(copying(1000), text, 1, cache) == 0.5
    assert recall.share_of_right_words(copying(1000), text, 0, cache) == 1.0


@pytest.mark.parametrize("length", [2, 33, 34, 98, 194])
def test_every_token_is_fed_once_and_every_piece_ticks_once(length):
    fed, ticks, text = [], [], planted().text[:, :length]

    def model(tokens, **more):
        fed.append(tokens.shape[1])
        return Copier(1000)(tokens, **more)

    assert torch.equal(recall.read(ModelCall.of(model), text, lambda: ticks.append(1)), text)
    assert fed[0] in range(2, 2 + recall.PIECE)
    assert fed[1:] == [recall.PIECE] * len(ticks) == [recall.PIECE] * recall.piece_count(text)


def test_a_window_recalls_what_lies_in_it_in_both_ways():
    found = recall.asked(copying(60), planted(), lambda: None, turns=2)
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

    assert recall.right_at_once(ModelCall.of(model), text, turns) == (1.0,) * 4
    assert {number for _, number in asked} == set(range(4))
    assert len(set(asked)) == len(asked) == rows * max(turns, 5 - rows)
