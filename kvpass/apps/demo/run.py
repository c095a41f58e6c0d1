"""Run the demo: one model under several policies, part by part, with tables that fill up as policies come through."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from tqdm import tqdm

from kvpass import policies, tensor_files
from kvpass.apps import checkpoint, corpus
from kvpass.apps.demo.chat import QUESTIONS, talk
from kvpass.apps.demo.settings import FULL, PARTS, DemoSettings
from kvpass.apps.evaluation import plots
from kvpass.apps.evaluation.perplexity import StreamMeasure, join_parts
from kvpass.apps.evaluation.recall import RecallMeasure
from kvpass.apps.evaluation.retrieval import Passkey
from kvpass.apps.evaluation.session import (
    Loop,
    Measure,
    PositionRecorder,
    PositionSnapshot,
    Row,
    Session,
    UncompiledLoop,
    unless_refused,
)
from kvpass.apps.evaluation.speed import Speed
from kvpass.apps.evaluation.tables import PrintedTable, markdown
from kvpass.apps.models import LoadedModel, load, load_memory, stop_tokens
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import CheckpointError, KVPassError
from kvpass.lowering.float32_products import InFloat32

WIDTH = 100  # characters of a line of an answer
SHOWN = 2  # answers that are printed, the last ones
SINKS = 4
PAGE = "demo.md"


def run_command(parsed: argparse.Namespace) -> None:
    """Run `kvpass demo`; see `main`."""
    names = ("model", "budget", "text", "out", "kv_dtype")
    settings: dict[str, Any] = {name: getattr(parsed, name) for name in names}
    main(DemoSettings(policies=tuple(parsed.policy), parts=tuple(parsed.part), **settings))


def main(settings: DemoSettings) -> None:
    """Print the tables, and write them and the pictures to `settings.out`.

    Raises:
        KVPassError: an invalid policy, or a model, text or folder that cannot be read.
    """
    for text in settings.policies:
        policies.parse(text)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVPassError(f"cannot write to the folder {settings.out}: {error}; choose another with --out") from error
    tensor_files.check_folder(settings.out / PAGE, KVPassError)
    with _quiet():
        Demo(settings).run()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings and bars of other packages out of the tables."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
        yield


@dataclasses.dataclass
class Contender:
    """One policy, or the uncompiled model, with its results so far.

    Attributes:
        loop: decodes tokens; or the reason why kvpass refuses the policy.
        budget: slots; None if nothing is evicted.
        recorder: records the positions in the cache along the book, the only text that a part scores.
    """

    name: str
    loaded: LoadedModel
    loop: Loop | KVPassError
    budget: int | None
    recorder: PositionRecorder


Columns = Callable[[Contender, Sequence[Row]], Row]
"""Makes the cells of a contender in a table from the rows of its measure."""


@dataclasses.dataclass(frozen=True)
class PartResult:
    """A part of the demo: a caption with the measure and the model, a table, and perhaps a picture."""

    caption: str
    rows: list[Row]
    figure: Figure | None = None


class Demo:
    """The model with its contenders, and one method for each part."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings, self.sizes = settings, settings.sizes
        self.loaded, self.bundled = _load_model(settings)
        texts = corpus.texts_of([settings.text] if settings.text else [], self.bundled)
        self.texts = dict(zip(texts, self.loaded.encode(list(texts.values())), strict=True))
        self.contenders = self._contenders(self.loaded)
        self.bar: tqdm[Any] = tqdm(total=self._tokens(), unit="token", dynamic_ncols=True, leave=False, smoothing=0.02)

    def _contenders(self, loaded: LoadedModel) -> list[Contender]:
        stop = stop_tokens(loaded.model, loaded.tokenizer)
        middle = loaded.model.config.num_hidden_layers // 2
        contenders = []
        for text in dict.fromkeys(self.settings.policies):
            policy = policies.parse(text)
            budget = policy.fitting_budget(self.settings.budget) if policy.evicts else None
            loop_settings: dict[str, Any] = dict(kv_dtype=self.settings.kv_dtype, inner=self.settings.inner, stop=stop)
            loop_settings |= dict(budget=budget, prefill_chunk=self.sizes.chunk)
            loop = unless_refused(functools.partial(DecodeLoop, loaded.model, policy, **loop_settings))
            contenders.append(Contender(text, loaded, loop, budget, PositionRecorder(middle)))
        uncompiled = UncompiledLoop(loaded.model, self.sizes.chunk, stop)
        return [*contenders, Contender(FULL, loaded, uncompiled, None, PositionRecorder(middle))]

    def _tokens(self) -> int:
        """Return about how many tokens are fed in all parts."""
        sizes = self.sizes
        tokens_by_part = {
            "chat": len(QUESTIONS) * (25 + sizes.answer),
            "book": self._book_tokens(),
            "retrieval": 5 * sizes.trials * sizes.prompt,
            "cost": 2 * (sizes.timed + sizes.steps),
        }
        return len(self.contenders) * sum(tokens_by_part.get(part, 0) for part in self.settings.parts)

    def run(self) -> None:
        """Show the chosen parts, and write each as soon as it is complete."""
        results: dict[str, PartResult] = {}
        dtype = str(next(self.loaded.model.parameters()).dtype).removeprefix("torch.")
        self.say(f"{self.loaded.name}, {dtype}, budget {self.settings.budget} tokens")
        with self.bar:
            for name in (name for name in PARTS if name in self.settings.parts):
                part: PartResult = getattr(self, name)()
                results[name] = part
                self._write(name, part)
        _write_page(self.settings.out / PAGE, results)
        self.say(f"\nTables and pictures are in {self.settings.out}/")

    def say(self, *lines: str) -> None:
        """Print lines; the bar moves down."""
        with tqdm.external_write_mode():
            print(*lines, sep="\n", flush=True)

    def head(self, caption: str) -> None:
        """Print a caption after an empty line."""
        self.say("", *textwrap.wrap(caption, WIDTH))

    def _write(self, name: str, part: PartResult) -> None:
        text = json.dumps({"caption": part.caption, "rows": part.rows}, indent=1)
        tensor_files.write_text(self.settings.out / f"{name}.json", text + "\n", KVPassError)
        if part.figure is not None:
            with tensor_files.whole_file(self.settings.out / f"{name}.png", KVPassError) as unfinished:
                part.figure.savefig(unfinished, format="png", dpi=110, metadata={"Title": part.caption})

    # -- parts -------------------------------------------------------------------------------------------------------

    def chat(self) -> PartResult:
        """Hold the same conversation with every contender, and print the last answers."""
        caption = f"A chat of {len(QUESTIONS)} questions, answered greedily; the last {SHOWN} answers."
        if not self.loaded.tokenizer.chat_template:
            self.head(f"No chat: {self.loaded.name} has no chat template.")
            return PartResult(caption, [])
        self.head(caption)
        rows: list[Row] = []
        for contender, turns in self._each("chat", lambda session: list(talk(session, self.sizes.answer))):
            if isinstance(turns, KVPassError):
                self.say(f"{contender.name}: {turns}")
                continue
            rows += [{"policy": contender.name, **dataclasses.asdict(turn)} for turn in turns]
            for turn in turns[-SHOWN:]:
                answer = textwrap.wrap(" ".join(turn.answer.split()), WIDTH, max_lines=3, placeholder=" ...") or ["-"]
                self.say(
                    f"\n{contender.name}, after {turn.seen} tokens: {turn.question}",
                    textwrap.indent("\n".join(answer), "  "),
                )
        return PartResult(caption, rows)

    def book(self) -> PartResult:
        """Read a book beyond the model's trained range."""
        loaded, sizes, tokens = self.loaded, self.sizes, self._book_tokens()
        trained = loaded.trained_length
        measure = StreamMeasure(tokens, parts=sizes.parts)
        lines: dict[str, list[tuple[float, float]]] = {}

        def columns(contender: Contender, rows: Sequence[Row]) -> Row:
            lines[contender.name] = [(row["tokens"], row["perplexity"]) for row in rows]
            if trained is None or tokens <= trained:
                return {"perplexity": join_parts(rows)}
            # The first token of a part is predicted from the last position of the part before it.
            within = [row for row in rows if row["tokens"] <= trained + 1]
            beyond = [row for row in rows if row["tokens"] > trained + 1]
            return {f"perplexity up to {trained:,}": join_parts(within), "beyond": join_parts(beyond)}

        range_ = "" if trained is None else f", trained on {trained:,} positions"
        name = (
            self.settings.text.name if self.settings.text else "Python's source" if self.bundled else "Python's manual"
        )
        caption = (
            f"Perplexity along {tokens:,} tokens of {name}, fed in chunks of {sizes.chunk}; {loaded.name}{range_}, "
            f"budget {self.settings.budget}."
        )
        rows = self._table("book", caption, measure, columns)
        title = f"Perplexity of {name}, budget {self.settings.budget}"
        figure = plots.lines({title: lines}, "tokens", "perplexity", log_y=True) if lines else None
        if figure is not None and trained is not None and tokens > trained:
            figure.axes[0].axvline(trained, color="black", linestyle=":", linewidth=0.8)
        return PartResult(caption, rows, figure)

    def _book_tokens(self) -> int:
        """Return the tokens of the book, beyond the trained range unless positions come from a table."""
        trained, available = self.loaded.trained_length, sum(len(text) + 1 for text in self.texts.values())
        if trained is None:
            return min(self.sizes.book, available)
        return min(trained if self.loaded.has_position_table else trained + self.sizes.beyond, available)

    def retrieval(self) -> PartResult:
        """Ask for a planted number; ask the bundled model for pairs instead, on which it was trained."""
        sizes, budget = self.sizes, self.settings.budget
        contenders, loaded = self.contenders, self.loaded
        if self.bundled:
            loaded = load_memory()
            contenders = self._contenders(loaded)
            measure: Measure = RecallMeasure(trials=sizes.trials)
            measured, across = "Share of planted pairs that are recalled, by tokens since", "tokens since the pair"
        else:
            measure = Passkey((sizes.prompt,), trials=sizes.trials)
            measured, across = f"Share of passkeys that are found in {sizes.prompt:,} tokens, by depth", "depth"

        def columns(contender: Contender, rows: Sequence[Row]) -> Row:
            label = "{:,}" if self.bundled else "{:.0%}"
            return {label.format(row[measure.x_key]): row[measure.y_key] for row in rows}

        caption = (
            f"{measured}, {sizes.trials} prompts each, fed in chunks of {sizes.chunk}, so the policy evicts before it "
            f"sees the question; {loaded.name}, budget {budget}."
        )
        rows = self._table("retrieval", caption, measure, columns, contenders)
        shares_by_policy = {
            row["policy"]: {name: row[name] for name in [*row][1:]} for row in rows if "error" not in row
        }
        title = f"{'Pairs' if self.bundled else 'Passkeys'} by {across}"
        return PartResult(caption, rows, plots.shares({title: shares_by_policy}, across) if shares_by_policy else None)

    def cost(self) -> PartResult:
        """Time a step and a prompt, and count the bytes of the cache."""
        measure = Speed(self.sizes.timed, new=self.sizes.steps, times=1)
        caption = (
            f"After a prompt of {self.sizes.timed:,} tokens: milliseconds a token, seconds to the first token, and the "
            f"cache; {self.loaded.name}, {torch.get_num_threads()} thread(s), without the time of compiling."
        )
        names = {"ms a step": "ms per token", "time to first token, s": "first token, s", "cache, MiB": "cache, MiB"}

        def columns(contender: Contender, rows: Sequence[Row]) -> Row:
            return {name: rows[0][key] for key, name in names.items()}

        return PartResult(caption, self._table("cost", caption, measure, columns))

    def kept(self) -> PartResult:
        """Say which tokens each policy had cached at the end of the book, in one layer."""
        layer = self.contenders[0].recorder.layer
        caption = f"Tokens that layer {layer}, KV head 0 cached at the end of the book."
        snapshots_by_policy = {
            contender.name: contender.recorder.snapshots
            for contender in self.contenders
            if contender.recorder.snapshots
        }
        table = PrintedTable(len(FULL))
        self.head(caption if snapshots_by_policy else "Nothing was kept: no book was read; add --part book.")
        for name, snapshots in snapshots_by_policy.items():
            self.say(*table.lines({"policy": name, **cached_row(snapshots[-1])}))
        figure = None
        if snapshots_by_policy:
            length = max(snapshot.step for snapshots in snapshots_by_policy.values() for snapshot in snapshots)
            figure = plots.cached_positions(snapshots_by_policy, length, caption, band=max(1, length // 256))
        return PartResult(caption, [dict(row) for row in table.rows], figure)

    # -- shared by parts ----------------------------------------------------------------------------------------------

    def _table(
        self, part: str, caption: str, measure: Measure, columns: Columns, contenders: Sequence[Contender] | None = None
    ) -> list[Row]:
        """Measure every contender, and print a row for each as soon as it is complete."""
        table, rows = PrintedTable(len(FULL)), list[Row]()
        self.head(caption)

        for contender, outcome in self._each(part, lambda session: list(measure.rows(session)), contenders):
            row = {"error": str(outcome)} if isinstance(outcome, KVPassError) else columns(contender, outcome)
            rows.append({"policy": contender.name, **row})
            self.say(*table.lines(rows[-1]))
        return rows

    def _each(
        self, part: str, action: Callable[[Session], Any], contenders: Sequence[Contender] | None = None
    ) -> Iterator[tuple[Contender, Any]]:
        """Yield every contender with the action's result for it, or the reason why kvpass refuses."""
        for contender in contenders or self.contenders:
            self.bar.set_description(f"{part}: {contender.name}")
            if isinstance(contender.loop, KVPassError):
                yield contender, contender.loop
                continue
            watch = contender.recorder if contender.name != FULL else lambda cache: None
            session = Session(
                contender.loaded, contender.loop, self.texts, "chunk", self.sizes.chunk, contender.budget,
                self.bar.update, watch,
            )  # fmt: skip
            # Timed parts run unchanged; other parts take half as long this way, on a CPU without products of 16 bits.
            in_float32 = contender.name == FULL and part != "cost"
            with InFloat32() if in_float32 else contextlib.nullcontext():
                outcome = unless_refused(functools.partial(action, session))
            yield contender, outcome


def _load_model(settings: DemoSettings) -> tuple[LoadedModel, bool]:
    """Return the model, and whether it is the bundled one because the package of the checkpoint is missing."""
    if settings.model not in (None, checkpoint.NAME):
        return load(settings.model, "auto"), False
    try:
        return load(checkpoint.NAME, torch.bfloat16), False
    except CheckpointError as error:
        print(f"This demo runs on small bundled models: {error}")
        return load(None), True


def cached_row(snapshot: PositionSnapshot) -> Row:
    """Return how many of the first tokens, of an unbroken run of recent ones, and of others were cached."""
    cached, recent = set(snapshot.positions), 0
    while snapshot.step - 1 - recent in cached:
        recent += 1
    sinks = len(cached.intersection(range(SINKS)))
    others = sorted(position for position in cached if SINKS <= position < snapshot.step - recent)
    return {
        f"of the first {SINKS}": sinks,
        "recent": recent,
        "between": len(others),
        "median position between": others[len(others) // 2] if others else None,
    }


def _write_page(path: Path, results: dict[str, PartResult]) -> None:
    """Write all tables to one Markdown page."""
    sections = [
        f"## {name}\n\n{part.caption}\n\n{markdown(part.rows) if part.rows else 'Nothing to show.'}"
        for name, part in results.items()
    ]
    tensor_files.write_text(path, "\n\n".join(sections) + "\n", KVPassError)
