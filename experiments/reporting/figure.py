"""The figure of the report's first page: learning curves with both caches, and the leads over every dense learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lib.intervals import estimate
from reporting.room import OURS, RIVALS, RoomCell
from smd_jax.monitor.run_plots import COLOURS

CURVES = ("full-cache", "naive", "tis-1.5", "shadow", OURS, "anchor-then-shadow")


def draw(cell: RoomCell, path: Path, made_of: str) -> None:
    """Writes the figure.

    Args:
      made_of: digest of the rows, stored in the file.
    """
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    budget, full, leads = figure.subplots(1, 3)
    draw_curves(budget, cell, "sparse_greedy", "budget", "A. Decoded under the budget")
    draw_curves(full, cell, "dense_greedy", "full cache", "B. Decoded with the full cache")
    draw_leads(leads, cell)
    figure.savefig(path, dpi=110, metadata={"Description": made_of, "Software": None})


def draw_curves(axes: Axes, cell: RoomCell, kind: str, column: str, title: str) -> None:
    """Greedy reward along training: mean over seeds, and its 95 % interval as a band."""
    for place, arm in enumerate(CURVES):
        curves = [row["curve"] for row in cell.rows(arm, column)]
        steps = [point["step"] for point in curves[0]]
        found = [estimate([curve[index][kind] for curve in curves]) for index in range(len(steps))]
        means, halves = (np.array([getattr(x, name) for x in found]) for name in ("mean", "half"))
        axes.plot(steps, means, color=COLOURS[place], label=arm)
        axes.fill_between(steps, means - halves, means + halves, color=COLOURS[place], alpha=0.15, linewidth=0)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("greedy reward")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(fontsize=8)
    axes.set_ylim(0.2, 0.9)


def draw_leads(axes: Axes, cell: RoomCell) -> None:
    """Leads of the mixture over each dense learner, greedily."""
    order = sorted(RIVALS, key=lambda arm: cell.contrast(OURS, arm, "sparse_greedy").mean)
    for kind, colour, offset, label in (
        ("sparse_greedy", COLOURS[1], 0.12, "budget"),
        ("dense_greedy", COLOURS[0], -0.12, "full cache"),
    ):
        found = [cell.contrast(OURS, arm, kind) for arm in order]
        places = [place + offset for place in range(len(order))]
        halves = [lead.half for lead in found]
        axes.errorbar([lead.mean for lead in found], places, xerr=halves, fmt="o", color=colour, capsize=3, label=label)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_xlabel(f"greedy reward: {OURS} minus the dense learner")
    axes.set_title("C. Leads over every dense learner", loc="left", fontsize=10)
    axes.legend(fontsize=8)
