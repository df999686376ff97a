"""Draws the curves of runs with matplotlib: training.png, and the PNG, SVG and HTML files of smd-plot.

Needs `matplotlib`: `pip install -e '.[train]'`. Figures use the object interface, which opens no window and changes no
global state.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from smd_jax.monitor.curves import Run, load_runs, main_metrics, points_of
from smd_jax.text.visible_text import visible

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("pictures of runs need matplotlib: pip install -e '.[train]'") from error

# Okabe and Ito's palette, which is safe for common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLUMNS = 4  # of panels
LOGARITHMIC = ("sampling/sampling_logp_difference/mean",)
MARKED = 30  # curves with at most this many points also show them as dots


def plot_runs(paths: Sequence[str | Path], out: str | Path) -> None:
    """Draws the main metrics of all runs at or below the paths, one line per run.

    Args:
      out: the image file; its ending chooses the format.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a file of a run that cannot be read, or none of the main metrics in any of them.
    """
    out = Path(out)
    figure = runs_figure(load_runs(paths))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, out, out.suffix.removeprefix("."))


def runs_figure(runs: Sequence[Run]) -> Figure:
    """One panel for each main metric, and a legend.

    Raises:
      ValueError: no main metric in any of the runs.
    """
    names = main_metrics(runs)
    if not names:
        metrics = sorted({name for run in runs for row in run.history for name in row} - {"step"})
        raise ValueError(f"expected runs with rewards or another of the main metrics; got {metrics}")
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.0 * columns, 2.9 * rows + 0.5), layout="constrained")
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, name in zip(panels, names, strict=False):
        _draw_metric(axes, runs, name)
        axes.set_title(_literal(name), fontsize=10)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.legend(handles=_handles(runs), loc="outside lower center", ncols=min(len(runs), 4), frameon=False)
    return figure


def save_figure(figure: Figure, target: Path | io.BytesIO, kind: str) -> None:
    """Writes a figure; the same runs give the same bytes."""
    with rc_context({"svg.hashsalt": "smd_jax"}), warnings.catch_warnings():
        # Characters of a folder's name that the font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(target, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


def _draw_metric(axes: Axes, runs: Sequence[Run], name: str) -> None:
    """Draws one metric of all runs that have it, over the steps of the longest run."""
    positive = False
    for index, run in enumerate(runs):
        points = points_of(run, name)
        if not points:
            continue
        steps, values = np.array(points).T
        positive |= bool((values > 0).any())
        colour, marker = COLOURS[index % len(COLOURS)], "o" if len(steps) <= MARKED else ""
        axes.plot(steps, values, _line_style(index), color=colour, linewidth=1.5, marker=marker, markersize=3.5)
        # The 95 % interval that an evaluation has logged.
        if interval := points_of(run, f"{name}_low", f"{name}_high"):
            at, low, high = np.array(interval).T
            axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    if name in LOGARITHMIC and positive:
        axes.set_yscale("log", nonpositive="clip")
    end = max(1, *(row["step"] for run in runs for row in run.history))
    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.set_xlabel("rollouts learned from", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line_style(index: int) -> Literal["-", "--"]:
    """Dashed once all colours are used."""
    return "--" if index >= len(COLOURS) else "-"


def _literal(text: str) -> str:
    """Text without control characters, whose dollar signs begin no formula."""
    return visible(text).replace("$", r"\$")


def _handles(runs: Sequence[Run]) -> list[Line2D]:
    found = []
    for index, run in enumerate(runs):
        label = _literal(run.name)
        # Matplotlib leaves names that begin with an underscore out of the legend.
        label = f" {label}" if label.startswith("_") else label
        found.append(Line2D([], [], color=COLOURS[index % len(COLOURS)], linestyle=_line_style(index), label=label))
    return found
