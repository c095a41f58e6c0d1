from pathlib import Path

import pytest
import torch
import transformers

from kvpass.apps.evaluation.recall import PairVocabulary, plant
from kvpass.errors import KVPassError

TOKENIZER = Path(__file__).parents[3] / "kvpass" / "apps" / "data" / "tokenizer"
VOCABULARY = PairVocabulary(torch.arange(100, 130), mark=1, end=2)


def pairs(number: int, value: int = 2) -> torch.Tensor:
    return VOCABULARY.pairs(number, value, torch.Generator().manual_seed(0))


def test_the_words_of_a_tokenizer_are_whole_words():
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    vocabulary = PairVocabulary.of(tokenizer)
    said = [tokenizer.decode(word) for word in vocabulary.words]
    assert len(said) > 200
    assert all(word[0] == " " and word[1:].isalpha() and word.islower() for word in said)
    assert (tokenizer.decode(vocabulary.mark), tokenizer.decode(vocabulary.end)) == ("$", "\n")


def test_a_line_is_a_mark_a_key_a_value_and_an_end_and_no_word_comes_twice():
    lines = pairs(10)
    assert lines.shape == (10, 5)
    assert set(lines[:, 0].tolist()) == {1}
    assert set(lines[:, -1].tolist()) == {2}
    assert sorted(lines[:, 1:-1].flatten().tolist()) == VOCABULARY.words.tolist()


def test_too_few_words_are_an_error_that_counts_them():
    with pytest.raises(KVPassError, match=r"11 pairs with values of 2 words need 33 words .* has 30"):
        pairs(11)


def test_pairs_stand_at_their_distances_and_the_text_goes_on_around_them():
    documents = torch.arange(200, 260).expand(2, 60)
    planted = plant(documents, VOCABULARY, (3, 20, 40), value=2, seed=0)
    assert planted.text.shape == documents.shape
    for row in range(2):
        for number, distance in enumerate((3, 20, 40)):
            line = planted.text[row, 60 - distance - 5 : 60 - distance]
            assert torch.equal(line, planted.pairs[row, number])
            assert torch.equal(line[:2], planted.question(number)[row])
            assert torch.equal(line[2:4], planted.answer(number)[row])
        rest = planted.text[row][planted.text[row] >= 200]
        assert torch.equal(rest, documents[row, :45])
    assert not torch.equal(planted.pairs[0], planted.pairs[1])


def test_a_pair_may_be_said_more_than_once():
    documents = torch.arange(200, 260).expand(2, 60)
    planted = plant(documents, VOCABULARY, (3, 20), value=2, seed=0, times=2)
    for number, distance in enumerate((3, 20)):
        said = planted.text[:, 60 - distance - 10 : 60 - distance]
        assert torch.equal(said, torch.cat([planted.pairs[:, number]] * 2, 1))
        assert torch.equal(said, planted.text[:, planted.span(number)])
    assert int((planted.text >= 200).sum()) == 2 * (60 - 4 * 5)


def test_the_same_seed_plants_the_same():
    documents = torch.arange(200, 260).expand(2, 60)
    first, again, other = (plant(documents, VOCABULARY, (3, 20), 2, seed).text for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
