"""Curves of runs on disk, one line per run.

A step counts the rollouts that the policy has learned from. The metrics of rollout s, numbered from 0, are at step s,
as is an evaluation after s rollouts. The evaluation before training is at step 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, evaluated, read_metrics

POINTS = 100  # most points of a curve; longer ones are means over equal parts

# Main metrics after the reward, the reward functions and the evaluations.
MAIN = (
    *("sampling/sampling_logp_difference/mean", "completions/mean_length", "completions/clipped_ratio", "entropy"),
    *("frac_reward_zero_std", "kl", "grad_norm", "rollout/tokens_per_second"),
)

Values = Float[np.ndarray, " points"]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
      name: the shortest end of its path that no other run has.
      path: its folder.
      history: the rows of `read_history`.
    """

    name: str
    path: Path
    history: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Curve:
    """A metric over the steps.

    Attributes:
      steps: middle of every part, ascending.
      values: means over the parts.
      low, high: the 95 % interval that an evaluation has logged; None without.
    """

    steps: Values
    values: Values
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


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at or below these paths; runs without rows are left out.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a metrics file that cannot be read, or no rows at all.
    """
    histories = {path: history for path in find_runs(paths) if (history := read_history(path))}
    if not histories:
        raise ValueError(f"expected runs with at least one row of metrics; got none in {', '.join(map(str, paths))}")
    names = _short_names([path.resolve() for path in histories])
    return [Run(name, path, history) for name, (path, history) in zip(names, histories.items(), strict=True)]


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


def main_metrics(runs: Sequence[Run]) -> list[str]:
    """The main metrics with a finite value in any of the runs, in the order of drawing."""
    rows = (row for run in runs for row in run.history)
    found = {name for row in rows for name, value in row.items() if math.isfinite(value)}
    of_functions = sorted(name for name in found if name.startswith("rewards/") and name.endswith("/mean"))
    if len(of_functions) == 1:
        of_functions = []  # a single function is the reward
    evaluations = sorted(name for name in found if evaluated(name))
    return [name for name in ("reward", *of_functions, *evaluations, *MAIN) if name in found]


def curve_of(run: Run, name: str) -> Curve | None:
    """The curve of one metric; None if the run has no finite value of it."""
    points = _points(run, name)
    if points is None:
        return None
    steps, values = points
    part = 1 if len(steps) <= POINTS else math.ceil((last_step([run]) + 1) / POINTS)
    low, high = (_points(run, f"{name}_{end}") for end in ("low", "high"))
    if low is None or high is None or not len(low[0]) == len(high[0]) == len(steps):
        return Curve(*_means_of_parts(steps, values, part))
    bounds = (_means_of_parts(*bound, part)[1] for bound in (low, high))
    return Curve(*_means_of_parts(steps, values, part), *bounds)


def last_step(runs: Sequence[Run]) -> int:
    """The last step of the longest run."""
    return max(row["step"] for run in runs for row in run.history)


def _points(run: Run, name: str) -> tuple[Values, Values] | None:
    """Steps and finite values of a metric; None without any."""
    points = [(row["step"], row[name]) for row in run.history if name in row and math.isfinite(row[name])]
    if not points:
        return None
    steps, values = np.array(points, dtype=float).T
    return steps, values


def _means_of_parts(
    steps: Float[np.ndarray, " rows"], values: Float[np.ndarray, " rows"], part: int
) -> tuple[Values, Values]:
    numbers, places = np.unique(steps // part, return_inverse=True)
    means = np.bincount(places, weights=values) / np.bincount(places)
    return numbers * part + (part - 1) / 2, means


def _short_names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that are all different."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
