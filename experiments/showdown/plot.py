"""The picture of `main.py`: every arm's final rewards and mismatch side by side, and its rewards over the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from showdown.report import DECODINGS, Run, interval, values_of
from smd_jax.monitor.plots import COLOURS

Runs = Sequence[Run]
SPARSE = COLOURS[0]
DENSE = COLOURS[1]
FLOOR = 1e-16  # where a mismatch of 0 is drawn
COLUMNS = 4


def draw(arms: Mapping[str, Runs], path: Path) -> None:
    """One row of panels that compares the arms, and below it one panel an arm."""
    rows = math.ceil(len(arms) / COLUMNS)
    figure = Figure(figsize=(11, 1.4 + 0.28 * len(arms) + 2.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1, height_ratios=[1.4 + 0.28 * len(arms), 2.1 * rows])
    above = figure.add_subfigure(grid[0])
    below = figure.add_subfigure(grid[1])
    left, right = above.subplots(1, 2, sharey=True)
    draw_rewards(left, arms)
    draw_mismatch(right, arms)
    panels = below.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, runs) in zip(panels, arms.items(), strict=False):
        draw_curves(axes, name, runs)
    for axes in panels[len(arms) :]:
        axes.set_axis_off()
    panels[0].legend(frameon=False, fontsize=7, loc="lower right")
    below.supxlabel("rollout", fontsize=9)
    below.supylabel("reward", fontsize=9)
    figure.savefig(path, dpi=130)


def draw_rewards(axes: Axes, arms: Mapping[str, Runs]) -> None:
    for kind, colour, shift in (("sparse", SPARSE, -0.15), ("dense", DENSE, 0.15)):
        start = [value for runs in arms.values() for value in values_of(runs, f"{kind}_before")]
        axes.axvline(float(np.mean(start)), color=colour, linewidth=0.9, linestyle=":", label=f"{kind}, before")
        for place, runs in enumerate(arms.values()):
            values = values_of(runs, kind)
            axes.plot(values, [place + shift] * len(values), ".", color=colour, alpha=0.35, markersize=4)
            if len(values) > 1:  # one seed has no interval
                axes.plot(interval(values), [place + shift] * 2, color=colour, linewidth=1.4)
            axes.plot(np.mean(values), place + shift, "o", color=colour, markersize=5, label=None if place else kind)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=7)
    style(axes, "Final reward, 95 % t interval over seeds")


def draw_mismatch(axes: Axes, arms: Mapping[str, Runs]) -> None:
    for place, runs in enumerate(arms.values()):
        values = [max(value, FLOOR) for value in values_of(runs, "mismatch_kl")]
        axes.plot(values, [place] * len(values), ".", color="0.35", markersize=5)
    axes.set_xscale("log")
    axes.set_xlim(FLOOR / 3, None)
    style(axes, "mismatch_kl, mean over the run (nats)")


def draw_curves(axes: Axes, name: str, runs: Runs) -> None:
    """Thin lines are seeds, thick ones their mean."""
    reward = np.array([run.curve["reward"] for run in runs], dtype=float).mean(axis=0)
    axes.plot(np.array(runs[0].curve["step"], dtype=float), reward, color="0.55", linewidth=1.0, label="training")
    steps = np.array(runs[0].curve["eval/step"], dtype=float)
    for (kind, metric), colour in zip(DECODINGS.items(), (SPARSE, DENSE), strict=True):
        curves = np.array([run.curve[metric] for run in runs], dtype=float)
        axes.plot(steps, curves.T, color=colour, linewidth=0.7, alpha=0.35)
        axes.plot(steps, curves.mean(axis=0), color=colour, linewidth=1.7, label=kind)
    axes.set_ylim(0, 1.02)
    style(axes, f"{name}, {runs[0].row['learning_rate']:g}")


def style(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
