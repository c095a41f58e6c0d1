"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; the columns are those of all rows in the order in which they come up."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name: all(isinstance(row.get(name, 0), (int, float)) for row in rows) for name in names}
    head = [names, ["---:" if numeric[name] else "---" for name in names]]
    lines = [*head, *([cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Three digits that mean something, thousands apart, a dash for what is not there."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
