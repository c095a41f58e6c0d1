"""Measure the perplexity of every policy at several budgets, beside full, window, random and the papers.

    python -m benchmarks.quality --out out/quality

Held-out documents go through the bundled model one token at a time, once after a prompt of two tokens, so
that a policy works from the beginning under its budget, and once after a prompt of half a document, from
which those policies can choose that select only then.  docs/quality.md has the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import kvpass
from kvpass import policies
from kvpass.apps import corpus
from kvpass.apps.evaluation.attempt import attempt
from kvpass.apps.evaluation.perplexity import exponential
from kvpass.apps.evaluation.scoring import ScoringBatch, score
from kvpass.apps.models import load
from kvpass.decoding.prefill import Caller
from kvpass.errors import KVPassError
from kvpass.torch_private.dynamo import captured_graphs, graph_breaks

LEFT_OUT = ("kv_align", "tri_attention", "expected_attention")  # they need weights that were made for the model
FILE = "quality.json"
BESIDE = ("full", "window", "random")  # the limits that the others are measured against

COLOURS = colormaps["tab20"]

EXPECTED = {
    "full": "the best",
    "random": "far behind every score",
    "window": "collapses without sinks (perplexity 194.8 with 50 slots, 36.0 with 100; full 7.38)",
    "streaming": "near full (11.72 with 50 slots, 9.33 with 100; full 7.38)",
    "cascade": "better than streaming (PG19, 2,048 slots, Llama2-7B: 6.97 against 7.05; full 6.67)",
    "h2o": "better than streaming (9.99 against 11.72 with 50 slots)",
    "buzz": "better than h2o (9.39 against 9.99 with 50 slots)",
    "tova": "near full, better than h2o",
    "roco": "better than h2o",
    "snapkv": "after a prompt: near full, worse than d2o (needle at 50k: 83.6 against 88.7; full 97.9)",
    "sage": "after a prompt: near full, better than streaming (LongBench: 52.5 against 50.1 to 51.2; full 53.0)",
    "d2o": "better than h2o (LongBench GovReport at 20 %: 24.1 against 21.3; full 30.8)",
    "keydiff": "after a prompt: better than snapkv (RULER-8K at a quarter: 76.1 against 71.2; full 93.1)",
    "pyramid_kv": "after a prompt: better than snapkv, the more so the fewer slots there are",
    "ada_kv": "after a prompt: better than snapkv (RULER-4K at 20 %: 46.0 against 39.0)",
    "critical_kv": "after a prompt: better than ada_kv (RULER-4K at 20 %: 62.9 against 46.0)",
    "r_kv": "in long answers: better than snapkv (MATH with a quarter of the cache: 83.3 against 72.3; full 93.9)",
    "vase": "in long answers: better than snapkv (MATH with a quarter of the cache: 81.8 against 72.3; full 93.9)",
    "knorm": "after a prompt: near full with half of the tokens",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        policies: names, or a name and options: "sage:select_at=overflow,top=4".
        budgets: tokens kept.
        prompts: lengths of the prompt; each makes a table of its own.
        documents, length: how many documents of how many tokens; they are rows of one batch.
        inner: what compiles the rewritten graphs.
        out: the folder for `quality.json` and `quality.png`.
    """

    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    prompts: tuple[int, ...]
    documents: int
    length: int
    inner: str
    out: Path


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement; `budget` is None for a policy that evicts nothing."""

    policy: str
    prompt: int
    budget: int | None


Row = dict[str, Any]


def cases(settings: Settings) -> Iterator[Case]:
    """Return all measurements; policies that evict nothing have one per prompt."""
    for prompt in settings.prompts:
        for policy in settings.policies:
            for budget in settings.budgets if policies.parse(policy).evicts else (None,):
                yield Case(policy, prompt, budget)


def measure(model: Any, tokens: Tensor, case: Case, inner: str, tick: Callable[[], object]) -> Row:
    """Return the perplexity of documents [B, T] after their prompt, or the reason for a refusal."""
    slots = tokens.shape[1] if case.budget is None else case.budget
    outcome = attempt(
        model, policies.parse(case.policy), slots, inner, lambda: streamed(model, tokens, case.prompt, tick)
    )
    row = dataclasses.asdict(case)
    return {**row, **({"error": str(outcome)} if isinstance(outcome, KVPassError) else outcome)}


def streamed(model: Any, tokens: Tensor, prompt: int, tick: Callable[[], object]) -> Row:
    """Feed documents [B, T] token by token after a prompt, and return perplexity and counts."""
    batch = ScoringBatch(tokens, torch.ones_like(tokens), prompt)
    breaks, graphs, caches = graph_breaks(), list[int](), list[Any]()

    def watch(cache: Any) -> None:
        caches[:] = [cache]
        graphs.append(captured_graphs())

    losses = -score(Caller.of(model, model), batch, None, tick=lambda count: tick(), watch=watch).log_likelihoods
    decoded, report = (
        losses[:, 1:].tolist(),
        kvpass.inspect(caches[0]),
    )  # the prompt, which sees all, predicts the first
    return {
        "perplexity": round(exponential([loss for document in decoded for loss in document]), 3),
        "by_document": [round(exponential(document), 3) for document in decoded],
        "cache_bytes": report.nbytes,
        "full_cache_bytes": report.full_nbytes,
        "decode_graphs": graphs[-1] - graphs[0],
        "graph_breaks": graph_breaks() - breaks,
    }


def measured(settings: Settings) -> list[Row]:
    """Measure all cases; rows of an interrupted run in `quality.json` are not measured again."""
    subject = load(None)
    texts = subject.encode(corpus.read(corpus.held_out_files()))
    tokens = torch.tensor(corpus.documents(texts, settings.documents, settings.length, subject.bos))
    rows = written(settings)
    done = {Case(row["policy"], row["prompt"], row["budget"]) for row in rows}
    todo = [case for case in cases(settings) if case not in done]
    with tqdm(total=sum(settings.length - case.prompt for case in todo), unit="step", smoothing=0.05) as bar:
        for case in todo:
            bar.set_description(f"{case.policy} {case.budget or ''}, prompt {case.prompt}")
            with torch.inference_mode():
                rows.append(measure(subject.model, tokens, case, settings.inner, bar.update))
            write(settings, rows)
    return rows


def write(settings: Settings, rows: Sequence[Row]) -> None:
    """Return the rows so far with their settings."""
    text = json.dumps({"about": about(settings), "rows": list(rows)}, indent=1)
    (settings.out / FILE).write_text(text + "\n", encoding="utf-8")


def written(settings: Settings) -> list[Row]:
    """Return the rows in the folder if their settings are the same."""
    path = settings.out / FILE
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return list(found["rows"]) if found["about"] == about(settings) else []


def about(settings: Settings) -> Row:
    same = {name: getattr(settings, name) for name in ("documents", "length", "inner")}
    return {**same, "torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3]))}


def table(rows: Sequence[Row], prompt: int) -> str:
    """Return a Markdown table: a line per policy, a column per budget, and the expectation from its paper."""
    mine = [row for row in rows if row["prompt"] == prompt]
    budgets = sorted({row["budget"] for row in mine if row["budget"] is not None})
    names = list(dict.fromkeys(row["policy"] for row in mine))
    lines = [["policy", *map(str, budgets), "expected from the papers"], ["---", *["---:"] * len(budgets), "---"]]
    for name in sorted(names, key=lambda name: (name not in BESIDE, names.index(name))):
        found = {row["budget"]: row for row in mine if row["policy"] == name}
        cells = [_cell(found.get(budget, found.get(None, {}))) for budget in budgets]
        lines.append([name, *cells, EXPECTED.get(name, "")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row) -> str:
    return f"{row['perplexity']:.2f}" if "perplexity" in row else "-"


def figure(rows: Sequence[Row]) -> Figure:
    """Draw perplexity above that of full over the budget: a panel for each prompt with several budgets."""
    measured = [row for row in rows if "perplexity" in row]
    several = {row["prompt"] for row in measured if len(_budgets(measured, row["prompt"])) > 1}
    drawn = Figure(figsize=(6 * max(1, len(several)) + 1, 5), layout="constrained")
    panels = drawn.subplots(1, max(1, len(several)), squeeze=False)[0]
    for prompt, axes in zip(sorted(several), panels, strict=False):
        _panel(axes, [row for row in measured if row["prompt"] == prompt])
        axes.set(title=f"after a prompt of {prompt} tokens", xlabel="budget", ylabel="perplexity above full, %")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    return drawn


def _budgets(rows: Sequence[Row], prompt: int) -> list[int]:
    return sorted({row["budget"] for row in rows if row["prompt"] == prompt and row["budget"] is not None})


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    full = next((row["perplexity"] for row in rows if row["policy"] == "full"), rows[0]["perplexity"])
    budgets, names = _budgets(rows, rows[0]["prompt"]), list(dict.fromkeys(row["policy"] for row in rows))
    for place, name in enumerate(name for name in names if name != "full"):
        mine = {row["budget"]: 100 * (row["perplexity"] / full - 1) for row in rows if row["policy"] == name}
        known = [budget for budget in budgets if budget in mine]
        look = "--o" if name in BESIDE else "-o"
        axes.plot(known, [mine[budget] for budget in known], look, label=name, color=COLOURS(place), markersize=3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)  # small differences and large ones, and a little better than full
    axes.set_ylim(bottom=-2)
    axes.set_xticks(budgets, labels=map(str, budgets), minor=False)
    axes.yaxis.set_major_formatter("{x:g}")


def parsed(arguments: Sequence[str] | None) -> Settings:
    everything = [name for name in policies.names() if name not in LEFT_OUT]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=(__doc__ or "").split("\n")[0])
    named = "NAME[:OPTION=VALUE,...]"
    parser.add_argument("--policies", nargs="+", default=everything, metavar=named, help="default: all")
    parser.add_argument("--budgets", nargs="+", type=int, default=[128, 256, 512], metavar="N")
    parser.add_argument("--prompts", nargs="+", type=int, default=[2, 1024], metavar="N")
    parser.add_argument("--documents", type=int, default=4, metavar="N", help="rows of one batch (default: 4)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of a document (default: 2048)")
    parser.add_argument("--inner", default="eager", help="eager (default) or inductor, which takes longer to compile")
    parser.add_argument("--out", type=Path, default=Path("out/quality"), help="folder for JSON and plot")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    torch.set_num_threads(given.pop("threads"))
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return Settings(**fields)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print Markdown tables, and write JSON and plot."""
    settings = parsed(arguments)
    settings.out.mkdir(parents=True, exist_ok=True)
    rows = measured(settings)
    for prompt in sorted({row["prompt"] for row in rows}):
        print(f"\nAfter a prompt of {prompt} tokens:\n\n{table(rows, prompt)}")
    for row in rows:
        if "error" in row:
            print(f"\n{row['policy']}, budget {row['budget']}: {row['error']}")
    figure(rows).savefig(settings.out / "quality.png", dpi=90)


if __name__ == "__main__":
    main()
