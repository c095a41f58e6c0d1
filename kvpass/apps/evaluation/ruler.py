"""Define synthetic tasks after RULER.

"What's the Real Context Size of Your Long-Context Language Models?" https://arxiv.org/abs/2404.06654

Needles among other needles, variables that are assigned to each other, and the most common words of a list.  The
question stands at the end of the prompt, or comes as a separate turn after the prompt was compressed: then the
policy cannot know the question.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvpass.apps.evaluation.retrieval import PLACES, lighthouse, noise
from kvpass.apps.evaluation.session import Row, Session
from kvpass.arguments import require

ANSWER = 48
"""The most tokens of an answer of five words."""
COMMON, FREQUENT, CODED = 5, 3, 24
"""Words that a question asks for: common words, and frequent words among a number of made-up words."""
CHAIN = 3
"""Variables that have the value asked for, one directly."""
MIN_WORDS = 4 * CODED
POOL = 20_000
"""Tokens of the texts from which words are drawn."""
WORD = re.compile(r"\b[a-z]{4,7}\b")


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem, whose context can have any length.

    Attributes:
        question: text up to where the answer is expected.
        answers: strings; the share of them that the answer has is the score.
        context: returns at most a given number of token ids that the question is about.
    """

    question: str
    answers: tuple[str, ...]
    context: Callable[[int], list[int]]


def needles(session: Session, draw: random.Random, distractors: int) -> Task:
    """Hide numbers of several places in surrounding text, and ask for one of them."""
    places = draw.sample(PLACES, 1 + distractors)
    numbers = [str(number) for number in draw.sample(range(10_000, 100_000), len(places))]
    statements, questions = zip(*map(lighthouse, places, numbers), strict=True)
    target, start = draw.randrange(len(places)), draw.randrange(2**20)
    context = _hide(session, draw, statements, lambda count: session.filler(start, count))
    return Task(questions[target], (numbers[target],), context)


def variables(session: Session, draw: random.Random) -> Task:
    """Hide chains of assignments in noise, and ask for all variables that have a value."""
    names = ["".join(draw.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 4)) for _ in range(2 * CHAIN)]
    number, distractor = draw.sample(range(10_000, 100_000), 2)
    sentences = []
    for chain, start in ((names[:CHAIN], number), (names[CHAIN:], distractor)):
        sentences += [f"\nVAR {chain[0]} = {start}\n"]
        sentences += [f"\nVAR {later} = VAR {earlier}\n" for earlier, later in itertools.pairwise(chain)]
    question = f"\nThe {CHAIN} variables that have the value {number} are: "
    context = _hide(session, draw, sentences, functools.partial(noise, session))
    return Task(question, tuple(names[:CHAIN]), context)


