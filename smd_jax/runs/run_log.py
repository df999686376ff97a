"""The rows that a run writes, its best rollout, and warnings.

The best rollout is read back from the files, so that a resumed run finds the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from smd_jax.devices.processes import all_or_none, is_first
from smd_jax.disk import disk_errors_named
from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, MetricsWriter, read_metrics
from smd_jax.runs.checkpoint.files import all_steps
from smd_jax.runs.run_config import Objective
from smd_jax.runs.run_folder import CHECKPOINTS
from smd_jax.text.near_names import did_you_mean

Metrics = Mapping[str, Any]

# Number of consecutive rollouts that make a symptom.
ROLLOUTS = 5


class NoSuchMetricError(ValueError):
    """The run has no metric of the objective's name."""


class Best(NamedTuple):
    """The best value of an objective, and the number of finished rollouts at that time."""

    value: float
    done: int


class RunLog:
    """The metrics files of one run, open. Only the first process reads and writes them; all must make one.

    Args:
      directory: of the run.
      start: finished rollouts; rows of later ones are dropped, because their rollouts are repeated.
      objective: the objective of the run, or None.
    """

    def __init__(self, directory: Path, start: int, objective: Objective | None):
        self._objective = objective
        self._best: Best | None = None
        self._newest = deque[Metrics](maxlen=ROLLOUTS)
        self._warned = set[str]()
        self._evaluation: Metrics = {}  # the newest
        self._evaluated = set[int]()
        self._has_evaluated = False  # since the start, which may have other evaluations than the rows before it
        self._files: tuple[MetricsWriter, MetricsWriter] | None = None
        with all_or_none():
            if is_first():
                paths = directory / METRICS_FILE, directory / EVALUATIONS_FILE
                with disk_errors_named(paths[0]):
                    # Rollouts are numbered from 0, and evaluations by the rollouts before them. Without a checkpoint
                    # the settings were not compared, and the start is evaluated again.
                    self._files = MetricsWriter(paths[0], start), MetricsWriter(paths[1], start + 1 if start else 0)
                self._best = best_rollout(directory, objective)
                for row in read_metrics(paths[1]):
                    self._evaluation = row
                    self._evaluated.add(row["step"])

    @property
    def best(self) -> int | None:
        """Finished rollouts at the best value of the objective; None before the first value."""
        return None if self._best is None else self._best.done

    def has_evaluation(self, done: int) -> bool:
        """Whether there is a row of an evaluation after `done` rollouts."""
        return done in self._evaluated

    def write_evaluation(self, done: int, metrics: Metrics) -> None:
        """Writes the row of an evaluation after `done` rollouts."""
        if self._files is not None:
            with disk_errors_named(self._files[1].path):
                self._files[1].write(done, metrics)
            self._evaluation = metrics
            self._evaluated.add(done)
            self._has_evaluated = True
            self._best = better(self._best, self._objective, done, metrics)

    def write_rollout(self, done: int, metrics: Metrics) -> list[str]:
        """Writes the row of the rollout that made `done`; returns warnings.

        Raises:
          NoSuchMetricError: no metric of this rollout, nor of an evaluation, is the objective. For one of an
            evaluation, only after the first one since the start.
        """
        if self._files is None:
            return []
        self.write_refused(done, metrics)
        self._best = better(self._best, self._objective, done, metrics)
        names = metrics.keys() | self._evaluation.keys()
        wanted = None if self._objective is None else self._objective.metric
        # A resumed run may wait for its first evaluation.
        is_expected = wanted is not None and (self._has_evaluated or not wanted.startswith("eval/"))
        # A rollout without signal may take no optimizer step, and then lacks the metrics of a step.
        if is_expected and wanted not in names and "grad_norm" in metrics:
            raise NoSuchMetricError(
                f"expected the objective's metric among those that the run logs: {', '.join(sorted(names))}; "
                f"got {wanted!r}{did_you_mean(str(wanted), names)}"
            )
        self._newest.append(metrics)
        return symptoms(list(self._newest), self._warned)

    def write_refused(self, done: int, metrics: Metrics) -> None:
        """Writes the row of a rollout that ends the run."""
        if self._files is not None:
            with disk_errors_named(self._files[0].path):
                self._files[0].write(done - 1, metrics)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as files:
            for writer in self._files or ():
                # Closing retries a write that failed, and fails again.
                files.enter_context(disk_errors_named(writer.path))
                files.callback(writer.close)


def best_rollout(directory: Path, objective: Objective | None) -> Best | None:
    """The best value of the objective among the rows whose checkpoint exists; None without any."""
    kept = all_steps(directory / CHECKPOINTS)
    rollouts = [(row["step"] + 1, row) for row in read_metrics(directory / METRICS_FILE)]
    evaluations = [(row["step"], row) for row in read_metrics(directory / EVALUATIONS_FILE)]
    best = None
    for done, row in sorted([*rollouts, *evaluations], key=lambda numbered: numbered[0]):
        if done in kept:
            best = better(best, objective, done, row)
    return best


def better(best: Best | None, objective: Objective | None, done: int, metrics: Metrics) -> Best | None:
    """The best value of the objective after one more row of metrics, of `done` finished rollouts.

    The start has no checkpoint and is never the best; nor is NaN.
    """
    value = None if objective is None or not done else metrics.get(objective.metric)
    if objective is None or value is None or math.isnan(value):
        return best
    gains = best is None or (value > best.value if objective.maximize else value < best.value)
    return Best(value, done) if gains else best


# --- signs that a run learns nothing


def symptoms(newest: Sequence[Metrics], warned: set[str]) -> list[str]:
    """A warning for each symptom that all of the newest `ROLLOUTS` rows show, once each: `warned` has their advice."""
    if len(newest) < ROLLOUTS:
        return []
    new = [advice for advice, shows in SYMPTOMS.items() if advice not in warned and all(map(shows, newest))]
    warned.update(new)
    return [f"warning: in each of the last {ROLLOUTS} rollouts {advice}" for advice in new]


def _value(row: Metrics, name: str) -> float:
    return float(row.get(name, math.nan))


def _has_no_signal(row: Metrics) -> bool:
    # A critic compares rewards over the whole batch, and its groups may have one completion.
    has_critic = "critic/values/mean" in row
    flat = _value(row, "reward_std") == 0 if has_critic else _value(row, "frac_reward_zero_std") == 1
    return flat or _value(row, "grad_norm") == 0


# What to try -> whether a row shows the symptom.
SYMPTOMS: dict[str, Callable[[Metrics], bool]] = {
    "nothing could be learned from the rewards: those of every group were equal, or the gradient was 0. Look at the "
    "completions and their rewards. If all are wrong: easier prompts, partial credit, a larger group_size, a higher "
    "temperature, a warm start. If all are right: harder prompts": _has_no_signal,
    "nine of ten completions or more were cut off by the length limit. Raise max_new_tokens; if that does not help, "
    "the model never stops: look for a wrong eos_token_id or chat template, add stop_strings, or take an "
    "instruction-tuned model": lambda row: _value(row, "completions/clipped_ratio") >= 0.9,
    "the entropy of the sampler's tokens was below 0.01 nats: all completions of a prompt are equal, and nothing "
    "better is found. Resume from a checkpoint before that, with a lower learning rate, a larger entropy_coef or "
    "epsilon_high, a KL to the reference (beta), or a higher temperature": lambda row: (
        _value(row, "rollout/entropy") < 0.01
    ),
}
