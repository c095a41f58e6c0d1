import sys

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
    assert corpus.concatenate_texts([[1, 2], [11, 12, 13]], 6, bos=0) == [0, 1, 2, 0, 11, 12]


def test_unbroken_refuses_a_short_text():
    with pytest.raises(KVPassError, match="3 tokens is too short for a stream of 4"):
        corpus.concatenate_texts([[1, 2]], 4, bos=0)


def test_the_prose_is_long_english_without_code_and_says_nothing_twice():
    found = corpus.prose()
    paragraphs = [paragraph for text in found.values() for paragraph in text.strip().split("\n\n")]
    assert list(found) == sorted(found)
    assert sum(map(len, found.values())) > 200_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not [paragraph for paragraph in paragraphs if "::=" in paragraph or ">>>" in paragraph or "\n" in paragraph]


@pytest.mark.parametrize(
    ("paragraph", "is_prose"),
    [
        ("The value of the expression is bound to the name in the namespace.", True),
        ("A short one.", False),
        ("if_stmt ::= an expression that is followed by a suite of statements.", False),
        ("Special method names and what each of them is looked up on", False),
        ("[(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12), (13, 14)].", False),
    ],
)
def test_prose_consists_of_sentences(paragraph, is_prose):
    assert corpus._is_prose(paragraph) == is_prose


def test_a_python_without_its_manual_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(KVPassError, match="--text FILE"):
        corpus.prose()


def test_texts_are_files_or_else_those_of_the_kind_of_model(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("words")
    assert corpus.texts_of([path], bundled=False) == {str(path): "words"}
    assert corpus.texts_of([], bundled=False) == corpus.prose()
    assert "argparse.py" in corpus.texts_of([], bundled=True)
