import numpy as np
import pytest
from PIL import Image

from kvpass.apps.demo import plots
from kvpass.apps.demo.recall import RecallOutcome
from kvpass.apps.demo.stream import HeldSnapshot


def test_each_pixel_is_the_share_of_its_band_that_is_held():
    image = plots.kept_image([HeldSnapshot(4, [0, 1, 2, 3]), HeldSnapshot(12, [0, *range(8, 16)])], length=20)
    assert image.shape == (3, 2)  # 20 positions make three bands of 8
    assert image.tolist() == [[0.5, 0.125], [0, 1], [0, 0]]


def test_one_curve_per_policy_and_a_line_where_training_ended(make_run):
    runs = {"full": make_run(2.0), "window": make_run(1.0)}
    axes = plots.perplexity_figure(runs, window=8, title="T", trained=16).axes[0]
    full, window, border = axes.lines
    assert [line.get_label() for line in (full, window)] == ["full", "window"]
    np.testing.assert_allclose(full.get_ydata(), np.exp(2.0), rtol=1e-6)
    assert (full.get_xdata()[0], full.get_xdata()[-1]) == (7, 30)  # the last token of the first and last window
    assert set(border.get_xdata()) == {16}


def test_no_line_when_the_stream_stays_in_the_trained_range(make_run):
    assert len(plots.perplexity_figure({"full": make_run()}, 8, "T", trained=31).axes[0].lines) == 1


def test_many_policies_look_different(make_run):
    lines = plots.perplexity_figure({f"p{i}": make_run() for i in range(14)}, 8, "T").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 14


@pytest.mark.parametrize("count", [1, 4, 5])
def test_one_panel_per_policy_and_no_empty_frames(make_run, count):
    snapshots = {f"p{i}": make_run().snapshots for i in range(count)}
    figure = plots.kept_figure(snapshots, 32, "T")
    assert [axes.get_title() for axes in figure.axes if axes.axison] == list(snapshots)


def test_saved_pictures_are_png_and_carry_their_title(tmp_path, make_run):
    plots.save(plots.kept_figure({"window": make_run().snapshots}, 32, "Kept"), tmp_path / "kept.png", "Kept")
    with Image.open(tmp_path / "kept.png") as picture:
        assert (picture.format, picture.info["Title"]) == ("PNG", "Kept")
        assert np.asarray(picture.convert("L")).std() > 0


def test_recall_is_a_square_for_each_policy_and_distance():
    found = {
        name: RecallOutcome((16, 64), later=(1.0, share), at_once=(0.0, 0.0))
        for name, share in (("a", 0.5), ("b", 0.25))
    }
    later, at_once = plots.recall_figure(found, "T").axes
    assert later.images[0].get_array().tolist() == [[1, 0.5], [1, 0.25]]
    assert [text.get_text() for text in later.texts] == ["100", "50", "100", "25"]
    assert [label.get_text() for label in later.get_yticklabels()] == ["a", "b"]
    assert later.get_title() != at_once.get_title()
