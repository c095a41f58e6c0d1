"""Examine every row and print its verdict.

python -m tests.reach           # all rows
python -m tests.reach torchao   # rows whose name or heading contains this text
python -m tests.reach --write   # also write docs/reach.md; needs every package of constraints-reach.txt
"""

from __future__ import annotations

import argparse
import itertools
import operator
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from tests.models import many_graphs
from tests.reach.check import BUDGET, STEPS, Verdict, examine
from tests.reach.rows import ROWS, Row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reach.md"
PINS = ROOT / "constraints-reach.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="of names or headings; all rows by default")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    chosen = [row for row in ROWS if not options.parts or any(part in row.group + row.name for part in options.parts)]
    missing = sorted({row.missing for row in chosen if row.missing})
    if missing:
        parser.error(f"missing: {', '.join(missing)}; pip install -r {PINS.name}")
    verdicts = [_told(row) for row in tqdm(chosen, disable=None)]
    if options.write:
        known = read(PAGE.read_text()) if options.parts else {}
        merged = known | {verdict.name: verdict for verdict in verdicts}
        PAGE.write_text(page([merged[row.name] for row in ROWS if row.name in merged]))


def _told(row: Row) -> Verdict:
    with many_graphs():
        verdict = examine(row)
    tqdm.write(f"{verdict.name:45} {verdict.word:9} {verdict.graphs:3} {verdict.reason}")
    return verdict


def page(verdicts: Sequence[Verdict]) -> str:
    """Format the tables as Markdown, one for each heading."""
    lines = list(_INTRODUCTION)
    for group, members in itertools.groupby(verdicts, operator.attrgetter("group")):
        lines += ["", f"## {group}", "", "| | | graphs | reason |", "|---|---|---|---|"]
        lines += [f"| {v.name} | {v.word} | {v.graphs} | {v.reason.replace('|', '/')} |" for v in members]
    return "\n".join([*lines, ""])


def read(text: str) -> dict[str, Verdict]:
    """Read the verdicts from a page, by name."""
    verdicts, group = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and re.fullmatch(r"\d+", cells[2]):
            name, word, graphs, reason = cells
            verdicts[name] = Verdict(group, name, word, int(graphs), reason)  # type: ignore[arg-type]
    return verdicts


_INTRODUCTION = [
    "# Compatibility",
    "",
    "This page lists changes to a model's weights, its cache and its inputs, and whether kvpass works with them. Every",
    f"row is a tiny random model that `generate` runs on a padded prompt and {STEPS} fixed tokens. Under `full` the",
    f"logits must equal those of the uncompiled model. Under `h2o` with a budget of {BUDGET} they must equal those of",
    "the policy's eager reference, and no layer may hold more. Written by `make reach`, with",
    f'transformers {transformers.__version__}, torch {torch.__version__.split("+")[0]}, `inner="eager"`, and the',
    "packages that [constraints-reach.txt](../constraints-reach.txt) pins, on a CPU.",
    "",
    "- *works*: both are equal. *refused*: an error of ours says why. *not built*: the package cannot do it here.",
    "- Graphs are Dynamo's, of both together. Two are a prompt's and a step's; images come before these.",
    "- Where activations are rounded to whole numbers (int8 dynamic), a change in the last place of a number may",
    "  become a larger one. There, logits may differ twice as much as the uncompiled model's do under another kernel",
    "  for attention.",
    "- accelerate's hooks break graphs around every module. Attention and the update of its cache stay in one.",
    "- An adapted model of PEFT has to be compiled by `kvpass.compile`: its `generate` calls the model inside.",
    "- An offloaded cache is refused before torch traces it by models of `kvpass.compile` alone. Under",
    "  `torch.compile(model, backend=...)` Dynamo gives up without asking a backend.",
    "",
    "[calling.md](calling.md) has the ways of calling a plain model, [architectures.md](architectures.md) every causal",
    "model type, [distributed.md](distributed.md) heads that are sharded over processes.",
]


if __name__ == "__main__":
    main()
