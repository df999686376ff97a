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

from smd_jax.monitor.curves import Arm, Series, last_step, load_arms, main_metrics, metric_names, series_of
from smd_jax.text.visible_text import visible

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("pictures of runs need matplotlib: pip install -e '.[train]'") from error

# Okabe and Ito's palette, which is safe for common colour blindness; page.css has the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLUMNS = 4  # of panels
LOGARITHMIC = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "mismatch_kl")
MARKED = 30  # curves with at most this many points also show them as dots


def plot_runs(paths: Sequence[str | Path], out: str | Path) -> None:
    """Draws the main metrics of all runs at or below the paths, from their start; seeds of one arm as a mean with its
    95 % t interval.

    Args:
      paths: as `smd_jax.monitor.page.write_page`.
      out: the image file; its ending chooses the format.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a file of a run that cannot be read, or none of the main metrics in any of them.
    """
    out = Path(out)
    figure = runs_figure(load_arms(paths))
    out.parent.mkdir(parents=True, exist_ok=True)
    _save(figure, out, out.suffix.removeprefix("."))


def runs_figure(arms: Sequence[Arm]) -> Figure:
    """One panel for each main metric, and a legend."""
    names = main_metrics(metric_names(arms))
    if not names:
        raise ValueError(f"expected runs with rewards or another of the main metrics; got {metric_names(arms)}")
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.0 * columns, 2.9 * rows + 0.5), layout="constrained")
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, name in zip(panels, names, strict=False):
        draw_metric(axes, arms, name)
        axes.set_title(_literal(name), fontsize=10)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.legend(handles=_handles(arms), loc="outside lower center", ncols=min(len(arms), 4), frameon=False)
    return figure


def metric_svg(arms: Sequence[Arm], name: str) -> bytes:
    """The picture of one metric as an SVG file, without a title."""
    figure = Figure(figsize=(4.4, 2.4), layout="constrained")
    draw_metric(figure.subplots(), arms, name)
    file = io.BytesIO()
    _save(figure, file, "svg")
    return file.getvalue()


def draw_metric(axes: Axes, arms: Sequence[Arm], name: str) -> None:
    """Draws one metric of all arms that have it, over the steps of the longest run."""
    series = series_of(arms, name)
    for one in series:
        _draw_series(axes, one)
    positive = any((one.mean.mean > 0).any() for one in series)
    if name in LOGARITHMIC and positive:
        axes.set_yscale("log", nonpositive="clip")
    end = max(last_step(arms), 1)
    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.set_xlabel("rollouts learned from", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, target: Path | io.BytesIO, kind: str) -> None:
    # A fixed salt and no date, so that the same runs give the same file.
    with rc_context({"svg.hashsalt": "smd_jax"}), warnings.catch_warnings():
        # Characters of a folder's name that the font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(target, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


def _draw_series(axes: Axes, series: Series) -> None:
    """The seeds as thin lines, their mean as a thick one, its interval as a band."""
    colour = COLOURS[series.index % len(COLOURS)]
    for seed in series.seeds:
        axes.plot(seed.steps, seed.mean, color=colour, linewidth=0.6, alpha=0.35)
    curve = series.mean
    marker = "o" if len(curve.steps) <= MARKED else ""
    style = _line_style(series.index)
    axes.plot(curve.steps, curve.mean, style, color=colour, linewidth=1.7, marker=marker, markersize=3.5)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _line_style(index: int) -> Literal["-", "--"]:
    """Dashed once all colours are used."""
    return "--" if index >= len(COLOURS) else "-"


def _literal(text: str) -> str:
    """Text without control characters, whose dollar signs begin no formula."""
    return visible(text).replace("$", r"\$")


def _handles(arms: Sequence[Arm]) -> list[Line2D]:
    found = []
    for index, arm in enumerate(arms):
        seeds = f" ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
        label = _literal(f"{arm.name}{seeds}")
        # Matplotlib leaves names that begin with an underscore out of the legend.
        label = f" {label}" if label.startswith("_") else label
        found.append(Line2D([], [], color=COLOURS[index % len(COLOURS)], linestyle=_line_style(index), label=label))
    return found
