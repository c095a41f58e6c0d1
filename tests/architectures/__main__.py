"""Examine every architecture and print the number that are rewritten.

python -m tests.architectures                    # all causal ones, one after another
python -m tests.architectures --table reading    # all that read text or speech first
python -m tests.architectures --table images     # all that see images
python -m tests.architectures llama gpt_oss      # some
python -m tests.architectures --write --jobs 2   # two at a time, and write the table's part of docs/architectures.md
python -m tests.architectures --write llama      # examine one, and replace its row
"""

from __future__ import annotations

import argparse
import collections
import re
import warnings
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from tests.architectures import zoo
from tests.architectures.apart import examine_apart
from tests.architectures.check import BUDGET, PADDING, PROMPT, STEPS, Verdict
from tests.architectures.inputs import BESIDE_TEXT, READ

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all of the table by default")
    parser.add_argument("--table", choices=zoo.TABLES, default="causal", help="which ones (default: %(default)s)")
    parser.add_argument("--padding", type=int, default=PADDING, help="padding tokens on the left of the first row")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    names = [name for name in options.names or zoo.names(options.table) if zoo.can_be_built(name)]
    verdicts = examined(names, options.table, options.padding, options.jobs)
    print(summary(verdicts))
    if options.write:
        known = written(options.table)
        known = known if options.names else {name: known[name] for name in known if not zoo.can_be_built(name)}
        write(options.table, known | {verdict.name: verdict for verdict in verdicts})


def examined(names: list[str], table: str, padding: int, jobs: int) -> list[Verdict]:
    """Return the verdicts on some model types, and print each as soon as it is known."""
    verdicts, examine = [], partial(examine_apart, padding=padding, table=table)
    with ThreadPool(jobs) as pool:
        for v in tqdm(pool.imap(examine, names), total=len(names), disable=None):
            verdicts.append(v)
            tqdm.write(f"{v.name:28} {v.word:10} {v.rewritten}/{v.found} {v.graphs} {v.reason}")
    return verdicts


def parts() -> dict[str, str]:
    """Return the section of each table on the page, for tables that have one."""
    pieces = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    return {name: piece for name, intro in _INTRODUCTIONS.items() for piece in pieces if piece.startswith(intro[0])}


def write(table: str, verdicts: dict[str, Verdict]) -> None:
    """Replace the section of a table on the page."""
    made = parts() | {table: page(table, [verdicts[name] for name in sorted(verdicts)])}
    PAGE.write_text("\n".join(made[name].rstrip() + "\n" for name in zoo.TABLES if name in made))


def written(table: str = "causal") -> dict[str, Verdict]:
    """Read the verdicts from the page, by model type."""
    lines = [line.split("|") for line in parts().get(table, "").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line[1:-1]] for line in lines[1:]]
    verdicts = [Verdict(name, word, reason, *reversed([int(n) for n in sites.split("/")]), int(graphs))  # type: ignore[arg-type]
                for name, word, sites, graphs, reason in rows]  # fmt: skip
    return {verdict.name: verdict for verdict in verdicts}


def summary(verdicts: list[Verdict]) -> str:
    """Return one line that counts the rewritten architectures among those with a cache."""
    counts = collections.Counter(v.word for v in verdicts)
    caching = [v for v in verdicts if v.word not in ("no cache", "not built")]
    rest = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    return f"{counts['rewritten']} of {len(caching)} architectures with a growing cache rewritten ({rest})"


def page(table: str, verdicts: list[Verdict]) -> str:
    """Format a table as Markdown, with its introduction."""
    reasons = [v.reason.replace("|", "/") for v in verdicts]
    rows = [
        f"| {v.name} | {v.word} | {v.rewritten}/{v.found} | {v.graphs} | {reason} |"
        for v, reason in zip(verdicts, reasons, strict=True)
    ]
    return "\n".join(
        [*_INTRODUCTIONS[table], summary(verdicts) + ".", "", *by_reason(verdicts), "", *_HEADER, *rows, ""]
    )


def by_reason(verdicts: list[Verdict]) -> list[str]:
    """Count the refusals by reason; the most frequent one is the next to work on."""
    refused = [v for v in verdicts if v.word == "refused"]
    reasons: dict[str, list[str]] = {}
    for v in refused:
        why = re.split(r"; the next softmax|,? \(\S*\.py:", re.sub(r"'[^']*'", "…", v.reason))[0]
        reasons.setdefault(why, []).append(v.name)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return ["Refused, by reason:", "", *(f"- {len(names)} ({', '.join(names)}): {why}" for why, names in ordered)]


_VERSIONS = f'transformers {transformers.__version__} and torch {torch.__version__.split("+")[0]}, `inner="eager"`.'

_NEEDS = ", ".join(f"{name} {package}" for name, package in zoo.NEEDS.items())

_CAUSAL = [
    "# Architectures",
    "",
    "Every model type for which transformers has a causal language model, as a tiny random one: two rows, the first",
    f"with {PADDING} padding tokens, a prompt of {PROMPT} tokens and {STEPS} greedy steps through `generate`. Under",
    "`full` the logits must equal the uncompiled model's; under `streaming` and `h2o` with a budget of",
    f"{BUDGET} those of the policy's eager reference. Written by `make architectures`, with",
    _VERSIONS,
    "",
    "- *rewritten*: every attention site is, and all runs are equal. Sites are counted in both graphs.",
    "- *refused*: an error of ours says why; nothing runs.",
    "- *no cache*: the model keeps no keys and values. *not built*: the shrunk configuration does not run uncompiled.",
    "",
    f"Some need a package, and keep their rows where it is not installed: {_NEEDS}. timm",
    "imports torchvision, whose native operators were left out where these rows were written.",
    "",
]
_READING = [
    "## What reads text or speech first",
    "",
    "Every model type of `AutoModelForSeq2SeqLM` and `AutoModelForSpeechSeq2Seq`, in the same way. An encoder-decoder",
    f"reads {READ} tokens, some of them padding, or random sound; its decoder begins with {PROMPT} tokens, padded on",
    "the left. Cross-attention does not grow, is left alone, and is not counted. Decoders that hear by themselves,",
    "such as Voxtral, are given text alone, except those that need sound beside each token",
    f"({', '.join(BESIDE_TEXT)}). LED's decoder begins unpadded: its steps mask no padding.",
    "Written by `make architectures`, with",
    _VERSIONS,
    "",
]
_IMAGES = [
    "## What sees images",
    "",
    "Every model type of `AutoModelForImageTextToText`, first with text alone, if it runs so, then with a random image",
    "in each row, behind the padding, in the form that is found by trying: one with which the uncompiled model runs",
    "and says something else when the image is another one. Where none is found, the reason says so.",
    "Written by `make architectures`, with",
    _VERSIONS,
    "",
]
_INTRODUCTIONS = {"causal": _CAUSAL, "reading": _READING, "images": _IMAGES}
_HEADER = ["| model type | verdict | sites | graphs | reason |", "|---|---|---|---|---|"]


if __name__ == "__main__":
    main()
