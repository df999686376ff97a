"""The figure of the study of dose: leads of replay by the mismatch between sampler and learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from lib.intervals import paired
from reporting.dose import ARMS, SEEDS, DoseCell
from smd_jax.monitor.run_plots import COLOURS

OURS = ("mixed-50", "shadow")
MARKERS = {"tova-heads": "o", "h2o": "s"}
SMOLLM2 = {"TOVA": 0.045, "SnapKV": 0.143}  # nats a token, docs/older_studies.md
SMALLEST = 0.03  # effect of interest
LEFT_EDGE = 0.004


def draw(cells: Sequence[DoseCell], path: Path, made_of: str) -> None:
    """Writes the figure: left the leads over the better of naive and TIS, right the rewards of all arms.

    Args:
      made_of: digest of the rows, stored in the file.
    """
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    leads, rewards = figure.subplots(1, 2)
    for place, arm in enumerate(OURS):
        for policy, marker in MARKERS.items():
            inside = [cell for cell in cells if f", {policy}," in cell.label]
            found = [paired(cell.rewards[arm], cell.rewards[cell.rival(SEEDS)]) for cell in inside]
            leads.errorbar(
                [nats * (0.98, 1.02)[place] for nats in mismatches(inside)],
                [lead.mean for lead in found],
                [lead.half for lead in found],
                fmt=marker,
                color=COLOURS[place],
                capsize=3,
                label=f"{arm}, {policy}",
            )
    for name, nats in SMOLLM2.items():
        leads.axvline(nats, color="grey", linewidth=0.8, linestyle=":")
        place = (nats, 0.62)  # above the points
        leads.annotate(f"SmolLM2, {name}", place, xycoords=("data", "axes fraction"), rotation=90, fontsize=7)
    leads.axhline(0, color="grey", linewidth=0.8)
    leads.axhline(SMALLEST, color="grey", linewidth=0.8, linestyle="--")
    leads.set_ylabel("greedy reward: lead over the better of naive and TIS")
    leads.set_title("A. Leads under the budget, 95 % intervals", loc="left", fontsize=10)
    for place, arm in enumerate(ARMS):
        for policy, marker in MARKERS.items():
            inside = [cell for cell in cells if f", {policy}," in cell.label]
            means = [mean(cell.rewards[arm].values()) for cell in inside]
            label = arm if policy == "tova-heads" else None
            rewards.plot(mismatches(inside), means, marker=marker, color=COLOURS[place], linewidth=0.8, label=label)
    rewards.set_ylabel("greedy reward under the budget")
    rewards.set_title("B. Rewards; circles TOVA of each head, squares H2O", loc="left", fontsize=10)
    for axes in (leads, rewards):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.annotate("nothing evicted", (LEFT_EDGE, 0.58), xycoords=("data", "axes fraction"), rotation=90, fontsize=7)
        axes.set_xlabel("mismatch: KL from sampler to dense learner, nats per token")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Description": made_of, "Software": None})


def mismatches(cells: Sequence[DoseCell]) -> list[float]:
    """Of each cell, in nats; at the left edge if it is rounding."""
    return [max(LEFT_EDGE, mean(cell.mismatch.values())) for cell in cells]
