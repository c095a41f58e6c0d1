"""The main job: what every policy still recalls, one unbroken stream, documents, and completions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvpass import policies
from kvpass.apps.demo import plots, recall, tables, worker_pool
from kvpass.apps.demo.job import Job, prepare
from kvpass.apps.demo.recall import Question, RecallOutcome
from kvpass.apps.demo.settings import PARTS, DemoSettings
from kvpass.apps.demo.stream import StreamRun
from kvpass.apps.demo.worker_pool import Task
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
class DemoPart:
    """One part of the demo.

    Attributes:
        method: of `Job`, called for each policy; parts may share what it gives.
        ticks: of `method`.
        caption: of the part's table.
        rows: of one policy in it; None for a part that prints all at once.
        finish: makes what needs the outcomes of all policies, such as pictures.
    """

    name: str
    method: str
    policies: list[str]
    ticks: int
    caption: str
    rows: Callable[[str, Any], list[tables.Row]] | None
    finish: Callable[[Job, Outcomes], None]

    @property
    def tasks(self) -> list[Task]:
        return [Task(self.method, policy, self.ticks) for policy in self.policies]


def main(settings: DemoSettings) -> None:
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


def parts(job: Job) -> list[DemoPart]:
    """What the demo consists of; a part without policies, or one that was not asked for, is left out."""
    settings = job.settings
    asked = "recall", settings.remembering, job.planted_pieces
    every = [
        DemoPart("recall", *asked, _recall_caption(job), tables.recalled, finish_recall),
        _streamed(job),
        DemoPart(
            "documents",
            "stream_documents",
            settings.chosen,
            job.documents.shape[1],
            _documents_caption(job),
            lambda policy, outcome: [tables.cost(policy, outcome)],
            finish_documents,
        ),
        DemoPart("completions", *asked, _completions_caption(job), None, finish_completions),
    ]
    return [part for part in every if part.policies and part.name in (settings.parts or PARTS)]


def _streamed(job: Job) -> DemoPart:
    trained, length = job.subject.trained, job.stream.shape[1]

    def rows(policy: str, outcome: StreamRun | KVPassError) -> list[tables.Row]:
        return [tables.cost_along(policy, outcome, trained)]

    return DemoPart(
        "stream", "stream_unbroken", job.settings.streamed, length, _stream_caption(job), rows, finish_stream
    )


def perform(job: Job, chosen: list[DemoPart]) -> None:
    """StreamRun all parts on one bar; each table fills up as policies come through."""
    tasks = list(dict.fromkeys(task for part in chosen for task in part.tasks))
    with tqdm(total=sum(task.ticks for task in tasks), unit="step", smoothing=0.05, dynamic_ncols=True) as bar:

        def progress(task: Task, count: int) -> None:
            bar.set_description(f"{task.method}: {task.policy}".replace("_", " "), refresh=False)
            bar.update(count)

        outcomes, done = worker_pool.perform(job, tasks, progress), dict[Task, Any]()
        for part in chosen:
            _show(job, part, _until(part.tasks, outcomes, done))


def _until(tasks: list[Task], outcomes: worker_pool.Outcomes, done: dict[Task, Any]) -> Iterator[tuple[str, Any]]:
    """Each policy with its outcome; what comes first is put by."""
    for wanted in tasks:
        while wanted not in done:
            task, outcome = next(outcomes)
            done[task] = outcome
        yield wanted.policy, done[wanted]


def _show(job: Job, part: DemoPart, outcomes: Iterator[tuple[str, Any]]) -> None:
    """Print a part's table row by row, write it, and finish the part."""
    found: dict[str, Any] = {}
    with tqdm.external_write_mode():
        table = tables.PrintedTable(part.caption) if part.rows else None
    for policy, outcome in outcomes:
        found[policy] = outcome
        if table and part.rows:
            with tqdm.external_write_mode():
                table.add(part.rows(policy, outcome))
    if table:
        tables.write(job.settings.out / f"{part.name}.json", part.caption, table.rows)
    with tqdm.external_write_mode():
        part.finish(job, found)


def _recall_caption(job: Job) -> str:
    return f"{_recall_title(job)}; {job.memory.name}. {WHAT_TO_SEE}"