def common_words(session: Session, draw: random.Random) -> Task:
    """List words; every second one is one of a few common words."""
    text = session.loaded.tokenizer.decode(session.filler(draw.randrange(2**20), POOL))
    pool = sorted(set(WORD.findall(text)))
    require(len(pool) > 10 * COMMON, "texts", len(pool), "must have more different words")
    draw.shuffle(pool)
    common, rare = pool[:COMMON], pool[COMMON:]

    def words(count: int) -> list[str]:
        return [common[n // 2 % COMMON] if n % 2 else rare[n // 2 % len(rare)] for n in range(count)]

    question = f"\nThe {COMMON} most common words of the list are: "
    return Task(question, tuple(common), _numbered_list(session, draw, words))


def frequent_words(session: Session, draw: random.Random) -> Task:
    """List made-up words, the n-th with a frequency in proportion to 1 / n^2."""
    pairs = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    made_up = ["".join(draw.sample(pairs, 3)) for _ in range(CODED)]
    normaliser = sum(1 / n**2 for n in range(1, CODED + 1))

    def words(count: int) -> list[str]:
        return [word for n, word in enumerate(made_up, start=1) for _ in range(round(count / n**2 / normaliser))]

    question = f"\nThe {FREQUENT} most frequent words of the list are: "
    return Task(question, tuple(made_up[:FREQUENT]), _numbered_list(session, draw, words))


def _hide(
    session: Session, draw: random.Random, sentences: Sequence[str], surrounding_text: Callable[[int], list[int]]
) -> Callable[[int], list[int]]:
    """Return a context of sentences, in their order, at random positions of surrounding text."""
    encoded = [session.encode(sentence) for sentence in sentences]
    depths = sorted(draw.random() for _ in encoded)

    def context(max_tokens: int) -> list[int]:
        count = max_tokens - sum(map(len, encoded))
        require(count >= 0, "length", max_tokens, f"must have room for the {max_tokens - count} tokens of the task")
        text, ids, used = surrounding_text(count), list[int](), 0
        for sentence_ids, depth in zip(encoded, depths, strict=True):
            ids += [*text[used : round(depth * count)], *sentence_ids]
            used = round(depth * count)
        return [*ids, *text[used:]]

    return context


def _numbered_list(
    session: Session, draw: random.Random, words: Callable[[int], list[str]]
) -> Callable[[int], list[int]]:
    """Return a context of words as a numbered list in random order; `words` returns about as many as asked."""
    seed = draw.random()

    def encoded_list(count: int) -> list[int]:
        list_words = words(count)
        random.Random(seed).shuffle(list_words)
        return session.encode(" ".join(f"{number}. {word}" for number, word in enumerate(list_words, start=1)))

    def context(max_tokens: int) -> list[int]:
        fitting = bisect.bisect_right(range(max_tokens), max_tokens, key=lambda count: len(encoded_list(count))) - 1
        require(fitting >= MIN_WORDS, "length", max_tokens, f"must have room for a list of {MIN_WORDS} words")
        return encoded_list(fitting)

    return context


TASKS: dict[str, Callable[[Session, random.Random], Task]] = {
    "single": functools.partial(needles, distractors=0),
    "multikey": functools.partial(needles, distractors=3),
    "variables": variables,
    "common": common_words,
    "frequent": frequent_words,
}
"""The tasks by name; `kvpass.apps.cli.RULER_TASKS` has the names."""


@dataclasses.dataclass(frozen=True)
class RulerMeasure:
    """The share of the strings asked for that greedy decoding gives, for each task.

    Attributes:
        lengths: tokens of context and question together.
        trials: problems for each task and length.
        agnostic: whether the question comes as a separate turn.
        seed: the seed of all draws.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = (1024,)
    trials: int = 4
    agnostic: bool = False
    seed: int = 0
    name: ClassVar[str] = "ruler"
    x_key: ClassVar[str] = "length"
    y_key: ClassVar[str] = "accuracy"

    @property
    def needed_slots(self) -> int:
        return max(self.lengths) + ANSWER + 16

    def rows(self, session: Session) -> Iterator[Row]:
        """Yield a row for each task and length; PolicyError for a length without room for the task."""
        for task in self.tasks:
            for length in self.lengths:
                scores = [self._score(session, *self.problem(session, task, length, n)) for n in range(self.trials)]
                yield {"task": task, "length": length, "accuracy": sum(scores) / len(scores), "trials": len(scores)}

    def problem(
        self, session: Session, task: str, length: int, trial: int
    ) -> tuple[list[int], list[int], tuple[str, ...]]:
        """Return context, question and answers; equal arguments give equal problems."""
        problem = TASKS[task](session, random.Random(f"ruler {self.seed} {task} {length} {trial}"))
        question = session.encode(problem.question)
        return [session.loaded.bos, *problem.context(length - 1 - len(question))], question, problem.answers

    def _score(self, session: Session, context: list[int], question: list[int], answers: tuple[str, ...]) -> float:
        turns = [context, question] if self.agnostic else [[*context, *question]]
        answer = session.answer_to(turns, ANSWER)
        return sum(expected in answer for expected in answers) / len(answers)

    def columns(self, rows: Sequence[Row]) -> Row:
        """Return the mean of each task over the lengths."""
        by_task = collections.defaultdict(list)
        for row in rows:
            by_task[row["task"]].append(row["accuracy"])
        return {task: sum(values) / len(values) for task, values in by_task.items()}
