"""Curves of runs on disk: the mean over the seeds of an arm, with its interval.

A step counts the rollouts that the policy has learned from. The metrics of rollout s, numbered from 0, are at step s,
as is an evaluation after s rollouts. The evaluation before training is at step 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit  # the t distribution's quantiles, without the second that scipy.stats takes

from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS, METRICS_FILE, evaluated, read_metrics

POINTS = 100  # most points of a curve; longer ones are means over equal parts
LAST_PART = 0.1  # share of a run that tables average as its end

# Main metrics after the reward, the reward functions and the evaluations.
MAIN = (
    *("sampling/sampling_logp_difference/mean", "completions/mean_length", "completions/clipped_ratio", "entropy"),
    *("frac_reward_zero_std", "kl", "grad_norm", "rollout/tokens_per_second"),
)

# `seed-3` in the arm's folder, or `shadow-seed-3`.
_SEED = re.compile(r"^(?:(?P<arm>.+)[-_.])?seed[-_]?(?P<seed>\d+)$")

Values = Float[np.ndarray, " points"]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
      path: its folder.
      history: the rows of `read_history`.
      rollouts: number of finished rollouts.
    """

    path: Path
    history: Sequence[Mapping[str, Any]]
    rollouts: int


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed."""

    name: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Curve:
    """A metric over the steps.

    Attributes:
      steps: middle of every part, ascending.
      mean: over seeds.
      low, high: 95 % t interval of the mean over seeds; None for one seed.
    """

    steps: Values
    mean: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Series:
    """The curves of one arm for one metric.

    Attributes:
      index: of the arm, for its colour.
      seeds: one curve per seed; empty for a single seed.
      mean: over the seeds, with its interval.
    """

    index: int
    seeds: Sequence[Curve]
    mean: Curve


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The folders of all runs at or below these paths, each once, in a stable order.

    Raises:
      FileNotFoundError: a path without any run.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        here = [path] if (path / METRICS_FILE).is_file() else sorted(p.parent for p in path.rglob(METRICS_FILE))
        if not here:
            raise FileNotFoundError(f"expected a run, or a folder with runs, each with a {METRICS_FILE}; got {path}")
        found |= {run.resolve(): run for run in here}
    return list(found.values())


def load_arms(paths: Sequence[str | Path]) -> list[Arm]:
    """The runs at or below these paths, grouped by arm; runs without rows are left out.

    A folder `seed-3` belongs to the arm of its parent folder, a folder `shadow-seed-3` to the arm `shadow`.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a metrics file that cannot be read, or no rows at all.
    """
    grouped: dict[Path, list[Run]] = {}
    for path in find_runs(paths):
        history = read_history(path)
        if history:
            run = Run(path, history, len(read_metrics(path / METRICS_FILE)))
            grouped.setdefault(_arm_of(path.resolve()), []).append(run)
    if not grouped:
        raise ValueError(f"expected runs with at least one row of metrics; got none in {', '.join(map(str, paths))}")
    names = _short_names(list(grouped))
    return [Arm(name, runs) for name, runs in zip(names, grouped.values(), strict=True)]


def read_history(directory: str | Path) -> list[dict[str, Any]]:
    """All metrics of a run by step, of its rollouts and its evaluations.

    In metrics.jsonl the row of rollout s includes the evaluation after it, which belongs to step s + 1 here.

    Raises:
      FileNotFoundError: no metrics.jsonl.
      ValueError: a file that cannot be read.
    """
    directory = Path(directory)
    file = directory / EVALUATIONS_FILE
    evaluations = read_metrics(file) if file.is_file() else []
    of_evaluations = {name for row in evaluations for name in row}
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(directory / METRICS_FILE):
        for name, value in row.items():
            is_evaluation = name.startswith("eval/") or name in of_evaluations
            if name != "step":
                rows.setdefault(row["step"] + is_evaluation, {})[name] = value
    for row in evaluations:
        rows.setdefault(row["step"], {}).update(row)
    return [row | {"step": step} for step, row in sorted(rows.items())]


def metric_names(arms: Sequence[Arm]) -> list[str]:
    """Every metric with a finite value: those of `METRICS` in its order, then the others by name."""
    rows = (row for arm in arms for run in arm.runs for row in run.history)
    found = {name for row in rows for name, value in row.items() if name != "step" and math.isfinite(value)}
    return [name for name in METRICS if name in found] + sorted(found - METRICS.keys())


def main_metrics(names: Sequence[str]) -> list[str]:
    """The main metrics among these, in the order of drawing."""
    of_functions = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    if len(of_functions) == 1:
        of_functions = []  # a single function is the reward
    evaluations = [name for name in names if evaluated(name)]
    rest = [name for name in MAIN if name in names]
    return [name for name in names if name == "reward"] + of_functions + evaluations + rest


def series_of(arms: Sequence[Arm], name: str) -> list[Series]:
    """The curves of one metric, of the arms that have it."""
    part = part_length(arms, name)
    found = []
    for index, arm in enumerate(arms):
        seeds = seed_curves(arm, name, part)
        if not seeds:
            continue
        mean = mean_curve(seeds)
        if len(seeds) == 1:
            found.append(Series(index, [], _with_interval(arm, name, mean, part)))
        else:
            # Seeds without a common step have no mean; the first seed stands for it.
            found.append(Series(index, seeds, mean if len(mean.steps) else seeds[0]))
    return found


def seed_curves(arm: Arm, name: str, part: int = 1) -> list[Curve]:
    """One curve per seed that has the metric, of means over `part` steps."""
    return [Curve(*_means_of_parts(*run, part)) for run in _points(arm, name)]


def values_of(arm: Arm, name: str) -> list[Values]:
    """All finite values of a metric, of each run that has any."""
    return [values for _, values in _points(arm, name)]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of seeds at their common steps; for several seeds with its interval."""
    shared = sorted(set.intersection(*(set(curve.steps.tolist()) for curve in curves)))
    values = np.array([curve.mean[np.isin(curve.steps, shared)] for curve in curves])
    mean = values.mean(axis=0)
    if len(curves) == 1 or not shared:
        return Curve(np.array(shared), mean)
    half = half_interval(values)
    return Curve(np.array(shared), mean, mean - half, mean + half)


