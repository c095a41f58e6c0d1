from types import SimpleNamespace

import pytest
import torch

from kvpass.apps import corpus
from kvpass.apps.evaluation import recall
from kvpass.apps.evaluation.recall import PairVocabulary
from kvpass.apps.evaluation.session import Session
from kvpass.apps.models import load_memory
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import KVPassError

WORDS = 400  # size of the vocabulary
DISTANCES = (16, 32, 64, 128, 256)
VOCABULARY = PairVocabulary(torch.arange(200, 300), mark=1, end=2)


def planted(length: int = 200, rows: int = 3):
    return recall.plant_pairs(torch.arange(10, 190).repeat(3), 0, VOCABULARY, length, DISTANCES, rows, seed=1)


class Copier:
    """A model that repeats what followed the last token's previous occurrence in the last `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, input_ids, past_key_values=None, use_cache=True, logits_to_keep=0):
        seen = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], 1)
        guesses = torch.stack([self.after(row) for row in seen])
        logits = torch.nn.functional.one_hot(guesses, WORDS).float()[:, None]
        return SimpleNamespace(logits=logits, past_key_values=seen[:, -self.window :])

    @staticmethod
    def after(row: torch.Tensor) -> torch.Tensor:
        matches = (row[:-1] == row[-1]).nonzero().flatten()
        return row[matches[-1] + 1] if len(matches) else torch.tensor(0)


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
    [(1000, 20, "20 tokens are too few"), (50, 200, "50 tokens is too short")],
)
def test_pairs_that_do_not_fit_the_text_are_refused(tokens, length, message):
    with pytest.raises(KVPassError, match=message):
        recall.plant_pairs(torch.arange(tokens) % 180, 0, VOCABULARY, length, DISTANCES, rows=3, seed=1)


def test_a_measure_needs_no_context_manager():
    """Check that the bundled model recalls cached tokens, and none that a window evicted."""
    loaded = load_memory()
    loop = DecodeLoop(loaded.model, "window", budget=64, prefill_chunk=32, inner="eager")
    text = [token for each in loaded.encode(corpus.read(corpus.held_out_files())[:2]) for token in each]
    session = Session(loaded, loop, {"a": text}, "chunk", 32, 64)
    near, far = recall.RecallMeasure((16, 200), trials=4).rows(session)
    assert (near["distance"], near["pairs"], near["tokens"]) == (16, 1.0, 1.0)
    assert far["pairs"] == 0.0
