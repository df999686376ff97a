"""Rows of runs on disk, for curves of one line per run.

A step counts the rollouts that the policy has learned from. The metrics of rollout s, numbered from 0, are at step s,
as is an evaluation after s rollouts. The evaluation before training is at step 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, evaluated, read_metrics

# Main metrics after the reward, the reward functions and the evaluations.
MAIN = (
    *("sampling/sampling_logp_difference/mean", "completions/mean_length", "completions/clipped_ratio", "entropy"),
    *("frac_reward_zero_std", "kl", "grad_norm", "rollout/tokens_per_second"),
)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
      name: its path below the folder that all runs share.
      path: its folder.
      history: the rows of `read_history`.
    """

    name: str
    path: Path
    history: Sequence[Mapping[str, Any]]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at or below these paths, each once, in a stable order; runs without rows are left out.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a metrics file that cannot be read, or no rows at all.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        here = sorted(file.parent for file in path.rglob(METRICS_FILE))
        if not here:
            raise FileNotFoundError(f"expected a run, or a folder with runs, each with a {METRICS_FILE}; got {path}")
        found |= {run.resolve(): run for run in here}
    histories = {path: history for path, run in found.items() if (history := read_history(run))}
    if not histories:
        raise ValueError(f"expected runs with at least one row of metrics; got none in {', '.join(map(str, paths))}")
    shared = os.path.commonpath([path.parent for path in histories])
    return [Run(path.relative_to(shared).as_posix(), found[path], history) for path, history in histories.items()]


def read_history(directory: str | Path) -> list[dict[str, Any]]:
    """All metrics of a run by step, of its rollouts and its evaluations.

    Raises:
      FileNotFoundError: no metrics.jsonl.
      ValueError: a file that cannot be read.
    """
    directory = Path(directory)
    evaluations = directory / EVALUATIONS_FILE
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(directory / METRICS_FILE) + (read_metrics(evaluations) if evaluations.is_file() else []):
        rows.setdefault(row["step"], {}).update(row)
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
