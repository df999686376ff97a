"""Pictures of a run: its training curves, and what one head could see.

Drawn with matplotlib's object interface on the Agg canvas: no window, no global state. Needs `matplotlib`:
`pip install -e '.[train]'`. The library itself never imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Bool

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("smd_jax.monitor.plots needs matplotlib; install it with: pip install -e '.[train]'") from error

History = Sequence[Mapping[str, Any]]
Curve = tuple[np.ndarray, np.ndarray]

# Okabe and Ito's palette: told apart with every common kind of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

REWARD = "reward"
EVAL_SPARSE, EVAL_DENSE = "eval/sparse", "eval/dense"
MISMATCH_MEAN = "sampling/sampling_logp_difference/mean"
MISMATCH_MAX = "sampling/sampling_logp_difference/max"
ENTROPY, LENGTH = "entropy", "completions/mean_length"

Arms = dict[str, list[History]]
Panel = Callable[[Axes, Arms], None]
LineStyle = dict[str, Any]

_SOLID: LineStyle = {"linewidth": 1.8}
_MAXIMUM: LineStyle = {"linewidth": 1.1, "linestyle": "--"}
_SPARSE: LineStyle = {"linewidth": 1.6, "marker": "o", "markersize": 5}
_DENSE: LineStyle = {"linewidth": 1.6, "marker": "s", "markersize": 5, "linestyle": ":", "markerfacecolor": "white"}
_SEED: LineStyle = {"linewidth": 0.7, "alpha": 0.35, "marker": ""}
_SMALL_NOTE: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "top", "fontsize": 8, "color": "0.4"}
_VISIBLE, _HIDDEN, _FUTURE = "#0072B2", "#F3D3BD", "#F7F7F7"


def plot_training(histories: Mapping[str, History | Sequence[History]], path: str | Path) -> None:
    """Draws reward, mismatch and entropy (or completion length) over the steps, one colour a label.

    Args:
      histories: label -> the rows of one run (`read_metrics`), or a list of such histories, one a seed. Seeds are drawn
        as thin lines with their mean over the steps that all of them have.
      path: the image file; its ending chooses the format.

    Raises:
      ValueError: no history, more labels than there are colours, or no `reward` and no mismatch in any row.
    """
    if not 1 <= len(histories) <= len(COLOURS):
        raise ValueError(f"expected 1 to {len(COLOURS)} labels; got {len(histories)}: {list(histories)}")
    arms = {label: _seeds(runs) for label, runs in histories.items()}
    panels = _panels_with_data(arms)
    figure = Figure(figsize=(4.6 * len(panels), 3.9), layout=ConstrainedLayoutEngine(wspace=0.06))
    FigureCanvasAgg(figure)
    # For one panel `subplots` gives the axes themselves and no array.
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        _style(axes)
        panel(axes, arms)
    _legend(figure, arms)
    figure.savefig(path, dpi=160)


def plot_shadow_mask(
    visible: Bool[np.ndarray, "queries keys"] | Bool[Array, "queries keys"],
    target: str | Path | Axes,
    prompt_length: int,
) -> None:
    """Draws which keys each query of one head could see.

    Args:
      visible: the mask. The last query stands at the last key's position, so a mask of the response rows alone works.
      target: an image file, or the axes to draw into.
      prompt_length: tokens of the prompt; lines mark where the response begins.

    Raises:
      ValueError: more queries than keys, or a prompt longer than the keys.
    """
    mask = np.asarray(visible)
    queries, keys = mask.shape
    if queries > keys:
        raise ValueError(f"expected at most as many queries as keys; got {queries} queries and {keys} keys")
    if not 0 <= prompt_length <= keys:
        raise ValueError(f"prompt_length must lie in 0 … {keys} keys; got {prompt_length}")
    if isinstance(target, Axes):
        _draw_mask(target, mask, prompt_length)
        return
    figure = Figure(figsize=(5.6, 5.1 * queries / keys + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    _draw_mask(figure.subplots(), mask, prompt_length)
    figure.savefig(target, dpi=160)


def curve(history: History, name: str) -> Curve:
    """Steps and values of one metric, from the rows that have it as a finite number."""
    points = [(row["step"], row[name]) for row in history if name in row and math.isfinite(row[name])]
    return np.array([step for step, _ in points]), np.array([value for _, value in points], dtype=float)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several curves at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in curves)))
    values = [[dict(zip(xs.tolist(), ys.tolist(), strict=True))[step] for step in steps] for xs, ys in curves]
    return np.array(steps), np.mean(values, axis=0)


def _seeds(runs: History | Sequence[History]) -> list[History]:
    """One history or several, always as a list of histories."""
    rows = [run for run in runs if isinstance(run, Mapping)]
    several = [run for run in runs if not isinstance(run, Mapping)]
    if bool(rows) == bool(several):
        raise ValueError(f"expected rows or histories for a label; got {len(rows)} rows and {len(several)} histories")
    return [rows] if rows else several


def _has(arms: Arms, *names: str) -> bool:
    return any(len(curve(run, name)[0]) for runs in arms.values() for run in runs for name in names)


def _panels_with_data(arms: Arms) -> list[Panel]:
    panels: list[Panel] = []
    if _has(arms, REWARD, EVAL_SPARSE, EVAL_DENSE):
        panels.append(_draw_reward)
    if _has(arms, MISMATCH_MEAN, MISMATCH_MAX):
        panels.append(_draw_mismatch)
    if not panels:
        raise ValueError(f"expected rows with {REWARD!r} or {MISMATCH_MEAN!r}; got none under {list(arms)}")
    if _has(arms, ENTROPY):
        panels.append(_draw_entropy)
    elif _has(arms, LENGTH):
        panels.append(_draw_length)
    return panels


def _draw_reward(axes: Axes, arms: Arms) -> None:
    axes.set_title("Reward")
    axes.set_ylabel("mean reward")
    for colour, runs in zip(COLOURS, arms.values(), strict=False):
        # Where there are evaluations, the training reward steps back behind them.
        faded = 0.45 if _has({"": runs}, EVAL_SPARSE, EVAL_DENSE) else 1.0
        _draw_curves(axes, runs, REWARD, _SOLID | {"color": colour, "alpha": faded})
        _draw_curves(axes, runs, EVAL_SPARSE, _SPARSE | {"color": colour, "markerfacecolor": colour})
        _draw_curves(axes, runs, EVAL_DENSE, _DENSE | {"color": colour})


def _draw_mismatch(axes: Axes, arms: Arms) -> None:
    axes.set_title("Mismatch of sampler and learner")
    axes.set_ylabel("|Δ log p| per token (nats)")
    floor = _floor(arms)
    for colour, runs in zip(COLOURS, arms.values(), strict=False):
        _draw_curves(axes, runs, MISMATCH_MEAN, _SOLID | {"color": colour}, floor)
        _draw_curves(axes, runs, MISMATCH_MAX, _MAXIMUM | {"color": colour}, floor)
    axes.set_yscale("log")
    if _lowest(arms) == 0.0:
        axes.axhline(floor, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate("exactly 0", (1, floor), (-3, -3), xycoords=("axes fraction", "data"), **_SMALL_NOTE)
        axes.set_ylim(bottom=floor / 4)


def _draw_entropy(axes: Axes, arms: Arms) -> None:
    axes.set_title("Entropy")
    axes.set_ylabel("mean entropy per token (nats)")
    _draw_simple(axes, arms, ENTROPY)


def _draw_length(axes: Axes, arms: Arms) -> None:
    axes.set_title("Completion length")
    axes.set_ylabel("mean length (tokens)")
    _draw_simple(axes, arms, LENGTH)


def _draw_simple(axes: Axes, arms: Arms, name: str) -> None:
    for colour, runs in zip(COLOURS, arms.values(), strict=False):
        _draw_curves(axes, runs, name, _SOLID | {"color": colour})


def _draw_curves(axes: Axes, runs: list[History], name: str, style: LineStyle, floor: float = -math.inf) -> None:
    """Every seed and, above several, their mean. Values below `floor` are drawn at it."""
    curves = [found for found in (curve(run, name) for run in runs) if len(found[0])]
    if not curves:
        return
    # A logarithmic axis has no 0: an exact agreement is drawn at the floor.
    curves = [(steps, np.maximum(values, floor)) for steps, values in curves]
    if len(curves) > 1:
        for steps, values in curves:
            axes.plot(steps, values, **(style | _SEED))
    axes.plot(*mean_curve(curves), **style)


def _values(arms: Arms) -> np.ndarray:
    names = (MISMATCH_MEAN, MISMATCH_MAX)
    return np.concatenate([curve(run, name)[1] for runs in arms.values() for run in runs for name in names])


def _lowest(arms: Arms) -> float:
    return float(_values(arms).min())


def _floor(arms: Arms) -> float:
    """Where a zero is drawn on the logarithmic axis: a decade below the smallest positive value."""
    values = _values(arms)
    positive = values[values > 0]
    return 10.0 ** (math.floor(math.log10(positive.min())) - 1) if len(positive) else 1e-9


def _style(axes: Axes) -> None:
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, arms: Arms) -> None:
    """One legend for all panels, below them: colours are labels, line styles are kinds of curve."""
    handles = [Line2D([], [], color=c, linewidth=2, label=label) for c, label in zip(COLOURS, arms, strict=False)]
    grey: LineStyle = {"color": "0.35"}
    if _has(arms, EVAL_SPARSE):
        handles.append(Line2D([], [], label="evaluation, sparse decoding", **(_SPARSE | grey)))
    if _has(arms, EVAL_DENSE):
        handles.append(Line2D([], [], label="evaluation, dense decoding", **(_DENSE | grey)))
    if _has(arms, MISMATCH_MAX):
        handles.append(Line2D([], [], label="maximum over tokens", **(_MAXIMUM | grey)))
    if any(len(runs) > 1 for runs in arms.values()):
        handles.append(Line2D([], [], label="single seed", **(_SOLID | grey | _SEED)))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9)


def _draw_mask(axes: Axes, mask: np.ndarray, prompt_length: int) -> None:
    queries, keys = mask.shape
    # The rows may be those of the last queries alone: row i stands at position first + i.
    first = keys - queries
    causal = np.arange(keys)[None, :] <= np.arange(first, keys)[:, None]
    kinds = np.where(mask, 2, np.where(causal, 1, 0))
    # A cell is centred at its position, so its edges are half a position away; queries run downwards.
    edges = (-0.5, keys - 0.5, keys - 0.5, first - 0.5)
    colours = ListedColormap([_FUTURE, _HIDDEN, _VISIBLE])
    axes.imshow(kinds, cmap=colours, vmin=0, vmax=2, extent=edges, interpolation="nearest", aspect="equal")
    for draw in (axes.axvline, axes.axhline):
        draw(prompt_length - 0.5, color="0.15", linewidth=1.0, linestyle="--")
    axes.set_xlim(-0.5, keys - 0.5)
    axes.set_ylim(keys - 0.5, first - 0.5)
    axes.set_xlabel("key position (tokens)")
    axes.set_ylabel("query position (tokens)")
    axes.set_title(f"A query sees at most {int(mask.sum(axis=1).max())} of {keys} keys", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    # Padding in units of the font: the distance to the axis label does not depend on the shape of the mask.
    axes.legend(
        handles=_mask_legend(), loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.0, ncols=2, frameon=False
    )


def _mask_legend() -> list[Patch | Line2D]:
    return [
        Patch(color=_VISIBLE, label="visible"),
        Patch(color=_HIDDEN, label="evicted or padding"),
        Patch(facecolor=_FUTURE, edgecolor="0.8", label="in the future"),
        Line2D([], [], color="0.15", linewidth=1.0, linestyle="--", label="response begins"),
    ]
