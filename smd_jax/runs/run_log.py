"""The rows that a run writes, and what it concludes from them: where it stands, when it stops, what to warn of.

Everything that counts is read back from the files, so that a resumed run stands where it stood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from smd_jax.disk import written
from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, METRICS_FILE, MetricsWriter, meaning, read_metrics
from smd_jax.runs.diagnosis import ROLLOUTS, warnings
from smd_jax.runs.objective import Objective, Standing, check_metric


class NoJournal:
    """In the place of a Journal in a process that writes nothing, because the first does; that one decides, too."""

    start_is_evaluated = has_ended = may_end = False

    def is_best(self, done: int) -> bool:
        return False

    def write_evaluation(self, done: int, metrics: Mapping[str, float | int]) -> None:
        pass

    def write_rollout(self, done: int, metrics: Mapping[str, float | int], *, evaluated: bool) -> list[str]:
        return []

    def write_row(self, done: int, metrics: Mapping[str, float | int]) -> None:
        pass

    def why_ended(self) -> str:
        return ""


class Journal:
    """The files of one run, open.

    Args:
      directory: of the run.
      start: finished rollouts; rows behind them belong to steps that are taken once more, and are dropped.
      resume: whether there may be rows.
      objective: what the run is to reach, or None.
      evaluates: whether there are evaluations.

    Attributes:
      start_is_evaluated: whether there is a row of an evaluation before the first rollout.
      standing: of the objective.
    """

    def __init__(self, directory: Path, start: int, *, resume: bool, objective: Objective | None, evaluates: bool):
        self._objective = objective
        self._evaluates = evaluates
        metrics = directory / METRICS_FILE
        evaluations = directory / EVALUATIONS_FILE
        with written(metrics):
            self._metrics = MetricsWriter(metrics, next_step=start if resume else None)
            # Rows of evaluations are numbered by the rollouts before them; that of the start is there before any.
            self._evaluations = (
                MetricsWriter(evaluations, next_step=start + 1 if resume else None) if evaluates else None
            )
        before = read_metrics(evaluations)[:1] if evaluates else []
        self.start_is_evaluated = bool(before) and before[0]["step"] == 0
        # Rows of metrics are numbered from 0: the first one is that of the first finished rollout.
        counted = [(0, row) for row in before if row["step"] == 0]
        counted += [(row["step"] + 1, row) for row in read_metrics(metrics)]
        self.standing = Standing()
        for done, row in counted:
            self._stand(done, row)
        self._newest = deque[Mapping[str, float | int]](maxlen=ROLLOUTS)
        self._warned = set[str]()
        self._checked = False

    @property
    def has_ended(self) -> bool:
        """Whether the objective's patience is at its end."""
        return self._objective is not None and self.standing.has_ended(self._objective)

    @property
    def may_end(self) -> bool:
        """Whether one more value without a gain ends the objective's patience."""
        after_one_more = self.standing._replace(without_gain=self.standing.without_gain + 1)
        return self._objective is not None and after_one_more.has_ended(self._objective)

    def is_best(self, done: int) -> bool:
        """Whether the newest row, of `done` finished rollouts, has the best value so far."""
        return self.standing.best is not None and self.standing.best_at == done

    def write_evaluation(self, done: int, metrics: Mapping[str, float | int]) -> None:
        """The row of an evaluation after `done` rollouts. That of the start is the only one that no row of a rollout
        repeats."""
        assert self._evaluations is not None
        with written(self._evaluations.path):
            self._evaluations.write(done, metrics)
        if done == 0:
            if self._objective is not None and self._objective.metric.startswith("eval/"):
                check_metric(self._objective, metrics)
            self._stand(0, metrics)

    def write_rollout(self, done: int, metrics: Mapping[str, float | int], *, evaluated: bool) -> list[str]:
        """The row of the rollout that made `done`, with those of an evaluation after it; returns what to warn of."""
        self.write_row(done, metrics)
        self._stand(done, metrics)
        if self._objective is not None and not self._checked and self._is_complete(metrics, evaluated):
            check_metric(self._objective, metrics)
            self._checked = True
        self._newest.append(metrics)
        return warnings(self._newest, self._warned)

    def write_row(self, done: int, metrics: Mapping[str, float | int]) -> None:
        """The row of a rollout with which the run ends: nothing is concluded from it."""
        with written(self._metrics.path):
            self._metrics.write(done - 1, metrics)

    def _is_complete(self, metrics: Mapping[str, float | int], evaluated: bool) -> bool:
        """Whether a row has all the metrics that there will ever be."""
        assert self._objective is not None
        # Where there are evaluations, the objective may be a metric of theirs.
        if self._evaluates and not evaluated:
            return False
        # A rollout without signal may take no optimizer step, and then has none of the metrics that a step has.
        name = self._objective.metric
        return "grad_norm" in metrics or name.startswith("eval/") or not meaning(name)

    def why_ended(self) -> str:
        """One line on an early stop."""
        assert self._objective is not None
        standing = self.standing
        if standing.best is None:
            return f"stopped early: {self._objective.metric} was no number, {standing.without_gain} times"
        more = f" by more than {self._objective.min_gain:g}" if self._objective.min_gain else ""
        return (
            f"stopped early: {self._objective.metric} was not better{more}, {standing.without_gain} times in a row; "
            f"the best is {standing.best:.4g} after {standing.best_at} rollouts"
        )

    def _stand(self, done: int, metrics: Mapping[str, float | int]) -> None:
        if self._objective is not None:
            self.standing = self.standing.after(self._objective, done, metrics)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in (self._metrics, self._evaluations):
            if writer is not None:
                # What could not be written is tried once more, and fails again.
                with written(writer.path):
                    writer.close()