def half_interval(values: Float[np.ndarray, "seeds points"]) -> Values:
    """Half of the 95 % t interval of the mean over seeds: t(0.975, n - 1) · s / √n."""
    seeds = len(values)
    return stdtrit(seeds - 1, 0.975) * values.std(axis=0, ddof=1) / math.sqrt(seeds)


def part_length(arms: Sequence[Arm], name: str) -> int:
    """Steps of a part, so that a curve of this metric has about `POINTS` points at most; 1 draws every point."""
    counts = [len(values) for arm in arms for values in values_of(arm, name)]
    return 1 if max(counts, default=0) <= POINTS else math.ceil((last_step(arms) + 1) / POINTS)


def last_step(arms: Sequence[Arm]) -> int:
    return max(row["step"] for arm in arms for run in arm.runs for row in run.history)


def at_the_start(arm: Arm, name: str) -> float | None:
    """Mean over seeds of the first value of a metric; None without any."""
    found = values_of(arm, name)
    return float(np.mean([values[0] for values in found])) if found else None


def at_the_end(arm: Arm, name: str) -> tuple[float, float | None] | None:
    """Mean over seeds of a metric over the last tenth of each run's rows, and half of its interval.

    None without any value; the half interval is None for one seed.
    """
    ends = [values[-max(1, round(LAST_PART * len(values))) :].mean() for values in values_of(arm, name)]
    if not ends:
        return None
    half = None if len(ends) == 1 else float(half_interval(np.array(ends)[:, None])[0])
    return float(np.mean(ends)), half


def _points(arm: Arm, name: str) -> list[tuple[Values, Values]]:
    """Steps and finite values of a metric, of each run that has any."""
    found = []
    for run in arm.runs:
        points = [(row["step"], row[name]) for row in run.history if name in row and math.isfinite(row[name])]
        if points:
            steps, values = np.array(points, dtype=float).T
            found.append((steps, values))
    return found


def _with_interval(arm: Arm, name: str, curve: Curve, part: int) -> Curve:
    """A curve of a single run with the interval that its evaluations have logged."""
    low, high = (seed_curves(arm, f"{name}_{end}", part) for end in ("low", "high"))
    if len(low) != 1 or len(high) != 1 or not len(low[0].steps) == len(high[0].steps) == len(curve.steps):
        return curve
    return replace(curve, low=low[0].mean, high=high[0].mean)


def _means_of_parts(
    steps: Float[np.ndarray, " rows"], values: Float[np.ndarray, " rows"], part: int
) -> tuple[Values, Values]:
    numbers, places = np.unique(steps // part, return_inverse=True)
    counts = np.bincount(places)
    means = np.bincount(places, weights=values) / counts
    # The middle of the part, whichever rows it has, so that the parts of all seeds are at the same steps.
    return numbers * part + (part - 1) / 2, means


def _arm_of(run: Path) -> Path:
    """The common path of all seeds of an arm."""
    match = _SEED.match(run.name)
    if match is None:
        return run
    return run.parent / match["arm"] if match["arm"] else run.parent


def _short_names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
