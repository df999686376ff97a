"""Reads the rows of runs on disk and draws their curves: training.png, and the PNG, SVG and HTML files of smd-plot.

A step counts the rollouts that the policy has learned from. The metrics of rollout s, numbered from 0, are at step s,
as is an evaluation after s rollouts. The evaluation before training is at step 0.

Needs `matplotlib`: `pip install 'smd_jax[train]'`. Figures use the object interface, which opens no window and changes
no global state.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, evaluated, read_metrics
from smd_jax.text.visible_text import visible

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("pictures of runs need matplotlib: pip install 'smd_jax[train]'") from error

# Main metrics after the reward, the reward functions and the evaluations.
MAIN = (
    *("sampling/sampling_logp_difference/mean", "completions/mean_length", "completions/clipped_ratio", "entropy"),
    *("frac_reward_zero_std", "kl", "grad_norm", "rollout/tokens_per_second"),
)
# Okabe and Ito's palette, which is safe for common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLUMNS = 4  # of panels
LOGARITHMIC = ("sampling/sampling_logp_difference/mean",)
MARKED = 30  # curves with at most this many points also show them as dots


@dataclass(frozen=True)
class Run:
    """One run: its path below the folder that all runs share, its folder, and the rows of `read_history`."""

    name: str
    path: Path
    history: Sequence[Mapping[str, Any]]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at these paths, or below those that are none, each once, in a stable order. Runs without rows are left
    out.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a metrics file that cannot be read, or no rows at all.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        here = run_folders(path)
        if not here:
            raise FileNotFoundError(f"expected a run, or a folder with runs, each with a {METRICS_FILE}; got {path}")
        for run in here:
            found.setdefault(run.resolve(), run)
    histories = {path: history for path, run in found.items() if (history := read_history(run))}
    if not histories:
        raise ValueError(f"expected runs with at least one row of metrics; got none in {', '.join(map(str, paths))}")
    shared = os.path.commonpath([path.parent for path in histories])
    return [Run(path.relative_to(shared).as_posix(), found[path], history) for path, history in histories.items()]


def run_folders(path: Path) -> list[Path]:
    """The folders of runs at this path, or below it if it is none, in order. Follows links, into each folder once."""
    if (path / METRICS_FILE).is_file():
        return [path]
    found, seen = list[Path](), set[str]()
    for folder, names, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            names.clear()
            continue
        seen.add(real)
        # A run keeps the name of its own folder, if a link is there, too.
        names.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        if METRICS_FILE in files:
            found.append(Path(folder))
    return sorted(found)


def read_history(directory: Path) -> list[dict[str, Any]]:
    """All metrics of a run by step, of its rollouts and its evaluations. Values of other tools that are no numbers are
    left out."""
    evaluations = directory / EVALUATIONS_FILE
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(directory / METRICS_FILE) + (read_metrics(evaluations) if evaluations.is_file() else []):
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        rows.setdefault(row["step"], {}).update(numbers)
    return [row for _, row in sorted(rows.items())]


def main_metrics(runs: Sequence[Run]) -> list[str]:
    """The main metrics with a finite value in any of the runs, in the order of drawing."""
    rows = (row for run in runs for row in run.history)
    found = {name for row in rows for name, value in row.items() if math.isfinite(value)}
    of_functions = sorted(name for name in found if name.startswith("rewards/") and name.endswith("/mean"))
    if len(of_functions) == 1:
        of_functions = []  # a single function is the reward
    evaluations = sorted(name for name in found if evaluated(name))
    return [name for name in ("reward", *of_functions, *evaluations, *MAIN) if name in found]


def points_of(run: Run, *names: str) -> list[tuple[float | int, ...]]:
    """The step and the values of these metrics, in every row where all are finite."""
    rows = [row for row in run.history if all(math.isfinite(row.get(name, math.nan)) for name in names)]
    return [(row["step"], *(row[name] for name in names)) for row in rows]


def plot_runs(paths: Sequence[str | Path], out: str | Path) -> None:
    """Draws the main metrics of the runs that `load_runs` finds, one line per run.

    Args:
      out: the image file; its ending chooses the format.

    Raises:
      FileNotFoundError, ValueError: as `load_runs` and `runs_figure`.
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
    evaluations = [axes for axes, name in zip(panels, names, strict=False) if evaluated(name)]
    for axes in evaluations[1:]:
        axes.sharey(evaluations[0])  # rewards of several ways to decode
    for axes, name in zip(panels, names, strict=False):
        _draw_metric(axes, runs, name)
        axes.set_title(_literal(name), fontsize=10)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    handles = []
    for index, run in enumerate(runs):
        label = _literal(run.name)
        # Matplotlib leaves names that begin with an underscore out of the legend.
        label = f" {label}" if label.startswith("_") else label
        handles.append(Line2D([], [], **_style(index), label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(runs), 4), frameon=False)
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
        marker = "o" if len(steps) <= MARKED else ""
        axes.plot(steps, values, **_style(index), linewidth=1.5, marker=marker, markersize=3.5)
        # The 95 % interval that an evaluation has logged.
        if interval := points_of(run, f"{name}_low", f"{name}_high"):
            at, low, high = np.array(interval).T
            axes.fill_between(at, low, high, color=_style(index)["color"], alpha=0.18, linewidth=0)
    if name in LOGARITHMIC and positive:
        axes.set_yscale("log", nonpositive="clip")
    end = max(1, *(row["step"] for run in runs for row in run.history))
    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.set_xlabel("rollouts learned from", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.tick_params(labelsize=8, which="both")  # a short logarithmic axis labels its minor ticks
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _style(index: int) -> dict[str, Any]:
    """Colour and line of a run; dashed once all colours are used."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": "--" if index >= len(COLOURS) else "-"}


def _literal(text: str) -> str:
    """Text without control characters, whose dollar signs begin no formula."""
    return visible(text).replace("$", r"\$")
