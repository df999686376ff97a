"""The rows that a run writes, and what follows from them: the best rollout, warnings.

Everything is read back from the files, so that a resumed run comes to the same results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from smd_jax.devices.processes import all_or_none, is_first
from smd_jax.disk import written
from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, MetricsWriter, meaning, read_metrics
from smd_jax.runs.diagnosis import ROLLOUTS, warnings
from smd_jax.runs.objective import Best, Objective, check_metric

Metrics = Mapping[str, float | int]


class RunLog:
    """The metrics files of one run, open. Only the first process reads and writes them; all must make one.

    Args:
      directory: of the run.
      start: finished rollouts; rows of later ones are dropped, because their rollouts are repeated.
      resume: whether there may be rows.
      objective: the objective of the run, or None.
      evaluates: whether there are evaluations.

    Attributes:
      start_is_evaluated: whether there is a row of an evaluation before the first rollout.
      best: of the objective.
    """

    def __init__(self, directory: Path, start: int, *, resume: bool, objective: Objective | None, evaluates: bool):
        self._objective = objective
        self._metrics: MetricsWriter | None = None
        self._evaluations: MetricsWriter | None = None
        self._newest = deque[Metrics](maxlen=ROLLOUTS)
        self._reported = set[str]()
        self._metric_is_checked = False
        self.start_is_evaluated = False
        self.best = Best()
        with all_or_none():
            if is_first():
                self._open(directory, start, resume, evaluates)

    def _open(self, directory: Path, start: int, resume: bool, evaluates: bool) -> None:
        metrics, evaluations = directory / METRICS_FILE, directory / EVALUATIONS_FILE
        with written(metrics):
            self._metrics = MetricsWriter(metrics, next_step=start if resume else None)
            # Evaluations are numbered by the rollouts before them; that of the start has number 0.
            self._evaluations = (
                MetricsWriter(evaluations, next_step=start + 1 if resume else None) if evaluates else None
            )
        first = [row for row in read_metrics(evaluations)[:1] if row["step"] == 0] if evaluates else []
        self.start_is_evaluated = bool(first)
        for row in first:
            self._count(0, row)
        # Metrics are numbered from 0: row 0 is that of the first finished rollout.
        for row in read_metrics(metrics):
            self._count(row["step"] + 1, row)

    def is_best(self, done: int) -> bool:
        """Whether the newest row, of `done` finished rollouts, has the best value so far."""
        return self.best.value is not None and self.best.at == done

    def write_evaluation(self, done: int, metrics: Metrics) -> None:
        """Writes the row of an evaluation after `done` rollouts. Rows of rollouts repeat all but that of the start."""
        if self._evaluations is None:
            return
        with written(self._evaluations.path):
            self._evaluations.write(done, metrics)
        if done == 0:
            if self._objective is not None and self._objective.metric.startswith("eval/"):
                check_metric(self._objective, metrics)
            self._count(0, metrics)

    def write_rollout(self, done: int, metrics: Metrics, *, evaluated: bool) -> list[str]:
        """Writes the row of the rollout that made `done`, with its evaluation; returns warnings."""
        if self._metrics is None:
            return []
        self.write_row(done, metrics)
        self._count(done, metrics)
        if self._objective is not None and not self._metric_is_checked and self._is_complete(metrics, evaluated):
            check_metric(self._objective, metrics)
            self._metric_is_checked = True
        self._newest.append(metrics)
        return warnings(self._newest, self._reported)

    def write_row(self, done: int, metrics: Metrics) -> None:
        """Writes the row of a rollout that ends the run; nothing follows from it."""
        if self._metrics is not None:
            with written(self._metrics.path):
                self._metrics.write(done - 1, metrics)

    def _is_complete(self, metrics: Metrics, evaluated: bool) -> bool:
        """Whether a row has all the metrics that a row of this run can have."""
        assert self._objective is not None
        # With evaluations the objective may be one of their metrics.
        if self._evaluations is not None and not evaluated:
            return False
        # A rollout without signal may take no optimizer step, and then lacks the metrics of a step.
        name = self._objective.metric
        return "grad_norm" in metrics or name.startswith("eval/") or not meaning(name)

    def _count(self, done: int, metrics: Metrics) -> None:
        if self._objective is not None:
            self.best = self.best.after(self._objective, done, metrics)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in (self._metrics, self._evaluations):
            if writer is not None:
                # Closing retries a write that failed, and fails again.
                with written(writer.path):
                    writer.close()