def _recall_title(job: Job) -> str:
    return f"Share of planted words that are recalled, by distance in tokens, {_budgets(job.settings)}"


def _stream_caption(job: Job) -> str:
    trained = job.subject.trained
    range_ = f"trained on {trained} positions" if trained else "trained range unknown"
    return f"{_stream_title(job)}; {job.subject.name}, {range_}."


def _stream_title(job: Job) -> str:
    return f"One unbroken stream of {job.stream.shape[1]} tokens, {_budgets(job.settings)}"


def _documents_caption(job: Job) -> str:
    rows, length = job.documents.shape
    return (
        f"{rows} documents of {length} tokens, each from an empty cache; {job.subject.name}, "
        f"{_budgets(job.settings)}. The documents are {rows} rows of one batch, which do not see each other: "
        f"perplexity and cache are as one by one, tokens per second are those of {rows} rows together, "
        "compilation left out."
    )


def _completions_caption(job: Job) -> str:
    return f"What is sampled after the key of a pair that was planted far back, {_budgets(job.settings)}."


def finish_recall(job: Job, outcomes: Outcomes) -> None:
    found = {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, RecallOutcome)}
    if found:
        title = _recall_title(job)
        plots.save(plots.recall_figure(found, title), job.settings.out / "recall.png", title)


def finish_stream(job: Job, outcomes: Outcomes) -> None:
    window = min(512, job.stream.shape[1] // 4)
    path = job.settings.out / "stream.png"
    _write_curves(path, _successes(outcomes), window, _stream_title(job), job.subject.trained)


def finish_documents(job: Job, outcomes: Outcomes) -> None:
    settings, (rows, length) = job.settings, job.documents.shape
    runs, title = _successes(outcomes), f"{rows} documents of {length} tokens, {_budgets(settings)}"
    _write_curves(settings.out / "documents.png", runs, min(128, length // 4), title, None)
    if runs:
        title = f"Positions kept in layer 0, head 0, first document, {_budgets(settings)}"
        snapshots = {policy: run.snapshots for policy, run in runs.items()}
        plots.save(plots.kept_figure(snapshots, length, title), settings.out / "kept.png", title)


def finish_completions(job: Job, outcomes: Outcomes) -> None:
    planted, caption = job.planted, _completions_caption(job)
    asked = [] if isinstance(planted, KVPassError) else recall.questions(planted)
    said = {policy: _decoded(job, outcome) for policy, outcome in outcomes.items()}
    rows = tables.answered([_in_words(job, question) for question in asked], said)
    tables.write(job.settings.out / "completions.json", caption, rows)
    print(f"\n{caption}")
    print(tables.conversation(rows), flush=True)


def _decoded(job: Job, outcome: RecallOutcome | KVPassError) -> list[str] | KVPassError:
    """What was sampled, up to the end of the line."""
    if isinstance(outcome, KVPassError):
        return outcome
    said: list[str] = job.memory.tokenizer.batch_decode(outcome.sampled, skip_special_tokens=True)
    return [text.partition("\n")[0] for text in said]


def _in_words(job: Job, question: Question) -> tables.Row:
    decode = job.memory.tokenizer.decode
    return {
        "distance": question.distance,
        "planted": decode(question.planted[:-1]),
        "prompt": decode(question.prompt[-TAIL:]),
    }


def _successes(outcomes: Outcomes) -> dict[str, StreamRun]:
    return {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, StreamRun)}


def _budgets(settings: DemoSettings) -> str:
    """The budget in words, and which policies have another."""
    others = [f"{name} {slots or 'none'}" for name, slots in _slots(settings) if slots != settings.budget]
    return f"budget {settings.budget} ({', '.join(others)})" if others else f"budget {settings.budget}"


def _slots(settings: DemoSettings) -> Iterator[tuple[str, int | None]]:
    for name in settings.chosen:
        with contextlib.suppress(KVPassError):  # its row says why
            yield name, settings.slots(settings.policy(name), None)


def _write_curves(path: Path, runs: Mapping[str, StreamRun], window: int, title: str, trained: int | None) -> None:
    if runs:
        plots.save(plots.perplexity_figure(runs, window, title, trained), path, title)
