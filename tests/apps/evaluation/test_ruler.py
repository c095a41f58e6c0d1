"""Test RULER's tasks: answers follow from the context, which has the requested length."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kvpass.apps import corpus
from kvpass.apps.cli import RULER_TASKS
from kvpass.apps.evaluation.ruler import TASKS, RulerMeasure
from kvpass.apps.evaluation.session import Session
from kvpass.apps.models import LoadedModel
from kvpass.errors import PolicyError

TOKENIZER = Path(__file__).parents[3] / "kvpass" / "apps" / "data" / "tokenizer"
Turns = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Reader(Session):
    """A session that answers by a function of the text of all turns, and records the turns."""

    reads: Callable[[str], str] = lambda text: ""
    turns: list[Turns] = dataclasses.field(default_factory=list)

    def answer_to(self, turns: Turns, count: int) -> str:
        self.turns.append(turns)
        return self.reads(self.loaded.tokenizer.decode([token for turn in turns for token in turn]))


@pytest.fixture(scope="module")
def reader() -> Reader:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    texts = {name: tokenizer(text).input_ids for name, text in [*corpus.prose().items()][:20]}
    loop: Any = SimpleNamespace(device=torch.device("cpu"))
    return Reader(LoadedModel("stub", None, tokenizer, None, False), loop, texts, "whole", None)


def needle(text: str) -> str:
    statements = re.findall(r"The lighthouse of (\w+) has (\d+) steps", text)
    return dict(statements)[re.findall(r"The lighthouse of (\w+) has$", text)[0]]


def chained(text: str) -> str:
    held: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        held[name] = held.get(source, source)
    (number,) = re.findall(r"have the value (\d+)", text)
    return ", ".join(name for name, value in held.items() if value == number)


def counted(text: str) -> str:
    (most,) = re.findall(r"The (\d) most", text)
    words = collections.Counter(re.findall(r"\d+\. (\w+)", text))
    return ", ".join(word for word, _ in words.most_common(int(most)))


SOLVED = {"single": needle, "multikey": needle, "variables": chained, "common": counted, "frequent": counted}


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("length", [800, 1300])
@pytest.mark.parametrize("task", TASKS)
def test_who_reads_the_context_can_answer(task: str, length: int, agnostic: bool, reader: Reader) -> None:
    session = dataclasses.replace(reader, reads=SOLVED[task], turns=[])
    (row,) = RulerMeasure((task,), (length,), 3, agnostic, seed=4).rows(session)
    assert row == {"task": task, "length": length, "accuracy": 1, "trials": 3}
    assert all(len(turns) == 1 + agnostic for turns in session.turns)
    for turns in session.turns:
        assert 0.9 * length < sum(map(len, turns)) <= length
    again = dataclasses.replace(session, turns=[])
    _ = [*RulerMeasure((task,), (length,), 3, agnostic, seed=4).rows(again)]
    assert again.turns == session.turns
    assert len({str(turns) for turns in session.turns}) == 3


@pytest.mark.parametrize("task", TASKS)
def test_the_score_is_the_share_of_what_is_asked_for(task: str, reader: Reader) -> None:
    found = TASKS[task](reader, random.Random(1)).answers
    for given, share in ((" and ".join(found), 1), (found[0], 1 / len(found)), ("nothing", 0)):
        session = dataclasses.replace(reader, reads=lambda text, given=given: given)
        measure = RulerMeasure((task,), (900,), 1)
        score = measure._score(session, [1], [2], found)
        assert score == pytest.approx(share)


def test_columns_are_means_of_tasks() -> None:
    rows = [{"task": task, "accuracy": value} for task, value in (("single", 1.0), ("common", 0.2), ("single", 0.5))]
    assert RulerMeasure().columns(rows) == {"single": 0.75, "common": 0.2}


@pytest.mark.parametrize("task", TASKS)
def test_a_context_that_is_too_short_is_refused(task: str, reader: Reader) -> None:
    with pytest.raises(PolicyError, match="must have room for"):
        _ = [*RulerMeasure((task,), (30,), 1).rows(reader)]


def test_the_command_has_the_names() -> None:
    assert tuple(TASKS) == RULER_TASKS
