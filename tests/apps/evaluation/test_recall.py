from types import SimpleNamespace

import pytest
import torch

from kvpass.apps import corpus
from kvpass.apps.evaluation import recall
from kvpass.apps.evaluation.recall import PairVocabulary
from kvpass.apps.evaluation.session import Session
from kvpass.apps.models import load_memory
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.prefill import Caller
from kvpass.errors import KVPassError

WORDS = 400  # tokens there are
VOCABULARY = PairVocabulary(torch.arange(200, 300), mark=1, end=2)


def planted(length: int = 200, rows: int = 3):
    return recall.plant_pairs(torch.arange(10, 190).repeat(3), 0, VOCABULARY, length, rows=rows)


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


def copying(window: int) -> Caller:
    return Caller.of(Copier(window))


def test_a_window_recalls_what_lies_in_it():
    text = planted()
    cache = recall.read(copying(60), text.text, lambda: None)
    assert text.distances == (16, 32, 64, 128)
    assert [recall.share_of_right_words(copying(60), text, number, cache) for number in range(4)] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]


def test_each_word_of_a_value_counts():
    text = planted()
    text.pairs[:, 1, 3] = 299  # not what the text says: wrong itself, and nothing is known to follow it
    cache = recall.read(copying(1000), text.text, lambda: None)
    assert recall.share_of_right_words(copying(1000), text, 1, cache) == 0.5
    assert recall.share_of_right_words(copying(1000), text, 0, cache) == 1.0


@pytest.mark.parametrize("length", [2, 33, 34, 98, 194])
def test_every_token_is_fed_once_and_every_piece_ticks_once(length):
    fed, ticks, text = [], [], planted().text[:, :length]

    def model(tokens, **more):
        fed.append(tokens.shape[1])
        return Copier(1000)(tokens, **more)

    assert torch.equal(recall.read(Caller.of(model), text, lambda: ticks.append(1)), text)
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


@pytest.mark.parametrize(
    ("tokens", "length", "message"),
    [(1000, 20, "20 tokens have no room"), (50, 200, "50 tokens is too short")],
)
def test_what_cannot_be_planted_is_refused(tokens, length, message):
    with pytest.raises(KVPassError, match=message):
        recall.plant_pairs(torch.arange(tokens) % 180, 0, VOCABULARY, length)


def test_a_model_without_a_cache_is_asked_the_same():
    def without(tokens, use_cache, logits_to_keep):
        ends = range(tokens.shape[1] - logits_to_keep + 1, tokens.shape[1] + 1)
        guesses = [torch.stack([Copier.after(row[:end]) for row in tokens]) for end in ends]
        return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.stack(guesses, 1), WORDS))

    assert recall.share_without_cache(without, planted(), 3) == 1.0


def test_a_measure_needs_no_context_manager():
    """The bundled model recalls what its cache holds, and nothing of what a window has dropped."""
    subject = load_memory(None)
    loop = DecodeLoop(subject.model, "window", budget=64, prefill_chunk=32, inner="eager")
    text = [token for each in subject.encode(corpus.read(corpus.held_out_files())[:2]) for token in each]
    session = Session(subject, loop, {"a": text}, "chunk", 32, 64)
    near, far = recall.RecallMeasure((16, 200), trials=4).rows(session)
    assert (near["distance"], near["pairs"], near["tokens"]) == (16, 1.0, 1.0)
    assert far["pairs"] == 0.0
