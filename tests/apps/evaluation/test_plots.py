"""Test that plots show their inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image

from kvpass.apps.evaluation import plots
from kvpass.apps.evaluation.session import PositionSnapshot

SNAPSHOTS = [PositionSnapshot(step, list(range(max(0, step - 8), step))) for step in range(4, 33, 4)]


def test_each_pixel_is_the_share_of_its_band_that_is_held() -> None:
    image = plots.cached_image([PositionSnapshot(4, [0, 1, 2, 3]), PositionSnapshot(12, [0, *range(8, 16)])], length=20)
    assert image.shape == (3, 2)  # 20 positions make three bands of 8
    assert image.tolist() == [[0.5, 0.125], [0, 1], [0, 0]]


def test_each_name_has_a_line_of_its_own_style() -> None:
    names = {f"p{number}": [(1.0, 2.0), (3.0, 4.0)] for number in range(14)}
    (axes,) = (axes for axes in plots.lines({"T": names}, "x", "y").axes if axes.axison)
    assert [line.get_label() for line in axes.lines] == list(names)
    assert len({(str(line.get_color()), line.get_linestyle()) for line in axes.lines}) == 14


@pytest.mark.parametrize(("given", "scales"), [({}, "ll"), ({"log_y": True}, "lL"), ({"logarithmic": True}, "LL")])
def test_axes_are_logarithmic_where_that_is_wanted(given: dict[str, bool], scales: str) -> None:
    axes = plots.lines({"T": {"a": [(1, 2), (2, 300)]}}, "x", "y", **given).axes[0]
    assert [axes.get_xscale(), axes.get_yscale()] == [{"l": "linear", "L": "log"}[scale] for scale in scales]


@pytest.mark.parametrize("count", [1, 4, 5])
def test_one_panel_for_each_policy_and_no_empty_frames(count: int) -> None:
    snapshots = {f"p{number}": SNAPSHOTS for number in range(count)}
    figure = plots.cached_positions(snapshots, 32, "T")
    assert [axes.get_title() for axes in figure.axes if axes.axison] == list(snapshots)


def test_a_picture_is_not_empty(tmp_path: Path) -> None:
    plots.cached_positions({"window": SNAPSHOTS}, 32).savefig(tmp_path / "kept.png")
    with Image.open(tmp_path / "kept.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 0


def test_shares_are_a_square_for_each_name_and_column() -> None:
    found = {"a": {"0%": 1.0, "50%": 0.5}, "b": {"0%": 1.0, "50%": 0.25}}
    (axes,) = plots.shares({"T": found}, "depth").axes
    assert axes.images[0].get_array().tolist() == [[1, 0.5], [1, 0.25]]
    assert [text.get_text() for text in axes.texts] == ["100", "50", "100", "25"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
