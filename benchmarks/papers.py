"""Run the papers' tables on SmolLM2-135M-Instruct in bfloat16, with books in the public domain.

Each study is a run of `kvpass eval`, which keeps its results in the folder, so that an interrupted run can continue.
The papers' figures are for other models and texts: only the order of the policies is comparable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks import apart, books
from benchmarks.report import Row, Table
from benchmarks.settings import Settings
from kvpass.apps import checkpoint
from kvpass.apps.evaluation.agreement import SAME
from kvpass.apps.evaluation.retrieval import CACHED_SHARE
from kvpass.apps.evaluation.settings import Result, Results

TITLE = "The papers' tables on SmolLM2"
KL = "KL, nats"


@dataclasses.dataclass(frozen=True)
class Study:
    """The cases of one table.

    Attributes:
        name: name of the study, and of the folder of its results.
        paper: the section of docs/papers.md that shows it.
        caption: caption of the table.
        policies: policies with options, as `kvpass.policies.parse` reads them.
        budgets: budgets in slots.
        measure: further arguments of `kvpass eval`, with the measure.
        columns: columns of a result to show, by their heading in the table.
    """

    name: str
    paper: str
    caption: str
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    measure: tuple[str, ...]
    columns: dict[str, str]

    def folder(self, out: Path) -> Path:
        return out / "papers" / self.name

    def arguments(self, out: Path, quick: bool) -> list[str]:
        """Return the arguments of the command line."""
        model = ["--model", checkpoint.NAME, "--dtype", "bfloat16", "--threads", "1"]
        cases = ["--policy", *self.policies, "--budget", *map(str, self.budgets)]
        text = ["--text", *map(str, books.paths()), "--rows", "4"]
        small = ["--tokens", "512"] if quick and "--tokens" in self.measure else []
        return ["eval", *model, *cases, *text, *self.measure, *small, "--out", str(self.folder(out))]

    def table(self, results: Sequence[Result]) -> Table:
        """Return a line for each policy, with the columns of each budget."""
        lines: dict[str, Row] = {}
        for result in results:
            line = lines.setdefault(result.key["policy"], {"policy": result.key["policy"]})
            for heading, column in self.columns.items():
                for budget in self.budgets if result.key["budget"] is None else (result.key["budget"],):
                    name = f"{heading}, {budget} slots" if len(self.budgets) > 1 else heading
                    line[name] = "refused" if result.error else result.columns.get(column, "-")
        return Table(self.caption, list(lines.values()))


PERPLEXITY = {"perplexity": "perplexity"}
AGREEMENT = {"KL": KL, "same first choice": SAME}
DEPTHS = ("0", "0.25", "0.5", "0.75", "1")


def _by_depth(length: int) -> dict[str, str]:
    depths = {f"at {float(depth):.0%}": f"{length:,} at {float(depth):.0%}" for depth in DEPTHS}
    return {**depths, "heads that hold it": CACHED_SHARE}


STUDIES = (
    Study(
        "cascade-books",
        "cascade",
        "Perplexity of four books, of each at most 50,000 tokens, from an empty cache, 260 slots, in chunks of 32",
        ("streaming", "cascade"),
        (260,),
        ("--measure", "perplexity", "--tokens", "50000", "--prefill", "chunk", "--chunk", "32", "--inner", "eager"),
        PERPLEXITY,
    ),
    Study(
        "cascade-parts",
        "cascade",
        "Perplexity of the first 4,096 tokens of four books, 260 slots, in chunks of 32",
        ("streaming", "cascade", "cascade:cascades=1", "cascade:cascades=2", "cascade:cascades=8",
         "cascade:select=False", "cascade:reduce=median", "cascade:reduce=max", "cascade:heads=kv"),
        (260,),
        ("--measure", "perplexity", "--tokens", "4096", "--prefill", "chunk", "--chunk", "32", "--inner", "eager"),
        PERPLEXITY,
    ),
    Study(
        "cascade-passkey",
        "cascade",
        "Passkeys in 2,048 tokens, 260 slots, in chunks of 32, by depth: share of 4 that are said",
        ("full", "streaming", "cascade", "cascade:cascades=8"),
        (260,),
        ("--measure", "passkey", "--length", "2048", "--depth", *DEPTHS, "--trials", "4", "--prefill", "chunk",
         "--chunk", "32", "--inner", "eager"),
        _by_depth(2048),
    ),
    Study(
        "buzz-slots",
        "buzz",
        "Perplexity of the first 1,536 tokens of four books, token by token",
        ("full", "buzz", "buzz:log_n=True", "h2o", "streaming", "window"),
        (50, 100),
        ("--measure", "perplexity", "--tokens", "1536", "--prefill", "token"),
        PERPLEXITY,
    ),
    Study(
        "buzz-threshold",
        "buzz",
        "Perplexity of the same tokens with 100 slots, by T/w; 4.33 is the theorem's",
        ("buzz:window=48,threshold=48", "buzz:window=32,threshold=64", "buzz:window=18,threshold=78",
         "buzz:window=11,threshold=85", "buzz:window=6,threshold=90"),
        (100,),
        ("--measure", "perplexity", "--tokens", "1536", "--prefill", "token"),
        PERPLEXITY,
    ),
    Study(
        "buzz-mean",
        "buzz",
        "Perplexity of the same tokens with as many slots as buzz fills on average",
        ("h2o", "streaming"),
        (35, 70),
        ("--measure", "perplexity", "--tokens", "1536", "--prefill", "token"),
        PERPLEXITY,
    ),
    Study(
        "d2o-parts",
        "d2o",
        "Agreement with the full cache at a fifth of the slots: 2,048 tokens of four books in chunks of 32",
        ("h2o", "h2o:heavy=0.75", "snapkv", "d2o", "d2o:merge=average", "d2o:merge=none", "d2o:layers=gate,alpha=1",
         "d2o:layers=gate,alpha=1,merge=none", "d2o:layers=gate,alpha=1,merge=none,heavy=0.5"),
        (410,),
        ("--measure", "agreement", "--tokens", "2048", "--documents", "4", "--prefill", "chunk", "--chunk", "32",
         "--inner", "eager"),
        AGREEMENT,
    ),
    Study(
        "d2o-layers",
        "d2o",
        "Agreement over 768 tokens that are decoded after whole prompts of 768, at a fifth of the prompt's slots",
        ("h2o", "h2o:heavy=0.75", "snapkv", "d2o", "d2o:merge=none", "d2o:layers=gate,alpha=1",
         "d2o:layers=gate,alpha=1,merge=none"),
        (154,),
        ("--measure", "agreement", "--tokens", "1536", "--documents", "4", "--prefill", "whole"),
        AGREEMENT,
    ),
    Study(
        "sage-passkey",
        "sage",
        "Passkeys in prompts of 1,024 tokens that end with the question, 256 slots, by depth: share of 4 that are said",
        ("full", "streaming", "snapkv", "h2o", "tova", "sage", "sage:share=concat", "sage:share=private",
         "sage:refresh_interval=8", "sage:sinks=4,top=76"),
        (256,),
        ("--measure", "passkey", "--length", "1024", "--depth", *DEPTHS, "--trials", "4", "--prefill", "whole",
         "--inner", "eager"),
        _by_depth(1024),
    ),
    Study(
        "sage-needle",
        "sage",
        "Numbers in books, prompts of 1,024 tokens that end with the question, 256 slots: share of 4 that are said",
        ("full", "streaming", "snapkv", "h2o", "tova", "sage"),
        (256,),
        ("--measure", "needle", "--length", "1024", "--depth", *DEPTHS, "--trials", "4", "--prefill", "whole",
         "--inner", "eager"),
        _by_depth(1024),
    ),
)  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    """Run all studies, one on each core, and return a row for each case."""
    apart.kvpass_each([study.arguments(settings.out, settings.quick) for study in STUDIES], "papers")
    return rows_in(settings.out)


def rows_in(out: Path) -> list[Row]:
    """Return the results in the folder, as rows."""
    found = ((study, Results(study.folder(out)).entries) for study in STUDIES if study.folder(out).is_dir())
    return [{"study": study.name, **dataclasses.asdict(result)} for study, results in found for result in results]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each study that was run."""
    found = [(study, [_result(row) for row in rows if row["study"] == study.name]) for study in STUDIES]
    return [study.table(results) for study, results in found if results]


def blocks(rows: Sequence[Row]) -> dict[str, list[Table]]:
    """Return the tables of each paper, by the name of their block on the page."""
    papers = dict.fromkeys(study.paper for study in STUDIES)
    names = {paper: {study.name for study in STUDIES if study.paper == paper} for paper in papers}
    found = {paper: tables([row for row in rows if row["study"] in names[paper]]) for paper in papers}
    return {f"papers {paper}": made for paper, made in found.items() if made}


def _result(row: Row) -> Result:
    return Result(row["key"], row["rows"], row["columns"], row["error"])
