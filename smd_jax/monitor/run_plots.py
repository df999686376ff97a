"""The one drawing of runs, with matplotlib: training.png, and the curves that smd-plot writes as PNG, SVG or HTML.

Also the lives of one completion's keys. Needs `matplotlib`: `pip install -e '.[train]'`. Figures use the object
interface, which opens no window and changes no global state.
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
from smd_jax.monitor.saved_masks import SavedMask
from smd_jax.text.visible_text import visible

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, ScalarFormatter
except ImportError as error:
    raise ImportError("pictures of runs need matplotlib: pip install -e '.[train]'") from error

# Okabe and Ito's palette, which people with any common colour blindness can tell apart. page.css has the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLUMNS = 4  # of panels
LOGARITHMIC = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "mismatch_kl")
MARKED = 30  # most points of a curve that are drawn as dots, too
# The mask viewer's own colours: short lives to long ones, and keys that stayed.
_LIFE = LinearSegmentedColormap.from_list("life", ["#f6d9a8", "#f0a868", "#dd6f5a", "#b04a76", "#6f3a86"])
_KEPT = "#16215b"


def plot_runs(paths: Sequence[str | Path], out: str | Path) -> None:
    """Draws the main metrics of all runs at or below the paths, from their start on; seeds of one arm as their mean
    with a 95 % t interval.

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
    _draw_lifetimes(figure.subplots(), mask)
    _save(figure, Path(target), Path(target).suffix.removeprefix("."))


def _save(figure: Figure, target: Path | io.BytesIO, kind: str) -> None:
    # A fixed salt and no date: the same runs make the same file.
    with rc_context({"svg.hashsalt": "smd_jax"}), warnings.catch_warnings():
        # A folder's name may have characters that the font lacks: a box takes their place.
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
    """Dashed where the colours begin again."""
    return "--" if index >= len(COLOURS) else "-"


def _literal(text: str) -> str:
    """Text of a run: without control characters, and with dollar signs that begin no formula."""
    return visible(text).replace("$", r"\$")


def _handles(arms: Sequence[Arm]) -> list[Line2D]:
    found = []
    for index, arm in enumerate(arms):
        seeds = f" ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
        label = _literal(f"{arm.name}{seeds}")
        # A name that begins with an underscore would be left out of the legend.
        label = f" {label}" if label.startswith("_") else label
        found.append(Line2D([], [], color=COLOURS[index % len(COLOURS)], linestyle=_line_style(index), label=label))
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
