"""Measure the figures of the documentation.

    python -m benchmarks [PART ...] --out out/benchmarks

Each part writes PART.json, and its plot if a page shows one. report.md has all tables, and each target with its figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks import (
    batches,
    bounded,
    chunks,
    compilation,
    cropping,
    equal_bytes,
    evidence,
    footprint,
    overhead,
    papers,
    passkey,
    prompt,
    prompt_scores,
    recall,
    report,
    row_products,
    second_checkpoint,
    serving,
    sizes,
    step,
    stream,
)
from benchmarks.report import Row, Table, Target, verdicts
from benchmarks.settings import Settings
from kvpass.apps.evaluation.tables import markdown

PARTS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        step,
        overhead,
        batches,
        prompt,
        prompt_scores,
        chunks,
        cropping,
        compilation,
        footprint,
        sizes,
        stream,
        recall,
        passkey,
        equal_bytes,
        evidence,
        second_checkpoint,
        papers,
        row_products,
        serving,
    )
}
ROOT = Path(benchmarks.__file__).parents[1]
SUMMED = ("streaming", "h2o", "d2o")
"""Policies whose steps are in the summary; `overhead` has all."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, and report on all parts in the folder."""
    given = _parser().parse_args(arguments)
    settings = Settings(given.quick, given.out, tuple(given.threads), tuple(given.dtypes), given.kvpress)
    settings.out.mkdir(parents=True, exist_ok=True)
    for name in () if given.report else given.parts or PARTS:
        run(name, settings)
    text = written(settings.out)
    (settings.out / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if given.write:
        write(settings.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for JSON, tables and plots")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="of torch; default: 1 2")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16")
    parser.add_argument("--kvpress", type=Path, default=Path("out/kvpress"), help="folder for its environment")
    parser.add_argument("--report", action="store_true", help="measure nothing, report on the parts in the folder")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages of figures")
    return parser


def run(name: str, settings: Settings) -> None:
    """Measure one part, and write its JSON and plots."""
    part, start = PARTS[name], time.monotonic()
    rows = part.measure(settings)
    how = {"quick": settings.quick, "seconds": round(time.monotonic() - start)}
    report.save(settings.out / f"{name}.json", rows, how)
    if hasattr(part, "figures"):
        for stem, figure in part.figures(rows).items():
            figure.savefig(settings.out / f"{stem}.png", dpi=90)


def written(out: Path) -> str:
    """Return the report on all parts in the folder."""
    known = measured(out)
    parts = [section(name, rows) for name, rows in known.items()]
    held = verdicts(targets(known))
    lines = [f"{name}: {value}" for name, value in report.about().items()]
    return "\n\n".join([*parts, "## Targets", markdown(held), ", ".join(lines)])


def measured(out: Path) -> dict[str, list[Row]]:
    """Return the rows of each part in the folder."""
    rows = {name: report.load(out / f"{name}.json") for name in PARTS}
    return {name: found for name, found in rows.items() if found}


def section(name: str, rows: list[Row]) -> str:
    """Return the heading and the tables of a part."""
    return "\n\n".join([f"## {PARTS[name].TITLE}", *captioned(PARTS[name].tables(rows))])


def captioned(tables: Sequence[Table]) -> list[str]:
    return [f"{table.caption}:\n\n{markdown(table.rows)}" for table in tables]


def targets(known: dict[str, list[Row]]) -> list[Target]:
    """Return the targets of all parts that have any."""
    judged = {name: rows for name, rows in known.items() if hasattr(PARTS[name], "targets")}
    return [target for name, rows in judged.items() for target in PARTS[name].targets(rows)]


def summary(known: dict[str, list[Row]]) -> str:
    """Return the steps of the first dtype and number of threads, for a selection of policies."""
    tables = step.tables(known["step"])[:1] if "step" in known else []
    left_out = {f"{step.OURS}{policy}" for policy in bounded.everything()} - {f"{step.OURS}{name}" for name in SUMMED}
    return "\n\n".join(
        f"{table.caption}:\n\n{markdown([row for row in table.rows if row['milliseconds a step'] not in left_out])}"
        for table in tables
    )


def write(out: Path) -> None:
    """Write the tables of all parts in the folder into the pages of figures."""
    known = measured(out)
    blocks = {f"benchmark {name}": section(name, rows) for name, rows in known.items()}
    shown = papers.blocks(known.get("papers", []))
    blocks |= {name: "\n\n".join(captioned(tables)) for name, tables in shown.items()}
    report.write(blocks | {"benchmark summary": summary(known)})


if __name__ == "__main__":
    main()
