"""Test the inputs of measures and their results, with a stand-in for the model and a real tokenizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import kvpass
from kvpass.apps.evaluation.perplexity import ALL_FILES, Perplexity, StreamMeasure
from kvpass.apps.evaluation.recall import RecallMeasure
from kvpass.apps.evaluation.retrieval import CACHED_SHARE, Needle, Passkey, mentions
from kvpass.apps.evaluation.ruler import RulerMeasure
from kvpass.apps.evaluation.scoring import Feed, Scored
from kvpass.apps.evaluation.session import Measure, Session
from kvpass.apps.evaluation.speed import Speed
from kvpass.apps.models import LoadedModel
from kvpass.errors import PolicyError

TOKENIZER = Path(__file__).parents[3] / "kvpass" / "apps" / "data" / "tokenizer"
BOS = 0
Tokens = Sequence[Sequence[int]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


@dataclasses.dataclass(frozen=True)
class Standing(Session):
    """A session that records its inputs, and answers by a function."""

    scored: list[tuple[Tokens, Tokens]] = dataclasses.field(default_factory=list)
    prompts: list[Sequence[int]] = dataclasses.field(default_factory=list)
    answer: Callable[[Sequence[int]], str] = lambda prompt: ""

    def score(self, contexts: Tokens, continuations: Tokens) -> Scored:
        """Return each token as its own loss."""
        self.scored.append((contexts, continuations))
        width = max(map(len, continuations))
        losses = torch.tensor([[*row, *[0] * (width - len(row))] for row in continuations]).float()
        return Scored(-losses, losses > 0)

    def prompt(self, prompts: Tokens) -> None:
        self.prompts[:] = prompts

    def generate(self, count: int) -> list[str]:
        return [self.answer(prompt) for prompt in self.prompts]

    def share_of_heads(self, row: int, *spans: Sequence[int]) -> float:
        """Return 1 if a span ends in the first third of the prompt, which counts as held."""
        return float(min(map(max, spans)) < len(self.prompts[row]) / 3)


def session(texts: dict[str, list[int]], feed: Feed = "token", tokenizer: Any = None, **more: Any) -> Standing:
    loaded = LoadedModel("stub", None, tokenizer or SimpleNamespace(bos_token_id=BOS, eos_token_id=1), None, False)
    loop: Any = SimpleNamespace(device=torch.device("cpu"))
    return Standing(loaded, loop, texts, feed, None, **more)


def test_each_file_is_scored_from_an_empty_cache() -> None:
    standing = session({"a": [2, 2, 2, 2], "b": [3, 3, 3, 3, 3, 3, 3], "short": [9], "c": [1, 1, 1]})
    rows = list(Perplexity(tokens=6, batch=2).rows(standing))
    assert standing.scored[0] == ([[BOS], [BOS]], [[2, 2, 2, 2], [3, 3, 3, 3, 3]])
    assert [(row["file"], row["tokens"]) for row in rows] == [("a", 4), ("b", 5), ("c", 3), (ALL_FILES, 12)]
    assert [math.log(row["perplexity"]) for row in rows] == pytest.approx([2, 3, 1, (8 + 15 + 3) / 12])
    assert Perplexity().columns(rows)["files"] == 3


def test_the_first_half_is_the_prompt_if_prompts_are_whole() -> None:
    standing = session({"a": [4, 5, 6, 7, 8]}, "whole")
    rows = list(Perplexity().rows(standing))
    assert standing.scored == [([[BOS, 4, 5]], [[6, 7, 8]])]
    assert rows[-1]["tokens"] == 3


@pytest.mark.parametrize("texts", [{}, {"a": [], "b": [5, 6]}])
def test_texts_without_a_token_to_score_are_refused(texts: dict[str, list[int]]) -> None:
    with pytest.raises(
        kvpass.KVPassError, match=r"a text of [02] tokens is too short for a perplexity; give more text"
    ):
        list(Perplexity().rows(session(texts)))


@pytest.mark.parametrize(
    "measure", [Needle((120,)), RecallMeasure(), RulerMeasure(("single",)), RulerMeasure(("common",)), Speed()]
)
@pytest.mark.parametrize("texts", [{}, {"a": [], "b": []}])
def test_prompts_are_not_made_of_empty_texts(measure: Measure, texts: dict[str, list[int]], tokenizer: Any) -> None:
    standing = session(texts, tokenizer=tokenizer)
    with pytest.raises(kvpass.KVPassError, match="a text of 0 tokens is too short to measure anything"):
        next(iter(measure.rows(standing)))


@pytest.mark.parametrize(
    ("name", "message"), [("restart", "restart=1: must be 0 or at least 2"), ("tokens", "tokens=1: must be at least 2")]
)
def test_a_stream_with_nothing_to_score_is_refused(name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        StreamMeasure(**{name: 1})


def test_a_stream_begins_anew_where_its_cache_is_emptied() -> None:
    standing = session({"a": [5] * 6, "b": [7] * 20})
    rows = list(StreamMeasure(tokens=16, restart=6, parts=3).rows(standing))
    assert [follow for _, (follow,) in standing.scored] == [[5] * 5, [5, BOS, 7, 7, 7], [7] * 5]
    assert {tuple(context) for (context,), _ in standing.scored} == {(BOS,)}
    assert [row["tokens"] for row in rows] == [6, 11, 16]
    assert [math.log(row["perplexity"]) for row in rows] == pytest.approx([5, 26 / 5, 7])
    columns = StreamMeasure().columns(rows)
    assert math.log(columns["perplexity"]) == pytest.approx((25 + 26 + 35) / 15)
    assert math.log(columns["last quarter"]) == pytest.approx(7)


def test_a_stream_cannot_be_fed_whole() -> None:
    with pytest.raises(PolicyError, match="prefill='whole'"):
        list(StreamMeasure().rows(session({"a": [1] * 99}, "whole")))


@pytest.mark.parametrize("measure", [Passkey((120,), (0.0, 0.5, 1.0), 3), Needle((120,), (0.0, 0.5, 1.0), 3)])
def test_a_secret_is_planted_at_its_depth(measure: Passkey | Needle, tokenizer: Any) -> None:
    seen: list[tuple[int, str]] = []

    def answer(prompt: Sequence[int]) -> str:
        text = tokenizer.decode(prompt)
        digits = next(word.strip(".") for word in text.split() if word.strip(".").isdigit() and len(word) >= 5)
        seen.append((len(prompt), text))
        return f" {digits}." if text.index(digits) < len(text) / 3 else "12"

    texts = {"a": tokenizer("some words of a text without figures\n" * 40)["input_ids"]}
    rows = list(measure.rows(session(texts, tokenizer=tokenizer, answer=answer)))
    assert {length for length, _ in seen} == {120}
    assert len({text for _, text in seen}) == 9  # secrets differ
    assert [(row["depth"], row["accuracy"]) for row in rows] == [(0.0, 1.0), (0.5, 0.0), (1.0, 0.0)]
    assert [row[CACHED_SHARE] for row in rows] == [1.0, 0.0, 0.0]
    columns = measure.columns(rows)
    assert (columns["accuracy"], columns[CACHED_SHARE], columns["120 at 50%"]) == pytest.approx((1 / 3, 1 / 3, 0))
    assert list(measure.rows(session(texts, tokenizer=tokenizer, answer=answer))) == rows  # drawn by the seed


def test_mentions_are_whole_numbers_at_every_place() -> None:
    assert mentions([7, 1, 2, 9, 1, 2], [1, 2]) == [[1, 2], [4, 5]]
    assert mentions([7, 12, 9], [1, 2]) == [[0, 1, 2]]  # merged with its neighbours


def test_a_prompt_that_is_too_short_is_refused(tokenizer: Any) -> None:
    with pytest.raises(PolicyError, match="length=10"):
        list(Passkey((10,)).rows(session({}, tokenizer=tokenizer)))


def test_pairs_stand_at_their_distances(tokenizer: Any) -> None:
    measure = RecallMeasure((16, 64, 40), trials=3)
    text = measure.planted(session({"a": list(range(100, 900))}, tokenizer=tokenizer))
    assert text.distances == measure.distances
    for number, distance in enumerate(measure.distances):
        end = text.text.shape[1] - distance
        assert torch.equal(text.text[:, end - text.pairs.shape[2] : end], text.pairs[:, number])
    with pytest.raises(PolicyError, match="distances"):
        RecallMeasure((16, 17)).planted(session({"a": [5]}, tokenizer=tokenizer))


def test_texts_are_a_ring() -> None:
    standing = session({"a": [1, 2, 3], "b": [4, 5]})
    assert standing.filler(3, 4) == [4, 5, 1, 2]
    assert standing.filler(10, 7) == [1, 2, 3, 4, 5, 1, 2]
