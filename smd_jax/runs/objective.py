"""What a run is to reach: which checkpoint is its best, and when it stops early.

    Objective("eval/dense/reward", patience=3)

          0.40 ─► 0.55 ─► 0.61 ─► 0.60 ─► 0.58 ─► 0.61          evaluations
                          best    1       2       3 without gain: stop

A `Standing` follows from the metrics alone, so that a resumed run finds its own in `metrics.jsonl`.
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
    """A metric to raise or to lower.

    Attributes:
      metric: its name, `eval/dense/reward` for example; it counts at every rollout whose metrics have it.
      maximize: whether more is better.
      keep_best: keep the checkpoint with the best value, beside the newest ones.
      patience: stop after so many values in a row without a gain. None: never.
      min_gain: a gain is more than this, compared with the last value that was one.
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
        """By how much `value` is better; NaN, which is no value, never is."""
        if math.isnan(value):
            return -math.inf
        if over is None:
            return math.inf
        return value - over if self.maximize else over - value


class Standing(NamedTuple):
    """Where a run stands.

    Attributes:
      best: the best value so far, None before the first. best_at: finished rollouts then.
      reference: the last value that was a gain.
      without_gain: values since then.
    """

    best: float | None = None
    best_at: int = 0
    reference: float | None = None
    without_gain: int = 0

    def after(self, objective: Objective, done: int, metrics: Mapping[str, float | int]) -> Standing:
        """The standing after one more row of metrics, of `done` finished rollouts."""
        if objective.metric not in metrics:
            return self
        value = metrics[objective.metric]
        standing = self
        if objective.gain(value, self.best) > 0:
            standing = standing._replace(best=value, best_at=done)
        # Small gains add up: the reference stays until they are together more than `min_gain`.
        if objective.gain(value, self.reference) > objective.min_gain:
            return standing._replace(reference=value, without_gain=0)
        return standing._replace(without_gain=self.without_gain + 1)

    def has_ended(self, objective: Objective) -> bool:
        """Whether a run with this objective stops here."""
        return objective.patience is not None and self.without_gain >= objective.patience


class NoSuchMetricError(ValueError):
    """An objective's metric is none that the run has."""


def check_metric(objective: Objective, metrics: Mapping[str, float | int]) -> None:
    """Raises NoSuchMetricError unless the metric is there."""
    if objective.metric not in metrics:
        raise NoSuchMetricError(
            f"expected the objective's metric among those that the run logs: {', '.join(sorted(metrics))}; "
            f"got {objective.metric!r}"
        )
