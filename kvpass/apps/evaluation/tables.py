"""Format rows as tables: Markdown, and columns that are printed one row after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with the columns of all rows, in the order in which they first occur."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name: all(isinstance(row.get(name, 0), (int, float)) for row in rows) for name in names}
    head = [names, ["---:" if numeric[name] else "---" for name in names]]
    lines = [*head, *([cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Format a value: numbers with three significant digits, and a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


class PrintedTable:
    """A table that is printed row by row; the first row sets the columns, and errors are separate lines.

    Attributes:
        rows: the rows so far, without errors.
        first: the least width of the first column, in characters.
    """

    def __init__(self, first: int) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.first = first

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Return the lines to print for another row; a row with an "error" has its first cell and the error."""
        if "error" in row:
            return [f"{next(iter(row.values()))}: {row['error']}"]
        self.rows.append(row)
        names = [*self.rows[0]]
        widths = [max(6 if number else self.first, len(name)) for number, name in enumerate(names)]
        head = [names, ["-" * width for width in widths]] if len(self.rows) == 1 else []
        return [
            "  ".join(f"{text:{'>' if number else '<'}{widths[number]}}" for number, text in enumerate(cells)).rstrip()
            for cells in [*head, [cell(row.get(name)) for name in names]]
        ]
