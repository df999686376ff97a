"""The map as a picture: a field a cell, coloured by the method that is ahead there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from reporting.cells import KINDS, METHODS, Kind, MapCell
from smd_jax.monitor.run_plots import COLOURS

TITLES = {"sparse": "decoded under the budget", "dense": "decoded with the full cache"}
COLOUR: dict[str, str] = dict(zip(METHODS, COLOURS, strict=False))

NOBODY = "#888888"


def draw(cells: Sequence[MapCell], path: Path, made_of: str) -> None:
    """Rows are tasks and budgets, columns eviction policies; pale where the lead over the start is not established, and
    grey where nobody gains.

    Args:
      made_of: digest of the rows, kept in the file.
    """
    places = sorted({(cell.task, -cell.budget) for cell in cells})
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    figure = Figure(figsize=(13, 1.8 + 0.62 * len(places)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        draw_fields(axes, cells, kind, places, policies)
    patches = [Patch(color=COLOUR[method], label=method) for method in METHODS]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(METHODS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Description": made_of, "Software": None})


def draw_fields(
    axes: Axes, cells: Sequence[MapCell], kind: Kind, places: Sequence[tuple[str, int]], policies: Sequence[str]
) -> None:
    for cell in cells:
        x, y = policies.index(cell.policy), places.index((cell.task, -cell.budget))
        best = cell.best(kind)
        gain = cell.gain(best, kind)
        strong = gain.established and gain.mean > 0
        gains = cell.anybody_gains(kind)
        colour = COLOUR[best] if gains else NOBODY
        axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, alpha=0.75 if strong else 0.25, lw=0))
        start = cell.arms["untrained"]
        before = sum(row[kind] for row in start) / len(start)
        axes.text(x, y - 0.14, best if gains else "no gain", ha="center", va="center", fontsize=8)
        axes.text(x, y + 0.2, f"{before:.2f} {gain.mean:+.2f}".replace("-", "−"), ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(policies) - 0.5)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xticks(range(len(policies)), policies)
    axes.set_yticks(range(len(places)), [f"{task}\n{-budget} keys" for task, budget in places], fontsize=8)
    axes.set_title(f"Best method, {TITLES[kind]}: start and its gain", fontsize=10, loc="left")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
