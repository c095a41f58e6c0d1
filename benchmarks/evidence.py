"""Compare all policies on a real checkpoint at equal bytes: agreement with the full cache, perplexity and retrieval.

Each process is a run of `kvpass eval` on SmolLM2-135M-Instruct in bfloat16 for a group of policies, which share the
predictions with the full cache. Results are kept in the folder, so that an interrupted run can continue.

- **Agreement**: the beginning of four books (`benchmarks.books`), 2,048 tokens each, teacher-forced in chunks of 32.
- **Retrieval**: tasks after RULER in 1,024 tokens, with the question in the prompt, or in a separate turn after the
  prompt has been compressed.

Bytes are those of the slots, with the metadata of the policy and the scales of rows, as a share of a full cache with
as many tokens in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import apart, books
from benchmarks.equal_bytes import takes, takes_aligner
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from kvpass import policies
from kvpass.apps import checkpoint
from kvpass.apps.evaluation import plots
from kvpass.apps.evaluation.agreement import SAME
from kvpass.apps.evaluation.settings import Result, Results
from kvpass.lowering.formats import KVDtype

TITLE = "All policies at equal bytes"
SHARES = (0.5, 0.25, 0.125, 0.0625)
FORMATS: tuple[KVDtype | None, ...] = (None, "int8", "int4")
QUESTIONS = ("inside", "after")
TASKS = ("single", "multikey")
GROUPS = 4
"""Groups of policies of each format and question, so that two processes at a time end at about the same time."""
AGREEMENT = ("--measure", "agreement", "--documents", "4", "--rows", "4", "--prefill", "chunk", "--chunk", "32",
             "--inner", "eager")  # fmt: skip
"""How agreement is measured, as arguments of `kvpass eval`."""
COMMANDS = {"calibration": "calibrate", "gates": "gates"}
"""Options of policies that read a file for the model, and the kvpass command that makes the file."""
KL, PERPLEXITY = "KL, nats", "perplexity / full"
NO_BUDGET = "no budget"
"""Cell for a policy whose smallest budget has more bytes."""
PANELS = {
    "KL(full || policy) in nats, and the share of equal first choices": ("KL", "same"),
    "Perplexity over that of the full cache, and slots": (PERPLEXITY, "slots"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """Cases of `kvpass eval` that run in one process.

    Attributes:
        policies: policies with options, as `kvpass.policies.parse` reads them.
        group: the number of this group of policies.
        kv_dtype: storage format of rows.
        question: how the retrieval tasks ask; "" for agreement.
    """

    policies: tuple[str, ...]
    group: int
    kv_dtype: KVDtype | None
    question: str = ""

    def folder(self, out: Path) -> Path:
        return out / "evidence" / f"{self.kv_dtype or 'bfloat16'}{self.question and '-' + self.question}-{self.group}"

    def arguments(self, out: Path, quick: bool) -> list[str]:
        """Return the arguments of the command line."""
        model = ["--model", checkpoint.NAME, "--dtype", "bfloat16", "--threads", "1", "--policy", *self.policies]
        stored = ["--kv-dtype", self.kv_dtype] if self.kv_dtype else []
        text = ["--text", *map(str, books.paths())]
        return ["eval", *model, *stored, *text, *(self._retrieval(quick) if self.question else self._agreement(quick)),
                "--out", str(self.folder(out))]  # fmt: skip

    def _agreement(self, quick: bool) -> list[str]:
        tokens = "768" if quick else "2048"
        return [*AGREEMENT, "--bytes", *map(str, SHARES), "--tokens", tokens]

    def _retrieval(self, quick: bool) -> list[str]:
        trials = "2" if quick else "12"
        return ["--measure", "ruler", "--task", *TASKS, "--question", self.question, "--bytes", "0.25", "--trials",
                trials, "--prefill", "whole", "--inner", "eager"]  # fmt: skip


def jobs(out: Path) -> list[Job]:
    """Return all jobs; calibrations and gates are those made for the checkpoint.

    `benchmarks.align` measures policies with a network that is trained for the model.
    """
    every = [_with_file(name, out) for name in policies.names() if not takes_aligner(name)]
    groups = [(tuple(every[first::GROUPS]), first) for first in range(GROUPS)]
    compared = [Job(*group, kind) for kind in FORMATS for group in groups]
    asked = [Job(*group, None, question) for question in QUESTIONS for group in groups]
    return [*compared[:GROUPS], *asked, *compared[GROUPS:]]


def _with_file(name: str, out: Path) -> str:
    """Return a policy's name with the option for its file, if it reads one."""
    options = [option for option in COMMANDS if takes(name, option)]
    return ":".join([name, *(f"{option}={_file(option, out)}" for option in options)])


