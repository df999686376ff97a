"""Plots: the right curves at the right places, and a file that is a picture."""

from __future__ import annotations

import math

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from smd_jax.monitor import plots

MEAN, MAX = plots.MISMATCH_MEAN, plots.MISMATCH_MAX


def history(offset: float = 0.0, steps: int = 8) -> list[dict]:
    rows = [{"step": s, "reward": offset + s / 10, MEAN: 1e-6, MAX: 1e-5, "entropy": 1.0} for s in range(steps)]
    for row in rows[::4]:
        row |= {"eval/sparse": row["reward"], "eval/dense": 0.9}
    return rows


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, open for inspection."""
    saved = []
    savefig = Figure.savefig

    def keep(self, target, dpi):
        saved.append(self)
        savefig(self, target, dpi=dpi)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def lines_of(axes, colour):
    return [line for line in axes.get_lines() if to_hex(line.get_color()) == colour.lower()]


def labels_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_three_panels_with_labels_and_units(tmp_path, figures):
    path = tmp_path / "run.png"
    plots.plot_training({"shadow mask": history()}, path)
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == ["Reward", "Mismatch of sampler and learner", "Entropy"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"training step"}
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "mean reward",
        "|Δ log p| per token (nats)",
        "mean entropy per token (nats)",
    ]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log", "linear"]
    picture = matplotlib.image.imread(path)
    assert picture.shape[1] > picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10


def test_curves_hold_the_rows(tmp_path, figures):
    plots.plot_training({"shadow mask": history()}, tmp_path / "run.png")
    reward, sparse, dense = figures[0].axes[0].get_lines()
    assert reward.get_xydata()[:, 1] == pytest.approx([s / 10 for s in range(8)])
    assert sparse.get_xydata() == pytest.approx(np.array([[0, 0.0], [4, 0.4]]))
    assert dense.get_xydata() == pytest.approx(np.array([[0, 0.9], [4, 0.9]]))
    mean, maximum = figures[0].axes[1].get_lines()
    assert set(mean.get_ydata()) == {1e-6} and set(maximum.get_ydata()) == {1e-5}


def test_arms_have_their_own_colours(tmp_path, figures):
    plots.plot_training({"a": history(), "b": history(0.1)}, tmp_path / "run.png")
    for axes in figures[0].axes:
        assert lines_of(axes, plots.COLOURS[0]) and lines_of(axes, plots.COLOURS[1])
    assert labels_of(figures[0])[:2] == ["a", "b"]
    assert "single seed" not in labels_of(figures[0])


def test_seeds_are_thin_and_their_mean_is_drawn(tmp_path, figures):
    plots.plot_training({"a": [history(0.0), history(0.2, steps=6)]}, tmp_path / "run.png")
    first, second, mean, *_ = figures[0].axes[0].get_lines()
    assert first.get_linewidth() < mean.get_linewidth()
    assert len(first.get_xdata()) == 8 and len(second.get_xdata()) == 6
    assert mean.get_ydata() == pytest.approx([0.1 + s / 10 for s in range(6)])
    assert "single seed" in labels_of(figures[0])


def test_zeros_lie_on_a_named_line_of_the_logarithmic_axis(tmp_path, figures):
    rows = history()
    rows[3] |= {MEAN: 0.0, MAX: 0.0}
    plots.plot_training({"a": rows}, tmp_path / "run.png")
    axes = figures[0].axes[1]
    mean = axes.get_lines()[0].get_ydata()
    assert mean[3] == pytest.approx(1e-7)
    assert axes.get_ylim()[0] < 1e-7
    assert [text.get_text() for text in axes.texts] == ["exactly 0"]


def test_nothing_but_zeros(tmp_path, figures):
    plots.plot_training({"a": [{"step": s, MEAN: 0.0} for s in range(3)]}, tmp_path / "run.png")
    (axes,) = figures[0].axes
    assert set(axes.get_lines()[0].get_ydata()) == {1e-9}


def test_no_note_without_zeros(tmp_path, figures):
    plots.plot_training({"a": history()}, tmp_path / "run.png")
    assert not figures[0].axes[1].texts


def test_length_takes_the_place_of_entropy(tmp_path, figures):
    rows = [{"step": s, "reward": 0.1, "completions/mean_length": 8.0} for s in range(3)]
    plots.plot_training({"a": rows}, tmp_path / "run.png")
    assert [axes.get_title() for axes in figures[0].axes] == ["Reward", "Completion length"]
    assert labels_of(figures[0]) == ["a"]


def test_legend_covers_no_panel(tmp_path, figures):
    plots.plot_training({"a": history(), "b": history()}, tmp_path / "run.png")
    (figure,) = figures
    legend = figure.legends[0].get_window_extent()
    assert not any(axes.get_tightbbox().overlaps(legend) for axes in figure.axes)


def test_curve_leaves_out_what_is_not_there():
    rows = [{"step": 1, "reward": 0.5}, {"step": 2}, {"step": 3, "reward": math.nan}, {"step": 4, "reward": 1.0}]
    steps, values = plots.curve(rows, "reward")
    assert steps.tolist() == [1, 4] and values.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        ({}, "expected 1 to 7 labels; got 0"),
        ({str(i): history() for i in range(8)}, "expected 1 to 7 labels; got 8"),
        ({"a": []}, "got 0 rows and 0 histories"),
        ({"a": [{"step": 0, "loss": 1.0}]}, r"expected rows with 'reward' or .*; got none under \['a'\]"),
    ],
)
def test_nothing_to_draw(tmp_path, histories, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_training(histories, tmp_path / "run.png")


# Prompt of 2, response of 3; key 1 is evicted before query 3.
#            key 0  1  2  3  4
VISIBLE = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]


def test_shadow_mask_by_hand(tmp_path):
    axes = Figure().subplots()
    plots.plot_shadow_mask(np.array(VISIBLE, bool), axes, prompt_length=2)
    (image,) = axes.get_images()
    future, hidden, visible = 0, 1, 2
    assert np.asarray(image.get_array()).tolist() == [
        [visible, future, future, future, future],
        [visible, visible, future, future, future],
        [visible, visible, visible, future, future],
        [visible, hidden, visible, visible, future],
        [visible, hidden, visible, visible, visible],
    ]
    assert axes.get_title() == "A query sees at most 4 of 5 keys"
    vertical, horizontal = axes.get_lines()
    assert np.asarray(vertical.get_xdata()).tolist() == [1.5, 1.5]
    assert np.asarray(horizontal.get_ydata()).tolist() == [1.5, 1.5]
    assert axes.get_ylim() == (4.5, -0.5)


def test_shadow_mask_of_response_rows_keeps_their_positions(tmp_path, figures):
    path = tmp_path / "mask.png"
    plots.plot_shadow_mask(jnp.array(VISIBLE, bool)[2:], path, prompt_length=2)
    (axes,) = figures[0].axes
    assert axes.get_ylim() == (4.5, 1.5)
    assert np.asarray(axes.get_images()[0].get_array())[0].tolist() == [2, 2, 2, 0, 0]
    assert matplotlib.image.imread(path).ndim == 3


@pytest.mark.parametrize(
    ("shape", "prompt_length", "message"),
    [((3, 2), 1, "got 3 queries and 2 keys"), ((2, 2), 3, "prompt_length must lie in 0 … 2 keys; got 3")],
)
def test_shadow_mask_that_does_not_fit(tmp_path, shape, prompt_length, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_shadow_mask(np.ones(shape, bool), tmp_path / "mask.png", prompt_length)
