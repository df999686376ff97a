"""The objective of a run: it selects the best checkpoint, and may stop the run early.

    Objective("eval/dense/reward", patience=3)

          0.40 ─► 0.55 ─► 0.61 ─► 0.60 ─► 0.58 ─► 0.61          evaluations
                          best    1       2       3 without gain: stop

An `ObjectiveProgress` follows from the metrics, so that a resumed run computes it from `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from smd_jax.config import check_whole
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class Objective:
    """A metric to maximize or to minimize.

    Attributes:
      metric: its name, such as `eval/dense/reward`; it counts at every rollout whose metrics have it.
      maximize: whether more is better.
      keep_best: also keep the checkpoint with the best value.
      patience: number of values in a row without a gain after which the run stops. None: never.
      min_gain: a gain is larger than this, compared with the last value that was a gain.
    """

    metric: str
    maximize: bool = True
    keep_best: bool = True
    patience: int | None = None
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.patience is not None:
            check_whole("patience", self.patience, 1, "or None")
        if not 0 <= self.min_gain < math.inf:  # NaN is neither
            raise ValueError(f"expected a finite min_gain >= 0; got {self.min_gain}")

    def gain(self, value: float, over: float | None) -> float:
        """How much better `value` is; NaN is never better."""
        if math.isnan(value):
            return -math.inf
        if over is None:
            return math.inf
        return value - over if self.maximize else over - value


class ObjectiveProgress(NamedTuple):
    """How far a run has come with its objective.

    Attributes:
      best: the best value so far, None before the first. best_at: finished rollouts at that time.
      reference: the last value that was a gain.
      without_gain: number of values since then.
    """

    best: float | None = None
    best_at: int = 0
    reference: float | None = None
    without_gain: int = 0

    def after(self, objective: Objective, done: int, metrics: Mapping[str, float | int]) -> ObjectiveProgress:
        """The progress after one more row of metrics, of `done` finished rollouts."""
        if objective.metric not in metrics:
            return self
        value = metrics[objective.metric]
        progress = self
        if objective.gain(value, self.best) > 0:
            progress = progress._replace(best=value, best_at=done)
        # Small gains add up: the reference stays until their sum exceeds `min_gain`.
        if objective.gain(value, self.reference) > objective.min_gain:
            return progress._replace(reference=value, without_gain=0)
        return progress._replace(without_gain=self.without_gain + 1)

    def has_ended(self, objective: Objective) -> bool:
        """Whether a run with this objective stops here."""
        return objective.patience is not None and self.without_gain >= objective.patience


class NoSuchMetricError(ValueError):
    """The run has no metric of the objective's name."""


def check_metric(objective: Objective, metrics: Mapping[str, float | int]) -> None:
    """Raises NoSuchMetricError unless `metrics` has the objective's metric."""
    if objective.metric not in metrics:
        raise NoSuchMetricError(
            f"expected the objective's metric among those that the run logs: {', '.join(sorted(metrics))}; "
            f"got {objective.metric!r}"
        )
