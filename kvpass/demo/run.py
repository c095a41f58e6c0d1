"""The main job: documents, one unbroken stream and completions, for every policy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

import kvpass
from kvpass import policies
from kvpass.demo import corpus, meter, plots, stream, tables
from kvpass.demo.stream import Run
from kvpass.demo.subject import Subject, load, read_texts
from kvpass.errors import KVPassError
from kvpass.policies import Policy

T = TypeVar("T")
Outcomes = Mapping[str, T | KVPassError]


# Ten minutes on two cores, most of them spent compiling, have room for these; "all" stands for every policy.
SHOWN = ("full", "window", "streaming", "h2o", "d2o", "sage", "random")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        model: name or path for transformers; None is the bundled model.
        policies: names; empty means all.
        budget: tokens kept, for every policy that evicts.
        text: a UTF-8 file; None is the held-out part of the standard library.
        out: the folder for tables and pictures.
        documents, length: how many documents of how many tokens.
        stream: tokens of the unbroken stream.
        new_tokens: length of a completion.
        every: steps between two snapshots of the held positions.
        threads: of torch; None leaves them as they are.
    """

    model: str | None = None
    policies: tuple[str, ...] = ()
    budget: int = 256
    text: Path | None = None
    out: Path = Path("out")
    documents: int = 4
    length: int = 2048
    stream: int = 8000
    new_tokens: int = 48
    every: int = 16
    threads: int | None = None

    @property
    def chosen(self) -> list[str]:
        if "all" in self.policies:
            return policies.names()
        return list(dict.fromkeys(self.policies or SHOWN))

    @property
    def streamed(self) -> list[str]:
        """The policies that number what they hold, and the full cache, which leaves the trained range."""
        classes = {name: policies.get(name) for name in self.chosen}
        return [name for name, policy in classes.items() if policy.positions == "cache" or not policy.evicts]

    def fitted(self, subject: Subject) -> Settings:
        """The same, with documents inside the trained range, and the stream inside a table of positions."""
        limit = subject.trained or max(self.length, self.stream)
        return dataclasses.replace(
            self,
            length=min(self.length, limit),
            stream=min(self.stream, limit) if subject.tabled else self.stream,
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """A model with its tokens: documents int64 [B, T] and one stream int64 [1, S]."""

    settings: Settings
    subject: Subject
    documents: Tensor
    stream: Tensor

    @property
    def prompt(self) -> Tensor:
        """[1, P], the end of the stream: two budgets long if that fits, so that something is evicted."""
        limit = self.subject.trained or self.stream.shape[1]
        count = max(1, min(2 * self.settings.budget, limit - self.settings.new_tokens))
        return self.stream[:, -count:]


def main(settings: Settings) -> None:
    """Print the tables and completions, and write tables and pictures to `settings.out`.

    Raises:
        KVPassError: a policy, the model, the text or the folder is not what it should be.
    """
    for name in settings.policies:
        policies.get(name)
    _make_folder(settings.out)
    job = prepare(settings)
    with torch.inference_mode(), _threads(settings.threads):
        show_documents(job)
        show_stream(job)
        show_completions(job)
    print(f"\nTables and pictures are in {settings.out}/")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVPassError(f"cannot write to the folder {path}: {error}") from error


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Run with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare(settings: Settings) -> Job:
    """Load the model and cut the text."""
    texts = read_texts(settings.text)
    subject = load(settings.model)
    fitted, tokens = settings.fitted(subject), subject.encode(texts)
    documents = corpus.documents(tokens, fitted.documents, fitted.length, subject.bos)
    unbroken = corpus.unbroken(tokens, fitted.stream, subject.bos)
    return Job(fitted, subject, torch.tensor(documents), torch.tensor([unbroken]))


def show_documents(job: Job) -> None:
    settings, subject = job.settings, job.subject
    outcomes = _streams(job, "documents", settings.chosen, job.documents)
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


def show_stream(job: Job) -> None:
    settings, subject = job.settings, job.subject
    outcomes = _streams(job, "stream", settings.streamed, job.stream)
    if not outcomes:
        return
    title = f"One unbroken stream of {job.stream.shape[1]} tokens, {_budgets(settings)}"
    trained = f"trained on {subject.trained} positions" if subject.trained else "trained range unknown"
    caption = f"{title}; {subject.name}, {trained}."
    rows = [tables.cost_along(policy, outcome, subject.trained) for policy, outcome in outcomes.items()]
    _write_table(settings.out / "stream.json", caption, rows)
    window = min(512, job.stream.shape[1] // 4)
    _write_curves(settings.out / "stream.png", _successes(outcomes), window, title, subject.trained)


def show_completions(job: Job) -> None:
    settings, prompt = job.settings, job.prompt
    # Inductor would take half a minute per policy for the few tokens of a completion.
    outcomes = _each(job, "completions", settings.chosen, 1, lambda tick: complete(job), inner="eager")
    caption = f"Greedy completions of a prompt of {prompt.shape[1]} tokens, {_budgets(settings)}, inner='eager'."
    rows: list[tables.Row] = [
        {"policy": policy, "error": str(outcome)}
        if isinstance(outcome, KVPassError)
        else {"policy": policy, "completion": outcome}
        for policy, outcome in outcomes.items()
    ]
    start = job.subject.tokenizer.decode(prompt[0])
    tables.write(settings.out / "completions.json", caption, [{"prompt": start}, *rows])
    print(f"\n{caption}\n\n... {start[-300:]}")
    for row in rows:
        print(f"\n--- {row['policy']} ---\n{row.get('completion') or row.get('error')}")


def complete(job: Job) -> str:
    """What `generate` adds to the prompt."""
    prompt, tokenizer = job.prompt, job.subject.tokenizer
    ids = job.subject.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=job.settings.new_tokens,
        do_sample=False,
        pad_token_id=job.subject.bos,
    )
    completion: str = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
    return completion


def _streams(job: Job, name: str, chosen: list[str], tokens: Tensor) -> dict[str, Run | KVPassError]:
    """Stream tokens [B, T] under each policy."""

    def one(tick: Callable[[], object]) -> Run:
        return stream.run(job.subject.model, tokens, every=job.settings.every, tick=tick)

    return _each(job, name, chosen, tokens.shape[1], one, room=tokens.shape[1])


def _each(
    job: Job,
    name: str,
    chosen: list[str],
    ticks: int,
    action: Callable[[Callable[[], object]], T],
    inner: str = "inductor",
    room: int | None = None,
) -> dict[str, T | KVPassError]:
    """The outcome of `action(tick)` under each policy, on a bar that expects `ticks` for each.

    Policies that never evict get `room` slots, if that is known: it saves compiling for each doubling.
    """
    outcomes: dict[str, T | KVPassError] = {}
    with tqdm(total=ticks * len(chosen), unit="step", smoothing=0.05, dynamic_ncols=True) as bar:
        for done, policy in enumerate(chosen, 1):
            bar.set_description(f"{name}: {policy}")
            budget = job.settings.budget if policies.get(policy).evicts else room
            outcomes[policy] = attempt(job.subject.model, policy, budget, inner, lambda: action(bar.update))
            bar.update(ticks * done - bar.n)
    return outcomes


def attempt(
    model: Any, policy: str | Policy, budget: int | None, inner: str, action: Callable[[], T]
) -> T | KVPassError:
    """`action()` with the model compiled for the policy; the reason if kvpass refuses."""
    meter.forget_compiled_code()
    try:
        kvpass.compile(model, policy=policy, budget=budget, inner=inner)
        return action()
    except Exception as error:
        refusals = [reason for reason in _reasons(error) if isinstance(reason, KVPassError)]
        if not refusals:
            raise
        return refusals[0]


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what lies under it: Dynamo wraps what a backend raises."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def _successes(outcomes: Mapping[str, Run | KVPassError]) -> dict[str, Run]:
    return {policy: outcome for policy, outcome in outcomes.items() if isinstance(outcome, Run)}


def _budgets(settings: Settings) -> str:
    return f"budget {settings.budget} (none for full)" if "full" in settings.chosen else f"budget {settings.budget}"


def _write_table(path: Path, caption: str, rows: Iterable[tables.Row]) -> None:
    rows = list(rows)
    tables.write(path, caption, rows)
    print("\n" + tables.text(caption, rows), flush=True)


def _write_curves(path: Path, runs: Mapping[str, Run], window: int, title: str, trained: int | None) -> None:
    if runs:
        plots.save(plots.perplexity_figure(runs, window, title, trained), path, title)
