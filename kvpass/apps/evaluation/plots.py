"""Lines over a number of tokens, in panels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]
LOOKS = list(itertools.product(("-", "--", ":"), colormaps["tab10"].colors))  # type: ignore[attr-defined]


def lines(
    panels: Mapping[str, Mapping[str, Line]], across: str, up: str, *, logarithmic: bool = False, columns: int = 2
) -> Figure:
    """A panel for each title, a line for each name in it; the same name looks alike in all panels."""
    columns = min(columns, len(panels))
    down = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns + 2.5, 4.2 * down), layout="constrained")
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    axes = figure.subplots(down, columns, squeeze=False).flat
    for (title, panel), where in zip(panels.items(), axes, strict=False):
        _panel(where, panel, names)
        where.set(title=title, xlabel=across, ylabel=up)
        _scales(where, panel, logarithmic)
    for where in itertools.islice(figure.axes, len(panels), None):
        where.set_axis_off()
    handles = {
        label: handle for where in figure.axes for handle, label in zip(*where.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    return figure


def _panel(axes: Axes, panel: Mapping[str, Line], names: Sequence[str]) -> None:
    for name, points in panel.items():
        style, colour = LOOKS[names.index(name) % len(LOOKS)]
        known = sorted(points)
        marker = "o" if len(known) < 20 else None
        axes.plot(
            *zip(*known, strict=True), style, label=name, color=colour, marker=marker, markersize=3, linewidth=1.2
        )


def _scales(axes: Axes, panel: Mapping[str, Line], logarithmic: bool) -> None:
    if not logarithmic:
        axes.set_ylim(bottom=0)
        return
    ticks = sorted({x for points in panel.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels=[f"{tick:,.0f}" for tick in ticks], minor=False)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")


def bars(values: Mapping[str, float], up: str, limit: float | None = None) -> Figure:
    """A bar for each name, and a line at the limit."""
    figure = Figure(figsize=(max(6, 0.45 * len(values) + 2), 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(list(values), list(values.values()))
    axes.set_ylabel(up)
    axes.tick_params(axis="x", rotation=60)
    if limit is not None:
        axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    return figure


def grouped(panels: Mapping[str, Mapping[str, Mapping[str, float]]], spread: float = 4.0) -> Figure:
    """A panel for each title, one above the other: for each kind a bar beside every name that it has a value for.

    Args:
        spread: an axis on which the largest value is so many times the middle one is logarithmic.
    """
    figure = Figure(figsize=(11, 3.6 * len(panels)), layout="constrained")
    for (title, kinds), axes in zip(panels.items(), figure.subplots(len(panels), 1, squeeze=False).flat, strict=True):
        names = list(dict.fromkeys(name for values in kinds.values() for name in values))
        width = 0.8 / max(1, len(kinds))
        for number, (kind, values) in enumerate(kinds.items()):
            places = [names.index(name) + (number - (len(kinds) - 1) / 2) * width for name in values]
            axes.bar(places, list(values.values()), width, label=kind)
        heights = sorted(value for values in kinds.values() for value in values.values())
        if heights and heights[-1] > spread * heights[len(heights) // 2] > 0:
            axes.set_yscale("log")
        axes.set_xticks(range(len(names)), labels=names, rotation=30)
        axes.set_title(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure
