"""Draw lines, bars, shares and cached positions, in panels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpass.apps.evaluation.session import PositionSnapshot

BAND = 8  # positions that share one line of pixels in the picture of cached positions
Line = Sequence[tuple[float, float]]
LOOKS = list(itertools.product(("-", "--", ":"), colormaps["tab10"].colors))  # type: ignore[attr-defined]


def lines(
    panels: Mapping[str, Mapping[str, Line]],
    x_label: str,
    y_label: str,
    *,
    logarithmic: bool = False,
    log_y: bool = False,
) -> Figure:
    """Draw a panel for each title, with a line for each name; a name has one style in all panels.

    Args:
        x_label, y_label: the labels of the axes.
        logarithmic: whether both axes are logarithmic; with `log_y` only the upward one is.
    """
    column_count = min(2, len(panels))
    row_count = -(-len(panels) // column_count)
    figure = Figure(figsize=(5.5 * column_count + 2.5, 4.2 * row_count), layout="constrained")
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    grid = figure.subplots(row_count, column_count, squeeze=False).flat
    for (title, panel), axes in zip(panels.items(), grid, strict=False):  # the last row may have more axes
        _panel(axes, panel, names)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        _scales(axes, panel, logarithmic, log_y)
    for axes in itertools.islice(figure.axes, len(panels), None):
        axes.set_axis_off()
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    return figure


def _panel(axes: Axes, panel: Mapping[str, Line], names: Sequence[str]) -> None:
    for name, points in panel.items():
        style, colour = LOOKS[names.index(name) % len(LOOKS)]
        ordered = sorted(points)
        marker = "o" if len(ordered) < 20 else None
        axes.plot(
            *zip(*ordered, strict=True), style, label=name, color=colour, marker=marker, markersize=3, linewidth=1.2
        )


def _scales(axes: Axes, panel: Mapping[str, Line], logarithmic: bool, log_y: bool) -> None:
    if not logarithmic and not log_y:
        axes.set_ylim(bottom=0)
        return
    if logarithmic:
        ticks = sorted({x for points in panel.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[f"{tick:,.0f}" for tick in ticks], minor=False)
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter("{x:g}")


def shares(panels: Mapping[str, Mapping[str, Mapping[str, float]]], x_label: str) -> Figure:
    """Draw a panel for each title: a row for each name, a column for each key, darker for higher shares."""
    tallest = max(len(rows) for rows in panels.values())
    figure = Figure(figsize=(5.5 * len(panels) + 1, 0.32 * tallest + 1.6), layout="constrained")
    for (title, rows), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False).flat, strict=True):
        columns = list(next(iter(rows.values())))
        values = np.array([[row[column] for column in columns] for row in rows.values()])
        axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (row_index, column_index), share in np.ndenumerate(values):
            colour = "white" if share > 0.5 else "black"
            axes.text(column_index, row_index, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set(title=f"{title}, % right", xlabel=x_label)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), [*rows])
    return figure


def cached_positions(
    snapshots: Mapping[str, Sequence[PositionSnapshot]], length: int, title: str | None = None, band: int = BAND
) -> Figure:
    """Draw which positions were cached over time, a panel for each name; a line of pixels covers `band` positions."""
    row_count = math.ceil(len(snapshots) / 4)
    column_count = math.ceil(len(snapshots) / row_count)
    figure = Figure(figsize=(3.2 * column_count + 0.8, 3.2 * row_count + 0.6), layout="constrained")
    panels = figure.subplots(row_count, column_count, sharex=True, sharey=True, squeeze=False).flat
    for (name, panel_snapshots), axes in zip(snapshots.items(), panels, strict=False):  # the last row may have more
        _cached_panel(axes, name, panel_snapshots, length, band)
    for axes in itertools.islice(panels, row_count * column_count):
        axes.set_axis_off()
    if title is not None:
        figure.suptitle(title)
    return figure


def cached_image(snapshots: Sequence[PositionSnapshot], length: int, band: int = BAND) -> npt.NDArray[np.float64]:
    """Return the share of each band of positions that was cached, [bands, snapshots]; row 0 is the first band."""
    image = np.zeros((math.ceil(length / band) * band, len(snapshots)))
    for column, snapshot in enumerate(snapshots):
        image[snapshot.positions, column] = 1
    return np.asarray(image.reshape(-1, band, len(snapshots)).mean(1))


def _cached_panel(axes: Axes, name: str, snapshots: Sequence[PositionSnapshot], length: int, band: int) -> None:
    image = cached_image(snapshots, length, band)
    steps = [snapshot.step for snapshot in snapshots] or [length]
    interval = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else steps[0]
    extent = (steps[0] - interval, steps[-1], 0, image.shape[0] * band)
    options: dict[str, Any] = dict(origin="lower", aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
    axes.imshow(image, extent=extent, **options)
    axes.set(title=name, xlabel="tokens seen", ylabel="position held", ylim=(0, length))
    axes.tick_params(labelbottom=True)  # the panel below may be empty