def _file(option: str, out: Path) -> Path:
    return out / "evidence" / f"{option}.safetensors"


def measure(settings: Settings) -> list[Row]:
    """Run all jobs, one on each core, and return a row for each case."""
    for option, command in COMMANDS.items():
        file = _file(option, settings.out)
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            apart.kvpass([command, str(checkpoint.folder()), "--dtype", "bfloat16", "--out", str(file)])
    todo = jobs(settings.out)
    apart.kvpass_each([job.arguments(settings.out, settings.quick) for job in todo], "evidence")
    rows = [row for job in todo for row in _rows(job, settings.out)]
    return sorted(rows, key=lambda row: row["policy"])


def _rows(job: Job, out: Path) -> Iterator[Row]:
    for result in Results(job.folder(out)).entries:
        yield {
            "policy": result.key["policy"].partition(":")[0],
            "kv_dtype": job.kv_dtype or "bfloat16",
            "measure": result.key["measure"],
            "question": job.question,
            "share": result.key["budget"],
            **values_of(result),
        }


def values_of(result: Result) -> Row:
    """Return the columns of a case, or the reason why there are none."""
    return {"error": result.error} if result.error else dict(result.columns)


def tables(rows: Sequence[Row]) -> list[Table]:
    compared = [row for row in rows if row["measure"] == "agreement"]
    found = [
        Table(
            f"{what}, by share of the bytes of a full cache, vectors in {kind}", list(_by_share(compared, kind, names))
        )
        for kind in ("bfloat16", "int8", "int4")
        for what, names in PANELS.items()
    ]
    asked = "Share of answers that are right, tasks after RULER in 1,024 tokens, slots of 25 % of the bytes, bfloat16"
    return [table for table in (*found, Table(asked, list(_answers(rows)))) if table.rows]


def _by_share(rows: Sequence[Row], kind: str, names: Sequence[str]) -> Iterator[Row]:
    """Yield a line for each policy, with a column for each name and share."""
    of_kind = [row for row in rows if row["kv_dtype"] == kind]
    return by_limit(of_kind, "share", {share: f"{100 * share:g} %" for share in SHARES}, names)


def by_limit(rows: Sequence[Row], limit: str, labels: Mapping[float, str], names: Sequence[str]) -> Iterator[Row]:
    """Yield a line for each policy, with a column for each name and value of `limit`, which is None for all values."""
    found: dict[str, Row] = {}
    for row in rows:
        line, shown = found.setdefault(row["policy"], {}), _shown(row, evicts=row[limit] is not None)
        for label in labels.values() if row[limit] is None else (labels[row[limit]],):
            line |= {f"{name}, {label}": shown.get(name) for name in names}
    titles = [f"{name}, {label}" for name in names for label in labels.values()]
    for policy, line in found.items():
        yield {"policy": policy, **{title: line.get(title) for title in titles}}


def _shown(row: Row, evicts: bool) -> Row:
    """Return the shown cells of a case; without evictions, agreement is that before an eviction."""
    if "error" in row:
        return dict.fromkeys(("KL", "same", PERPLEXITY, "slots"), NO_BUDGET if NO_BUDGET in row["error"] else "refused")
    if not evicts or KL not in row:
        return {"KL": row["KL, before"], "same": row["same, before"], "slots": row.get("slots")}
    perplexity = row["perplexity"] / row["full perplexity"]
    return {"KL": row[KL], "same": row[SAME], PERPLEXITY: perplexity, "slots": row.get("slots")}


def _answers(rows: Sequence[Row]) -> Iterator[Row]:
    found = [row for row in rows if row["measure"] == "ruler"]
    for policy in dict.fromkeys(row["policy"] for row in found):
        line: Row = {"policy": policy}
        for row in (row for row in found if row["policy"] == policy):
            line |= {f"{task}, {row['question']}": row.get(task, row.get("error")) for task in TASKS}
        yield line


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw the divergence of each policy over the share of bytes."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["measure"] == "agreement" and row["kv_dtype"] == "bfloat16" and row["share"] is not None and KL in row:
            lines.setdefault(row["policy"], []).append((row["share"], row[KL]))
    panel = {"divergence from the full cache, bfloat16": lines}
    return {"evidence": plots.lines(panel, "share of the full cache's bytes", KL, logarithmic=True)}
