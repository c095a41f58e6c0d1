import pytest

from kvpass.apps import corpus
from kvpass.errors import KVPassError


def test_held_out_and_training_files_do_not_overlap():
    held_out = set(corpus.held_out_files())
    assert held_out
    assert not held_out.intersection(corpus.training_files())


def test_documents_take_the_first_piece_of_every_text_first():
    texts = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14], [21]]
    assert corpus.documents(texts, 3, 3, bos=0) == [[0, 1, 2], [0, 11, 12], [0, 3, 4]]


def test_documents_say_how_much_is_missing():
    with pytest.raises(KVPassError, match="7 tokens makes 3 of 4 documents of 3 tokens"):
        corpus.documents([[1, 2, 3, 4, 5], [11, 12]], 4, 3, bos=0)


def test_documents_of_no_text():
    with pytest.raises(KVPassError, match="0 tokens"):
        corpus.documents([], 1, 8, bos=0)


def test_unbroken_joins_texts_and_cuts_at_the_length():
    assert corpus.unbroken([[1, 2], [11, 12, 13]], 6, bos=0) == [0, 1, 2, 0, 11, 12]


def test_unbroken_refuses_a_short_text():
    with pytest.raises(KVPassError, match="3 tokens is too short for a stream of 4"):
        corpus.unbroken([[1, 2]], 4, bos=0)
