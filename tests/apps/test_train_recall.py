import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from examples import train_recall
from examples.train_recall import FOLDER, RECIPE, Phase, Source, batch, schedule, share_without_cache
from kvpass.apps import corpus
from kvpass.apps.evaluation.recall import PairVocabulary, plant_pairs
from kvpass.apps.models import load_memory
from tests.apps.evaluation.test_recall import WORDS, Copier, planted

MARK, END = 1, 2
SOURCE = Source(torch.arange(300, 5300), PairVocabulary(torch.arange(100, 160), MARK, END))
PHASE = Phase(steps=2, context=200, batch=4, share=(0.2, 0.6))


def test_the_same_step_has_the_same_windows_and_another_has_others():
    first, again, other = (batch(SOURCE, RECIPE, PHASE, step)[0] for step in (3, 3, 4))
    assert first.shape == (4, 201)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_answer_is_a_word_of_a_pair_that_was_said_before():
    for tokens, answers in zip(*batch(SOURCE, RECIPE, PHASE, 0), strict=True):
        said: dict[int, list[int]] = {}
        for start in (tokens == MARK).nonzero().flatten().tolist():
            line = tokens[start:].tolist()
            if END not in line:  # a window may end inside the marker
                continue
            length = line.index(END) + 1
            key, value = line[1], line[2 : length - 1]
            assert said.get(key, value) == value
            assert answers[start + 2 : start + length - 1].tolist() == [key in said] * len(value)
            said[key] = value
        assert int(answers.sum()) > 0
        assert not answers[tokens >= 300].any()


def test_the_text_around_the_lines_goes_on_as_it_was():
    tokens, _ = batch(SOURCE, RECIPE, PHASE, 0)
    for row in tokens:
        text = row[row >= 300]
        assert row[0] == train_recall.FIRST
        assert torch.equal(text, torch.arange(int(text[0]), int(text[0]) + len(text)))


def test_lines_may_crowd_at_both_ends():
    phase = dataclasses.replace(PHASE, context=1000, share=(0.02, 0.05), ends=True, batch=50)
    tokens, _ = batch(SOURCE, RECIPE, phase, 0)
    places = (tokens == MARK).nonzero()[:, 1]
    shares = torch.histc(places.float(), bins=5, min=0, max=1000) / len(places)
    assert shares[0] + shares[4] > 0.5
    assert shares[2] < 0.2


def test_the_rate_rises_and_then_follows_the_phases():
    level, falling = PHASE, dataclasses.replace(PHASE, rate=(1.0, 0.0))
    recipe = dataclasses.replace(RECIPE, phases=(level, falling), learning_rate=1.0, warmup_steps=2)
    assert [rate for _, rate in schedule(recipe)] == [0.5, 1.0, 1.0, 0.5]


def test_the_bundled_model_recalls_at_every_distance():
    figures = json.loads((FOLDER / "training.json").read_text())
    assert figures["recipe"] == json.loads(json.dumps(dataclasses.asdict(RECIPE)))
    assert list(figures["recall"]) == [str(distance) for distance in train_recall.TESTED]
    assert min(figures["recall"].values()) >= 0.95
    assert sum(file.stat().st_size for file in FOLDER.glob("*.safetensors")) <= 6_000_000


@pytest.mark.slow
@torch.inference_mode()
def test_the_bundled_weights_recall_what_they_are_said_to():
    loaded = load_memory()
    held_out = torch.tensor([token for text in loaded.encode(corpus.read(corpus.held_out_files())) for token in text])
    distances = (16, 32, 64, 128, 256, 512, 1024, 2000)
    text = plant_pairs(held_out, loaded.bos, PairVocabulary.of(loaded.tokenizer), 2048, distances, rows=8, seed=5)
    shares = [share_without_cache(loaded.model, text, number) for number in range(len(text.distances))]
    assert min(shares) >= 0.9
    # Without the right pairs, no answer can be known.
    strange = dataclasses.replace(text, pairs=text.pairs.roll(1, 0))
    assert share_without_cache(loaded.model, strange, 3) <= 0.1


def test_a_model_without_a_cache_is_asked_the_same():
    def without(tokens, use_cache, logits_to_keep):
        ends = range(tokens.shape[1] - logits_to_keep + 1, tokens.shape[1] + 1)
        guesses = [torch.stack([Copier.after(row[:end]) for row in tokens]) for end in ends]
        return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.stack(guesses, 1), WORDS))

    assert share_without_cache(without, planted(), 3) == 1.0
