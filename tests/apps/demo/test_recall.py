from types import SimpleNamespace

import pytest
import torch

from kvpass.apps.demo import recall
from kvpass.apps.demo.pairs import Tongue
from kvpass.errors import KVPassError

WORDS = 400  # tokens there are
TONGUE = Tongue(torch.arange(200, 300), mark=1, end=2)


def planted(length: int = 200, rows: int = 3):
    return recall.planted(torch.arange(10, 190).repeat(3), 0, TONGUE, length, rows=rows)


class Copier:
    """Says what followed the last time that the last token came, if that is among the last `window` ones."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, input_ids, past_key_values=None, use_cache=True, logits_to_keep=0):
        seen = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], 1)
        guesses = torch.stack([self.after(row) for row in seen])
        logits = torch.nn.functional.one_hot(guesses, WORDS).float()[:, None]
        return SimpleNamespace(logits=logits, past_key_values=seen[:, -self.window :])

    @staticmethod
    def after(row: torch.Tensor) -> torch.Tensor:
        places = (row[:-1] == row[-1]).nonzero().flatten()
        return row[places[-1] + 1] if len(places) else torch.tensor(0)


def test_a_window_recalls_what_lies_in_it():
    found = recall.measure(Copier(60), planted(), tick=lambda: None)
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

    assert recall.right_at_once(model, text, turns) == (1.0,) * 4
    assert {number for _, number in asked} == set(range(4))
    assert len(set(asked)) == len(asked) == rows * max(turns, 5 - rows)


def test_what_is_sampled_follows_the_question_of_its_row():
    class Sure(Copier):
        def __call__(self, *arguments, **more):
            out = super().__call__(*arguments, **more)
            out.logits *= 1e4
            return out

    text = planted()
    found = recall.measure(Sure(60), text, lambda: None, sampled=5)
    wanted = [tuple(text.pairs[n % 3, n, 2:].tolist()) for n in range(2)]  # four words and the end of the line
    assert found.sampled[:2] == tuple(wanted)
    assert len(found.sampled) == len(recall.questions(text))


def test_each_word_of_a_value_counts():
    text = planted()
    text.pairs[:, 1, 3] = 299  # not what the text says: wrong itself, and nothing is known to follow it
    cache = recall.read(Copier(1000), text.text, lambda: None)
    assert recall.right(Copier(1000), text, 1, cache) == 0.5
    assert recall.right(Copier(1000), text, 0, cache) == 1.0


@pytest.mark.parametrize("length", [2, 33, 34, 98, 194])
def test_every_token_is_fed_once_and_every_piece_ticks_once(length):
    fed, ticks, text = [], [], planted().text[:, :length]

    def model(tokens, **more):
        fed.append(tokens.shape[1])
        return Copier(1000)(tokens, **more)

    assert torch.equal(recall.read(model, text, lambda: ticks.append(1)), text)
    assert fed[0] in range(2, 2 + recall.PIECE)
    assert fed[1:] == [recall.PIECE] * len(ticks) == [recall.PIECE] * recall.pieces(text)


def test_rows_are_other_texts_with_other_pairs_and_begin_alike():
    text = planted()
    assert text.text[:, 0].tolist() == [0, 0, 0]
    assert not torch.equal(text.text[0], text.text[1])
    assert not torch.equal(text.pairs[0], text.pairs[1])


def test_text_question_and_answer_are_as_long_as_was_said():
    text = planted(200)
    assert text.text.shape[1] + 2 + text.value - 1 == 200


def test_questions_are_about_rows_of_their_own_and_end_with_a_key():
    text = planted(rows=4)
    asked = recall.questions(text)
    assert [question.distance for question in asked] == [16, 32, 64, 128]
    for row, question in enumerate(asked):
        assert torch.equal(question.prompt[:-2], text.text[row])
        assert torch.equal(question.prompt[-2:], question.planted[:2])
        assert torch.equal(question.planted, text.pairs[row, row])


@pytest.mark.parametrize(
    ("tokens", "length", "message"),
    [(1000, 20, "20 tokens have no room"), (50, 200, "50 tokens is too short")],
)
def test_what_cannot_be_planted_is_refused(tokens, length, message):
    with pytest.raises(KVPassError, match=message):
        recall.planted(torch.arange(tokens) % 180, 0, TONGUE, length)


def test_a_model_without_a_cache_is_asked_the_same():
    def copying(tokens, use_cache, logits_to_keep):
        ends = range(tokens.shape[1] - logits_to_keep + 1, tokens.shape[1] + 1)
        guesses = [torch.stack([Copier.after(row[:end]) for row in tokens]) for end in ends]
        return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.stack(guesses, 1), WORDS))

    assert recall.right_uncached(copying, planted(), 3) == 1.0
