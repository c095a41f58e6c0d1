"""Compare kvpass with other engines on SmolLM2-135M-Instruct.

    python -m benchmarks.rivals [CASE ...]

Writes rivals.json and rivals.md. A case that was measured before keeps its figures until it is measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import report
from benchmarks.report import Row
from benchmarks.rivals import compare, contenders, tables
from benchmarks.rivals.compare import Limits, OutOfTime
from benchmarks.rivals.contenders import STATIC
from benchmarks.worker import Worker
from kvpass.apps import checkpoint
from kvpass.apps.evaluation.tables import markdown

QUESTION = "What should I see first in Paris, and why?"
LENGTHS, ROUNDS, MINUTES = (1024, 4096, 8000), 12, 25.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A set of measurements under one precision, number of threads and number of rows.

    Attributes:
        part: "steps" (with prompts), "start" or "memory".
        longest: longer lengths are omitted.
        without: contenders that are omitted.
    """

    part: str
    precision: str = "bfloat16"
    threads: int = 2
    rows: int = 1
    shortest: int = 0
    longest: int = 1 << 30
    without: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "steps": Case("steps"),
    "start": Case("start"),
    "rows": Case("steps", rows=8, shortest=4096, longest=4096, without=(STATIC,)),
    "int8": Case("steps", precision="int8", longest=1024, without=(STATIC,)),
    "thread": Case("steps", threads=1, longest=4096, without=(STATIC,)),
    "memory": Case("memory"),
}
"""Ordered by importance, because a run that ends early omits the last ones."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the requested cases, and report on all measured cases."""
    given = _parser().parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    limits = Limits(given.lengths, given.rounds, time.monotonic() + 60 * given.minutes)
    for name in () if given.report else given.cases or CASES:
        case = dataclasses.replace(CASES[name], **({"threads": given.threads} if given.threads else {}))
        if not _measured(name, case, given, limits):
            print(f"{name}: {given.minutes:g} minutes are over; the rest is left out")
    rows = report.load(given.out / "rivals.json")
    text = "\n\n".join(f"{table.caption}:\n\n{markdown(table.rows)}" for table in tables.tables(rows))
    (given.out / "rivals.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if given.write:
        report.write({"benchmark rivals": text})


def _parser() -> argparse.ArgumentParser:
    names = [contender.name for contender in contenders.ALL]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", choices=[[], *CASES], help=f"of {', '.join(CASES)}; all")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", choices=names, default=names, help="default: all")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", default=LENGTHS, help="tokens of prompts")
    parser.add_argument("--rounds", type=int, metavar="N", default=ROUNDS, help="turns of each at its steps")
    parser.add_argument("--threads", type=int, metavar="N", help="of every case, in place of its own")
    parser.add_argument("--minutes", type=float, metavar="N", default=MINUTES, help="after which nothing new begins")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for JSON and tables")
    parser.add_argument(
        "--folder", type=Path, default=checkpoint.cache_folder() / "rivals", help="for environments and weights"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, report on what the folder has")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages of figures")
    return parser


def _measured(name: str, case: Case, given: argparse.Namespace, limits: Limits) -> bool:
    """Measure a case and save each row at once; return False if the time ended before the case."""
    about = {"case": name, "part": case.part, "precision": case.precision, "threads": case.threads, "rows": case.rows}
    rows = [row for row in report.load(given.out / "rivals.json") if row["case"] != name]
    with tqdm(unit="turn", desc=name, dynamic_ncols=True) as bar:
        try:
            for row in _rows(case, given, limits, bar):
                rows.append(about | row)
                report.save(given.out / "rivals.json", rows, {"lengths": limits.lengths, "rounds": limits.rounds})
        except OutOfTime:
            return False
    return True


def _rows(case: Case, given: argparse.Namespace, limits: Limits, bar: tqdm[None]) -> Iterator[Row]:
    chosen = [each for each in contenders.named(given.contenders) if each.name not in case.without]
    fitting = [count for count in limits.lengths if case.shortest <= count <= case.longest] or limits.lengths[:1]
    limits, say = dataclasses.replace(limits, lengths=fitting), bar.set_postfix_str
    start = functools.partial(_start, case, given.folder)
    if case.part == "start":
        return compare.starts(chosen, start, _question(), limits, say)
    if case.part == "memory":
        return compare.peaks(chosen, start, limits, say)
    return compare.steps(chosen, start, case.rows, limits, say, bar.update)


def _start(case: Case, folder: Path, contender: contenders.Contender, variables: dict[str, str]) -> Worker:
    return contenders.start(contender, case.precision, case.threads, folder, variables)


def _question() -> list[int]:
    """Return the tokens of a question in the chat format of the model."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.folder())
    said = [{"role": "user", "content": QUESTION}]
    ids: list[int] = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    return ids


if __name__ == "__main__":
    main()
