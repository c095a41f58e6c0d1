"""The pictures; docs/demo.md says how to read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpass.apps.demo.recall import AT_ONCE, LATER, RecallOutcome
from kvpass.apps.demo.stream import HeldSnapshot, StreamRun, running_perplexity

BAND = 8  # positions that share one line of pixels in the picture of what was kept


def perplexity_figure(runs: Mapping[str, StreamRun], window: int, title: str, trained: int | None = None) -> Figure:
    """Perplexity along the stream, one line per policy; a dotted line where the trained range ends."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    # Colours alone do not tell many lines apart, so that the line style changes after ten.
    looks = itertools.product(("-", "--", ":"), colormaps["tab10"].colors)  # type: ignore[attr-defined]
    for (policy, run), (style, colour) in zip(runs.items(), looks, strict=False):
        curve = running_perplexity(run.losses, window)
        last = np.arange(len(curve)) + run.losses.shape[1] - len(curve)  # the last token of each window
        axes.plot(last, curve.numpy(), label=policy, linestyle=style, color=colour, linewidth=1.2)
    if trained is not None and any(run.losses.shape[1] > trained for run in runs.values()):
        axes.axvline(trained, linestyle=":", color="black")
        axes.annotate("end of the trained range", (trained, 1), (4, -12), ("data", "axes fraction"), "offset points")
    axes.set(title=title, xlabel="position in the stream", ylabel=f"perplexity of the last {window} tokens")
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    axes.legend()
    return figure


def recall_figure(found: Mapping[str, RecallOutcome], title: str) -> Figure:
    """A panel for each way of asking: a row for each policy, a column for each distance, dark where it still knows."""
    figure = Figure(figsize=(12, 0.32 * len(found) + 1.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for way, axes in zip((LATER, AT_ONCE), panels, strict=True):
        _recall_panel(axes, way, found)
    figure.suptitle(title)
    return figure


def _recall_panel(axes: Axes, way: str, found: Mapping[str, RecallOutcome]) -> None:
    shares = np.array([recall.ways[way] for recall in found.values()])  # [policies, distances]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        colour = "white" if share > 0.5 else "black"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    distances = next(iter(found.values())).distances
    axes.set(title=f"{way}, % right", xlabel="tokens since the pair was said")
    axes.set_xticks(range(len(distances)), [str(distance) for distance in distances])
    axes.set_yticks(range(len(found)), [*found])


def kept_image(snapshots: Sequence[HeldSnapshot], length: int, band: int = BAND) -> npt.NDArray[np.float64]:
    """The share of each band of positions that was held: [bands, snapshots], row 0 the first `band` positions."""
    kept = np.zeros((math.ceil(length / band) * band, len(snapshots)))
    for column, snapshot in enumerate(snapshots):
        kept[snapshot.positions, column] = 1
    return np.asarray(kept.reshape(-1, band, len(snapshots)).mean(1))


def kept_figure(
    snapshots: Mapping[str, Sequence[HeldSnapshot]], length: int, title: str | None, band: int = BAND
) -> Figure:
    """Which positions were held over time, one panel per policy; a line of pixels covers `band` positions."""
    down = math.ceil(len(snapshots) / 4)
    across = math.ceil(len(snapshots) / down)
    figure = Figure(figsize=(3.2 * across + 0.8, 3.2 * down + 0.6), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    for (policy, taken), axes in zip(snapshots.items(), panels, strict=False):
        _kept_panel(axes, policy, taken, length, band)
    for axes in itertools.islice(panels, down * across):
        axes.set_axis_off()
    if title is not None:
        figure.suptitle(title)
    return figure


def _kept_panel(axes: Axes, policy: str, snapshots: Sequence[HeldSnapshot], length: int, band: int) -> None:
    image = kept_image(snapshots, length, band)
    steps = [snapshot.step for snapshot in snapshots] or [length]
    every = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else steps[0]
    axes.imshow(
        image,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(steps[0] - every, steps[-1], 0, image.shape[0] * band),
    )
    axes.set(title=policy, xlabel="step", ylabel="position kept", ylim=(0, length))
    axes.tick_params(labelbottom=True)  # the panel below may be empty


def save(figure: Figure, path: Path, title: str) -> None:
    """As PNG; the title travels in the file."""
    figure.savefig(path, dpi=120, metadata={"Title": title})
