"""Write results as Markdown and as pictures."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpass import policies, tensor_files
from kvpass.apps.evaluation.session import Measure, Row
from kvpass.apps.evaluation.settings import Result
from kvpass.apps.evaluation.tables import markdown
from kvpass.errors import KVPassError


def write(folder: Path, measures: Sequence[Measure], results: Sequence[Result]) -> str:
    """Write `results.md`, and a picture for each measure if matplotlib is installed; return the Markdown."""
    sections = [section(measure, results) for measure in measures]
    text = "\n\n".join(part for part in sections if part) + "\n"
    tensor_files.write_text(folder / "results.md", text, KVPassError)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(folder, measures, results)
    return text


def section(measure: Measure, results: Sequence[Result]) -> str:
    """Return a heading, a table with a line for each policy and budget, and the refusals."""
    own_results = _results_of(measure, results)
    if not own_results:
        return ""
    lines: list[Row] = [
        {name: result.key[name] for name in ("policy", "budget")} | _tokens_after_compaction(result) | result.columns
        for result in own_results
        if result.error is None
    ]
    refused = "".join(f"\n\n{result.label}: {result.error}" for result in own_results if result.error is not None)
    table = markdown(lines) if lines else "Nothing ran."
    return f"## {measure.name}\n\n{describe_case(own_results[0].key)}\n\n{table}{refused}"


def _tokens_after_compaction(result: Result) -> Row:
    """Return the tokens that are kept after a compaction, for a policy with an interval and a number as budget."""
    policy, budget = policies.parse(result.key["policy"]), result.key["budget"]
    if policy.interval == 1 or not isinstance(budget, int):
        return {}
    return {"compacted to": policy.compacted(policy.fitting_budget(budget))}


def describe_case(key: Mapping[str, Any]) -> str:
    """Return a line that says how a case was measured."""
    fed = f"chunks of {key['chunk']}" if key["prefill"] == "chunk" else key["prefill"]
    words = {name: value if isinstance(value, list) else [value] for name, value in key["settings"].items()}
    fields = ", ".join(f"{name} {'/'.join(map(str, values))}" for name, values in words.items())
    stored = f", vectors in {key['kv_dtype']}" if key["kv_dtype"] else ""
    return (
        f"{key['model'] or 'the bundled model'}, {key['dtype']} on {key['device']}{stored}; prefill: {fed}; {fields}."
    )


def draw(folder: Path, measures: Sequence[Measure], results: Sequence[Result]) -> None:
    """Draw a line for each policy and budget, or for each policy over the budgets."""
    from kvpass.apps.evaluation import plots  # needs matplotlib

    for measure in measures:
        curves = lines(measure, [result for result in _results_of(measure, results) if result.error is None])
        if any(len(points) > 1 for points in curves.values()):
            figure = plots.lines({measure.name: curves}, measure.x_key, measure.y_key)
            with tensor_files.whole_file(folder / f"{measure.name}.png", KVPassError) as unfinished:
                figure.savefig(unfinished, format="png", dpi=90)


def lines(measure: Measure, results: Sequence[Result]) -> dict[str, list[tuple[float, float]]]:
    """Return points by name in the legend; a policy without a budget has the same value at all budgets."""
    if measure.x_key != "budget":
        return {result.label: list(_points(measure, result.rows)) for result in results}
    budgets = sorted({result.key["budget"] for result in results if result.key["budget"] is not None})
    curves: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        result_budgets = [result.key["budget"]] if result.key["budget"] is not None else budgets
        curves.setdefault(result.key["policy"], []).extend(
            (budget, result.columns[measure.y_key]) for budget in result_budgets
        )
    return curves


def _points(measure: Measure, rows: Sequence[Row]) -> Iterator[tuple[float, float]]:
    """Yield the mean of all rows with the same x."""
    for x in sorted({row[measure.x_key] for row in rows if row[measure.x_key] is not None}):
        yield x, statistics.fmean(row[measure.y_key] for row in rows if row[measure.x_key] == x)


def _results_of(measure: Measure, results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.key["measure"] == measure.name]
