"""Pictures for papers and notebooks: the curves of many runs with intervals, and the lives of one completion's keys.

Needs `matplotlib`: `pip install -e '.[train]'`. The library itself never imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smd_jax.monitor.curves import Arm, load_arms, metric_names
from smd_jax.monitor.page import LOGARITHMIC, main_metrics, series_of
from smd_jax.monitor.plots import COLOURS
from smd_jax.monitor.saved_masks import SavedMask
from smd_jax.monitor.svg_chart import Series

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, ScalarFormatter
except ImportError as error:
    raise ImportError("pictures of runs need matplotlib: pip install -e '.[train]'") from error

COLUMNS = 4  # of panels
# The page's own colours: short lives to long ones, and keys that stayed.
_LIFE = LinearSegmentedColormap.from_list("life", ["#f6d9a8", "#f0a868", "#dd6f5a", "#b04a76", "#6f3a86"])
_KEPT = "#16215b"


def plot_runs(paths: Sequence[str | Path], out: str | Path) -> None:
    """Draws the main metrics of all runs at or below the paths; seeds of one arm as their mean with a 95 % t interval.

    Args:
      paths: as `smd_jax.monitor.page.write_page`.
      out: the image file; its ending chooses the format.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a file of a run that cannot be read, or none of the main metrics in any of them.
    """
    arms = load_arms(paths)
    names = main_metrics(metric_names(arms))
    if not names:
        raise ValueError(f"expected runs with rewards or another of the main metrics; got {metric_names(arms)}")
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.0 * columns, 2.9 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, name in zip(panels, names, strict=False):
        _draw_metric(axes, name, series_of(arms, name))
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.legend(handles=_handles(arms), loc="outside lower center", ncols=min(len(arms), 4), frameon=False)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def plot_lifetimes(mask: SavedMask, target: str | Path | Axes) -> None:
    """Draws how long every key of a completion lived: a row for each layer and head, a column for each token.

    Args:
      mask: of `load_masks` or `extract_mask`.
      target: an image file, or the axes to draw into.
    """
    if isinstance(target, Axes):
        _draw_lifetimes(target, mask)
        return
    layers, heads, _ = mask.evicted_at.shape
    figure = Figure(figsize=(11, min(2.2 + 0.06 * layers * heads, 12)), layout="constrained")
    FigureCanvasAgg(figure)
    _draw_lifetimes(figure.subplots(), mask)
    figure.savefig(target, dpi=150)


def _draw_metric(axes: Axes, name: str, series: Sequence[Series]) -> None:
    for one in series:
        colour = COLOURS[one.index % len(COLOURS)]
        style = "--" if one.index >= len(COLOURS) else "-"
        for seed in one.seeds:
            axes.plot(seed.steps, seed.mean, color=colour, linewidth=0.6, alpha=0.35)
        curve = one.mean
        marker = "o" if len(curve.steps) == 1 else ""
        axes.plot(curve.steps, curve.mean, style, color=colour, linewidth=1.7, marker=marker)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    positive = any((one.mean.mean > 0).any() for one in series)
    if name in LOGARITHMIC and positive:
        axes.set_yscale("log", nonpositive="clip")
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("rollout", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _handles(arms: Sequence[Arm]) -> list[Line2D]:
    found = []
    for index, arm in enumerate(arms):
        seeds = f" ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
        style = "--" if index >= len(COLOURS) else "-"
        label = f"{arm.name}{seeds}"
        # A name that begins with an underscore would be left out of the legend.
        label = f" {label}" if label.startswith("_") else label
        found.append(Line2D([], [], color=COLOURS[index % len(COLOURS)], linestyle=style, label=label))
    return found


def _draw_lifetimes(axes: Axes, mask: SavedMask) -> None:
    layers, heads, tokens = mask.evicted_at.shape
    lives = np.maximum(mask.lifetimes().reshape(layers * heads, tokens).astype(float), 1)
    kept = (mask.evicted_at == tokens).reshape(layers * heads, tokens)
    # Keys that stayed are holes through which the dark ground is seen.
    axes.set_facecolor(_KEPT)
    evicted = np.ma.masked_array(lives, kept)
    norm = None if kept.all() else LogNorm(evicted.min(), max(evicted.max(), evicted.min() + 1))
    extent = (-0.5, tokens - 0.5, layers * heads - 0.5, -0.5)
    picture = axes.imshow(evicted, cmap=_LIFE, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
    axes.axvline(mask.prompt_length - 0.5, color="0.2", linewidth=1.0, linestyle="--")
    for layer in range(1, layers):
        axes.axhline(layer * heads - 0.5, color="white", linewidth=0.6)
    shown = range(0, layers, math.ceil(layers / 15))
    axes.set_yticks([layer * heads + (heads - 1) / 2 for layer in shown], [f"layer {layer}" for layer in shown])
    axes.set_xlabel("token; the completion begins at the dashed line")
    axes.set_title(
        f"Life of every key, {heads} heads a layer: rollout {mask.step}, reward {mask.reward:.3g}", fontsize=11
    )
    bar = axes.figure.colorbar(picture, ax=axes, label="evicted after so many queries", pad=0.01)
    bar.ax.yaxis.set_minor_formatter(ScalarFormatter())
    bar.ax.yaxis.set_major_formatter(ScalarFormatter())
    bar.ax.tick_params(which="both", labelsize=7)
    still_there = Patch(color=_KEPT, label="still there at the end")
    axes.legend(handles=[still_there], loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
