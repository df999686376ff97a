"""Runs on disk as curves that can be compared: the seeds of one arm together, with an interval of their mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit  # the t distribution's quantiles, without the second that scipy.stats takes

from smd_jax.monitor.metrics_log import METRICS, read_metrics

METRICS_FILE = "metrics.jsonl"
POINTS = 100  # of a curve; longer runs are drawn by means over equal parts
LAST_PART = 0.1  # of a run: what tables call its end

# `seed-3` below the arm's folder, or `shadow-seed-3` beside the others.
_SEED = re.compile(r"^(?:(?P<arm>.+)[-_.])?seed[-_]?(?P<seed>\d+)$")

Values = Float[np.ndarray, " points"]


@dataclass(frozen=True)
class Run:
    """One run: its folder and the rows of its metrics.jsonl."""

    path: Path
    history: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone."""

    name: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Curve:
    """A metric over the steps.

    Attributes:
      steps: the middle of every part, ascending.
      mean: over seeds.
      low, high: 95 % t interval of the mean over seeds; None for one seed.
    """

    steps: Values
    mean: Values
    low: Values | None = None
    high: Values | None = None


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
    """The runs at or below these paths, seeds put together: a folder `seed-3` belongs to the arm above it, a folder
    `shadow-seed-3` to the arm `shadow`. Runs that have no rows yet are left out.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a metrics file that cannot be read, or no rows at all.
    """
    grouped: dict[Path, list[Run]] = {}
    for path in find_runs(paths):
        history = read_metrics(path / METRICS_FILE)
        if history:
            grouped.setdefault(_arm_of(path.resolve()), []).append(Run(path, history))
    if not grouped:
        raise ValueError(f"expected runs with at least one row of metrics; got none in {', '.join(map(str, paths))}")
    names = _short_names(list(grouped))
    return [Arm(name, runs) for name, runs in zip(names, grouped.values(), strict=True)]


def metric_names(arms: Sequence[Arm]) -> list[str]:
    """Every metric that is a finite number somewhere: those of `METRICS` in its order, then the others by name."""
    rows = (row for arm in arms for run in arm.runs for row in run.history)
    found = {name for row in rows for name, value in row.items() if name != "step" and math.isfinite(value)}
    return [name for name in METRICS if name in found] + sorted(found - METRICS.keys())


def seed_curves(arm: Arm, name: str, part: int = 1) -> list[Curve]:
    """One curve a seed that has the metric, of means over parts of so many steps."""
    curves = []
    for run in arm.runs:
        points = [(row["step"], row[name]) for row in run.history if name in row and math.isfinite(row[name])]
        if points:
            steps, values = np.array(points, dtype=float).T
            curves.append(Curve(*_means_of_parts(steps, values, part)))
    return curves


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several seeds at the steps that all of them have, and where there are several its interval."""
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


def part_length(arms: Sequence[Arm]) -> int:
    """Steps of a part, such that the longest run has at most `POINTS` of them."""
    return math.ceil((last_step(arms) + 1) / POINTS)


def last_step(arms: Sequence[Arm]) -> int:
    return max(row["step"] for arm in arms for run in arm.runs for row in run.history)


def at_the_end(arm: Arm, name: str) -> tuple[float, float | None] | None:
    """Mean of a metric over the last tenth of each run's rows that have it, over seeds, and half of its interval; None
    where no run has it, or there is one seed."""
    ends = []
    for run in arm.runs:
        values = [row[name] for row in run.history if name in row and math.isfinite(row[name])]
        if values:
            ends.append(np.mean(values[-max(1, round(LAST_PART * len(values))) :]))
    if not ends:
        return None
    half = None if len(ends) == 1 else float(half_interval(np.array(ends)[:, None])[0])
    return float(np.mean(ends)), half


def _means_of_parts(
    steps: Float[np.ndarray, " rows"], values: Float[np.ndarray, " rows"], part: int
) -> tuple[Values, Values]:
    numbers, places = np.unique(steps // part, return_inverse=True)
    counts = np.bincount(places)
    means = np.bincount(places, weights=values) / counts
    # In the middle of the part, wherever the rows lie in it: then the parts of all seeds have one place.
    return numbers * part + (part - 1) / 2, means


def _arm_of(run: Path) -> Path:
    """The path that all seeds of an arm have in common."""
    match = _SEED.match(run.name)
    if match is None:
        return run
    return run.parent / match["arm"] if match["arm"] else run.parent


def _short_names(paths: list[Path]) -> list[str]:
    """The ends of the paths, as long as it takes to tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
