"""Draw lines, bars, shares and held positions, in panels."""

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

from kvpass.apps.evaluation.session import HeldSnapshot

BAND = 8  # positions that share one line of pixels in the picture of what was held
Line = Sequence[tuple[float, float]]
LOOKS = list(itertools.product(("-", "--", ":"), colormaps["tab10"].colors))  # type: ignore[attr-defined]


def lines(
    panels: Mapping[str, Mapping[str, Line]],
    across: str,
    up: str,
    *,
    logarithmic: bool = False,
    log_up: bool = False,
) -> Figure:
    """Draw a panel for each title, with a line for each name; a name has one style in all panels.

    Args:
        across, up: what the axes show.
        logarithmic: whether both axes are logarithmic; with `log_up` only the upward one is.
    """
    columns = min(2, len(panels))
    down = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns + 2.5, 4.2 * down), layout="constrained")
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    axes = figure.subplots(down, columns, squeeze=False).flat
    for (title, panel), where in zip(panels.items(), axes, strict=False):  # the last row may have more axes
        _panel(where, panel, names)
        where.set(title=title, xlabel=across, ylabel=up)
        _scales(where, panel, logarithmic, log_up)
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


def _scales(axes: Axes, panel: Mapping[str, Line], logarithmic: bool, log_up: bool) -> None:
    if not logarithmic and not log_up:
        axes.set_ylim(bottom=0)
        return
    if logarithmic:
        ticks = sorted({x for points in panel.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[f"{tick:,.0f}" for tick in ticks], minor=False)
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")


def shares(panels: Mapping[str, Mapping[str, Mapping[str, float]]], across: str) -> Figure:
    """Draw a panel for each title: a row for each name, a column for each key, darker for higher shares."""
    tallest = max(len(rows) for rows in panels.values())
    figure = Figure(figsize=(5.5 * len(panels) + 1, 0.32 * tallest + 1.6), layout="constrained")
    for (title, rows), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False).flat, strict=True):
        columns = list(next(iter(rows.values())))
        values = np.array([[row[column] for column in columns] for row in rows.values()])
        axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (down, right), share in np.ndenumerate(values):
            colour = "white" if share > 0.5 else "black"
            axes.text(right, down, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set(title=f"{title}, % right", xlabel=across)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), [*rows])
    return figure


def kept(
    snapshots: Mapping[str, Sequence[HeldSnapshot]], length: int, title: str | None = None, band: int = BAND
) -> Figure:
    """Draw which positions were held over time, a panel for each name; a line of pixels covers `band` positions."""
    down = math.ceil(len(snapshots) / 4)
    across = math.ceil(len(snapshots) / down)
    figure = Figure(figsize=(3.2 * across + 0.8, 3.2 * down + 0.6), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    for (name, taken), axes in zip(snapshots.items(), panels, strict=False):  # the last row may have more
        _kept_panel(axes, name, taken, length, band)
    for axes in itertools.islice(panels, down * across):
        axes.set_axis_off()
    if title is not None:
        figure.suptitle(title)
    return figure


def kept_image(snapshots: Sequence[HeldSnapshot], length: int, band: int = BAND) -> npt.NDArray[np.float64]:
    """Return the share of each band of positions that was held, [bands, snapshots]; row 0 is the first band."""
    image = np.zeros((math.ceil(length / band) * band, len(snapshots)))
    for column, snapshot in enumerate(snapshots):
        image[snapshot.positions, column] = 1
    return np.asarray(image.reshape(-1, band, len(snapshots)).mean(1))


def _kept_panel(axes: Axes, name: str, snapshots: Sequence[HeldSnapshot], length: int, band: int) -> None:
    image = kept_image(snapshots, length, band)
    steps = [snapshot.step for snapshot in snapshots] or [length]
    every = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else steps[0]
    extent = (steps[0] - every, steps[-1], 0, image.shape[0] * band)
    look: dict[str, Any] = dict(origin="lower", aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
    axes.imshow(image, extent=extent, **look)
    axes.set(title=name, xlabel="tokens seen", ylabel="position held", ylim=(0, length))
    axes.tick_params(labelbottom=True)  # the panel below may be empty
