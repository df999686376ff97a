"""The figures of the report: learning curves and leads of its first page, leads by mismatch, and collapse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lib.intervals import estimate
from reporting import collapse, dose
from reporting.page import LAST, grouped
from reporting.room import NAMES, OURS, RIVALS, RoomCell
from smd_jax.monitor.run_plots import COLOURS

MARKERS = {"tova-heads": "o", "h2o": "s"}
SMALLEST = 0.03  # effect of interest
TICKS, DECADES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5), (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1)
ARMS = ("full-cache", "naive", "tis", "shadow", OURS, "shadow-anchor", "bypass")
COLOUR = dict(zip(ARMS, COLOURS, strict=True)) | {"tis-1.5": COLOURS[2], "untrained": "0.5"}  # in all figures
CURVES = ("full-cache", "naive", "tis-1.5", "shadow", OURS, "shadow-anchor")


def saved(figure: Figure, path: Path, made_of: str) -> None:
    """Writes a figure with `made_of`, the digest of its rows."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110, metadata={"Description": made_of, "Software": None})


def draw_first(cell: RoomCell, path: Path, made_of: str) -> None:
    """Learning curves with both caches, and the leads over every dense learner and the full cache."""
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    budget, full, leads = figure.subplots(1, 3)
    draw_curves(budget, cell, "sparse_greedy", "budget", "A. Decoded under the budget")
    draw_curves(full, cell, "dense_greedy", "full cache", "B. Decoded with the full cache")
    draw_leads(leads, cell)
    handles, labels = budget.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=9, frameon=False)
    saved(figure, path, made_of)


def draw_curves(axes: Axes, cell: RoomCell, kind: str, column: str, title: str) -> None:
    """Greedy reward along training: mean over seeds, and its 95 % interval as a band."""
    for arm in CURVES:
        curves = [row["curve"] for row in cell.rows(arm, column)]
        steps = [point["step"] for point in curves[0]]
        found = [estimate([curve[index][kind] for curve in curves]) for index in range(len(steps))]
        means, halves = (np.array([getattr(x, name) for x in found]) for name in ("mean", "half"))
        axes.plot(steps, means, color=COLOUR[arm], label=NAMES[arm])
        axes.fill_between(steps, means - halves, means + halves, color=COLOUR[arm], alpha=0.15, linewidth=0)
    axes.axvspan(steps[-LAST], steps[-1], color="0.92", zorder=0, label="evaluations whose mean is in the table")
    axes.set_xlabel("rollouts")
    axes.set_ylabel("greedy reward")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylim(0.2, 0.9)


def draw_leads(axes: Axes, cell: RoomCell) -> None:
    """Leads of the mixture over each dense learner and over a sampler that evicts nothing, greedily."""
    order = sorted((*RIVALS, "full-cache"), key=lambda arm: cell.contrast(OURS, arm, "sparse_greedy").mean)
    for kind, colour, offset, label in (
        ("sparse_greedy", COLOURS[1], 0.12, "budget"),
        ("dense_greedy", COLOURS[0], -0.12, "full cache"),
    ):
        found = [cell.contrast(OURS, arm, kind) for arm in order]
        places = [place + offset for place in range(len(order))]
        halves = [lead.half for lead in found]
        axes.errorbar([lead.mean for lead in found], places, xerr=halves, fmt="o", color=colour, capsize=3, label=label)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(order)), [fill(NAMES[arm], 35) for arm in order], fontsize=8)
    axes.set_xlabel(f"greedy reward: {NAMES[OURS]},\nminus this learner")
    axes.set_title("C. Leads over every dense learner and the full cache", loc="left", fontsize=10)
    axes.legend(fontsize=8)


def draw_doses(cells: Sequence[dose.DoseCell], smollm2: Mapping[str, float], path: Path, made_of: str) -> None:
    """A row of panels for each task: leads over the better of naive and TIS by mismatch, and rewards of all arms. Cells
    that evict nothing have no place on the logarithmic axis.

    Args:
      smollm2: eviction policy -> the real model's mismatch in nats a token.
    """
    tasks = dose.of_tasks(cells)
    figure = Figure(figsize=(12, 4.8 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for (task, inside), (leads, rewards) in zip(tasks.items(), panels, strict=True):
        of_task = [cell for cell in inside if cell.evicts]
        draw_dose_leads(leads, of_task)
        leads.set_title(f"{task}: leads, 95 % intervals; circles TOVA per head, squares H2O", loc="left", fontsize=10)
        for rule, nats in smollm2.items():
            leads.axvline(nats, color="grey", linewidth=0.8, linestyle=":")
            words, place = f"SmolLM2, {rule}", (nats * 0.98, 0.97)
            across = ("data", "axes fraction")
            leads.annotate(words, place, xycoords=across, rotation=90, ha="right", va="top", fontsize=7)
        draw_dose_rewards(rewards, of_task)
        rewards.set_title(f"{task}: rewards; markers as at the left", loc="left", fontsize=10)
        for axes in (leads, rewards):
            axes.set_xscale("log")
            ticks = TICKS if min(cell.nats for cell in of_task) > TICKS[0] else DECADES
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("mismatch: KL from sampler to dense learner, nats per token")
            axes.legend(fontsize=8)
    saved(figure, path, made_of)


def draw_dose_leads(axes: Axes, cells: Sequence[dose.DoseCell]) -> None:
    """Leads of the mixture and of shadow masks over the better of naive and TIS, by mismatch."""
    for arm, aside in (("mixed-50", 0.98), ("shadow", 1.02)):
        for policy, marker in MARKERS.items():
            inside = [cell for cell in cells if f", {policy}," in cell.label]
            found = [cell.lead(arm) for cell in inside]
            axes.errorbar(
                [cell.nats * aside for cell in inside],
                [lead.mean for lead in found],
                [lead.half for lead in found],
                fmt=marker,
                color=COLOUR[arm],
                capsize=3,
                label=NAMES[arm] if policy == "tova-heads" else None,
            )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axhline(SMALLEST, color="grey", linewidth=0.8, linestyle="--", label="smallest effect of interest")
    axes.set_ylabel("greedy reward: lead over the better of naive and TIS")


def draw_dose_rewards(axes: Axes, cells: Sequence[dose.DoseCell]) -> None:
    for arm in dose.ARMS:
        for policy, marker in MARKERS.items():
            inside = [cell for cell in cells if f", {policy}," in cell.label]
            means = [mean(cell.rewards[arm].values()) for cell in inside]
            label = NAMES[arm] if policy == "tova-heads" else None
            axes.plot(
                [cell.nats for cell in inside], means, f"{marker}-", color=COLOUR[arm], linewidth=0.8, label=label
            )
    axes.set_ylabel("greedy reward under the budget")


def draw_survival(cells: Sequence[collapse.CollapseCell], path: Path, made_of: str) -> None:
    """The share of runs that have not collapsed, along training: a panel for each policy, all rates together."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    policies = grouped(cells, lambda cell: cell.policy)
    for axes, (policy, inside) in zip(figure.subplots(1, len(policies), sharey=True), policies.items(), strict=True):
        for arm, of_arm in grouped(inside, lambda cell: cell.arm).items():
            times = [time for cell in of_arm for time in cell.times]
            steps = [point["step"] for point in of_arm[0].rows[0]["curve"]]
            alive = [mean(time is None or time > step for time in times) for step in steps]
            axes.step(steps, alive, where="post", color=COLOUR[arm], label=f"{arm}, {len(times)} runs")
        axes.set(title=policy, xlabel="rollouts", ylabel="runs that have not collapsed, share")
        axes.legend(fontsize=8)
    saved(figure, path, made_of)
