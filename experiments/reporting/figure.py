"""The figure of the report's first page: lead against mismatch, learning curves, and the decided cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lib.files import Row
from reporting.cells import MapCell, decided
from reporting.page import by_seed
from reporting.real_model import mismatch_kl, runs_of
from smd_jax.monitor.run_plots import COLOURS

TASKS = {"sorting": COLOURS[0], "copy": COLOURS[1], "sums": COLOURS[2], "walk": COLOURS[3]}
CURVES = ("naive", "tis", "shadow", "mixed-50", "shadow-published", "anchor-alone", "full-cache")
MARKS = {"snapkv": "*", "tova-heads": "P"}


def draw(cells: Sequence[MapCell], showdown: MapCell, real: Sequence[Row], path: Path, made_of: str) -> None:
    """Writes the figure.

    Args:
      made_of: digest of the rows, stored in the file.
    """
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    mismatches, curves, leads = figure.subplots(1, 3)
    draw_mismatch(mismatches, cells, real)
    draw_curves(curves, showdown)
    draw_leads(leads, decided(cells))
    figure.savefig(path, dpi=110, metadata={"Description": made_of, "Software": None})


def draw_mismatch(axes: Axes, cells: Sequence[MapCell], real: Sequence[Row]) -> None:
    """Lead over TIS against the mismatch, every cell."""
    for cell in cells:
        colour = TASKS[cell.task.partition("-")[0]]
        lead = cell.lead("sparse")
        if cell.is_decided:
            axes.errorbar(cell.mismatch, lead.mean, lead.half, fmt="o", color=colour, markersize=5, capsize=3)
        else:
            axes.plot(cell.mismatch, lead.mean, "x", color=colour, markersize=5)
    for task, colour in TASKS.items():
        axes.plot([], [], "o", color=colour, label=task)
    axes.plot([], [], "x", color="black", label="one or two seeds")
    for policy, mark in MARKS.items():
        arms = runs_of(real, policy)
        for pilot in (False, True):
            ours, theirs = (
                by_seed([row for row in arms[name] if row["pilot"] == pilot], "sparse") for name in ("shadow", "tis")
            )
            seeds = sorted(ours.keys() & theirs.keys())
            label = f"SmolLM2, {policy}, {'pilot seed' if pilot else 'a seed each'}" if seeds else None
            face = "none" if pilot else "black"
            x, y = [mismatch_kl(real, policy)] * len(seeds), [ours[seed] - theirs[seed] for seed in seeds]
            axes.plot(x, y, mark, color="black", markerfacecolor=face, linestyle="", markersize=8, label=label)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("mismatch: KL of a dense learner to the sampler,\nnats per token, mean over the TIS runs")
    axes.set_ylabel("shadow − TIS, reward under the budget, T = 1")
    axes.set_title("A. All cells", loc="left", fontsize=10)
    axes.legend(fontsize=7, loc="upper left")
    axes.set_ylim(-0.12, 0.44)


def draw_curves(axes: Axes, showdown: MapCell) -> None:
    """Mean rewards along training in the cell with all arms."""
    for place, name in enumerate(CURVES):
        curves = [row["curve"] for row in showdown.arms[name]]
        steps = [point["step"] for point in curves[0]]
        for kind, style in (("sparse", "-"), ("dense", ":")):
            means = [mean(curve[index][kind] for curve in curves) for index in range(len(steps))]
            axes.plot(
                steps,
                means,
                style,
                marker="o",
                markersize=3,
                color=COLOURS[place],
                label=name if style == "-" else None,
            )
    axes.set_xlabel("rollouts")
    axes.set_ylabel("reward, T = 1")
    axes.set_title("B. The table's cell; solid: budget, dotted: full cache", loc="left", fontsize=10)
    axes.legend(fontsize=7, ncols=2, loc="lower left")
    axes.set_ylim(0.4, 1.0)


def draw_leads(axes: Axes, cells: Sequence[MapCell]) -> None:
    """Leads over TIS in the decided cells, at temperature 1 and greedily."""
    order = sorted(cells, key=lambda cell: cell.lead("sparse").mean)
    for kind, colour, offset, label in (
        ("sparse", COLOURS[1], 0.12, "T = 1"),
        ("sparse_greedy", COLOURS[0], -0.12, "greedy"),
    ):
        found = [cell.lead(kind) for cell in order]
        places = [place + offset for place in range(len(order))]
        halves = [lead.half for lead in found]
        axes.errorbar([lead.mean for lead in found], places, xerr=halves, fmt="o", color=colour, capsize=3, label=label)
    axes.axvline(0, color="grey", linewidth=0.8)
    names = [f"{cell.task}, {cell.policy}\n{cell.budget} keys, {cell.seeds} seeds" for cell in order]
    axes.set_yticks(range(len(order)), names, fontsize=7)
    axes.set_xlabel("shadow − TIS, reward under the budget")
    axes.set_title("C. Cells with three seeds or more", loc="left", fontsize=10)
    axes.legend(fontsize=8)
