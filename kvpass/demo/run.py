"""The main job: what every policy still recalls, one unbroken stream, documents, and completions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvpass import policies
from kvpass.demo import crew, plots, recall, tables
from kvpass.demo.crew import Task
from kvpass.demo.job import Job, prepare
from kvpass.demo.recall import AT_ONCE, LATER, Question, Recall
from kvpass.demo.settings import PARTS, Settings
from kvpass.demo.stream import Run
from kvpass.errors import KVPassError

Outcomes = Mapping[str, Any]  # by policy: what came of it, or the reason why it did not run

TAIL = 32  # tokens of a prompt that are written down
WHAT_TO_SEE = (
    "Pairs of a key and a value stand in the text, one at each distance and each said twice, and every policy is asked "
    "for all of them: a 0 is where it has let the pair go. "
    "After the text nobody knew what would be asked, so that only what has been of use before can stay; at the end of "
    "a prompt a policy that looks at the question can keep the answer."
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the demo: a method of `Job` for each policy, and `show`, which makes tables and pictures."""

    name: str
    method: str
    policies: list[str]
    ticks: int
    show: Callable[[Job, Outcomes], None]

    @property
    def tasks(self) -> list[Task]:
        return [Task(self.name, self.method, policy, self.ticks) for policy in self.policies]


def main(settings: Settings) -> None:
    """Print the tables and completions, and write tables and pictures to `settings.out`.

    Raises:
        KVPassError: a policy, the model, the text or the folder is not what it should be.
    """
    for name in settings.policies:
        policies.get(name)
    _make_folder(settings.out)
    job = prepare(settings)
    perform(job, parts(job))
    print(f"\nTables and pictures are in {settings.out}/")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVPassError(f"cannot write to the folder {path}: {error}") from error


def parts(job: Job) -> list[Part]:
    """What the demo consists of; a part without policies, or one that was not asked for, is left out."""
    settings = job.settings
    every = [
        Part("recall", "recall", settings.remembering, job.planted_pieces, show_recall),
        Part("stream", "stream_unbroken", settings.streamed, job.stream.shape[1], show_stream),
        Part("documents", "stream_documents", settings.chosen, job.documents.shape[1], show_documents),
        Part("completions", "complete", settings.remembering, settings.new_tokens, show_completions),
    ]
    return [part for part in every if part.policies and part.name in (settings.parts or PARTS)]


def perform(job: Job, chosen: list[Part]) -> None:
    """Run all parts on one bar; each is shown as soon as its last policy is through."""
    tasks = [task for part in chosen for task in part.tasks]
    with tqdm(total=sum(task.ticks for task in tasks), unit="step", smoothing=0.05, dynamic_ncols=True) as bar:

        def progress(task: Task, count: int) -> None:
            bar.set_description(f"{task.part}: {task.policy}", refresh=False)
            bar.update(count)

        outcomes = crew.perform(job, tasks, progress)
        for part in chosen:
            done = {task.policy: outcome for task, outcome in _take(outcomes, len(part.policies))}
            with tqdm.external_write_mode():
                part.show(job, done)


def _take(outcomes: crew.Outcomes, count: int) -> Iterator[tuple[Task, Any]]:
    return (next(outcomes) for _ in range(count))


def show_recall(job: Job, outcomes: Outcomes) -> None:
    settings = job.settings
    title = f"Share of planted words that are recalled, by distance in tokens, {_budgets(settings)}"
    rows = [row for way in (LATER, AT_ONCE) for row in tables.recalled(way, outcomes)]
    _write_table(settings.out / "recall.json", f"{title}; {job.memory.name}. {WHAT_TO_SEE}", rows)
    found = {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, Recall)}
    if found:
        plots.save(plots.recall_figure(found, title), settings.out / "recall.png", title)


def show_documents(job: Job, outcomes: Outcomes) -> None:
    settings, subject = job.settings, job.subject
    rows, length = job.documents.shape
    caption = (
        f"{rows} documents of {length} tokens, each from an empty cache; {subject.name}, "
        f"{_budgets(settings)}. The documents are {rows} rows of one batch, which do not see each other: perplexity "
        f"and cache are as one by one, tokens per second are those of {rows} rows together, compilation left out."
    )
    _write_table(settings.out / "documents.json", caption, [tables.cost(*item) for item in outcomes.items()])
    runs, title = _successes(outcomes), f"{rows} documents of {length} tokens, {_budgets(settings)}"
    _write_curves(settings.out / "documents.png", runs, min(128, length // 4), title, None)
    if runs:
        title = f"Positions kept in layer 0, head 0, first document, {_budgets(settings)}"
        snapshots = {policy: run.snapshots for policy, run in runs.items()}
        plots.save(plots.kept_figure(snapshots, length, title), settings.out / "kept.png", title)


def show_stream(job: Job, outcomes: Outcomes) -> None:
    settings, subject = job.settings, job.subject
    title = f"One unbroken stream of {job.stream.shape[1]} tokens, {_budgets(settings)}"
    trained = f"trained on {subject.trained} positions" if subject.trained else "trained range unknown"
    caption = f"{title}; {subject.name}, {trained}."
    rows = [tables.cost_along(policy, outcome, subject.trained) for policy, outcome in outcomes.items()]
    _write_table(settings.out / "stream.json", caption, rows)
    window = min(512, job.stream.shape[1] // 4)
    _write_curves(settings.out / "stream.png", _successes(outcomes), window, title, subject.trained)


def show_completions(job: Job, outcomes: Outcomes) -> None:
    settings, planted = job.settings, job.planted
    caption = f"What is sampled after the key of a pair that was planted far back, {_budgets(settings)}."
    asked = [] if isinstance(planted, KVPassError) else recall.questions(planted)
    rows = tables.answered([_in_words(job, question) for question in asked], outcomes)
    tables.write(settings.out / "completions.json", caption, rows)
    print(f"\n{caption}")
    print(tables.conversation(rows), flush=True)


def _in_words(job: Job, question: Question) -> tables.Row:
    decode = job.memory.tokenizer.decode
    return {
        "distance": question.distance,
        "planted": decode(question.planted[:-1]),
        "prompt": decode(question.prompt[-TAIL:]),
    }


def _successes(outcomes: Outcomes) -> dict[str, Run]:
    return {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, Run)}


def _budgets(settings: Settings) -> str:
    """The budget in words, and which policies have another."""
    others = [f"{name} {slots or 'none'}" for name, slots in _slots(settings) if slots != settings.budget]
    return f"budget {settings.budget} ({', '.join(others)})" if others else f"budget {settings.budget}"


def _slots(settings: Settings) -> Iterator[tuple[str, int | None]]:
    for name in settings.chosen:
        with contextlib.suppress(KVPassError):  # its row says why
            yield name, settings.slots(settings.policy(name), None)


def _write_table(path: Path, caption: str, rows: Iterable[tables.Row]) -> None:
    rows = list(rows)
    tables.write(path, caption, rows)
    print("\n" + tables.text(caption, rows), flush=True)


def _write_curves(path: Path, runs: Mapping[str, Run], window: int, title: str, trained: int | None) -> None:
    if runs:
        plots.save(plots.perplexity_figure(runs, window, title, trained), path, title)
