"""The objective of a run selects the best checkpoint.

    Objective("eval/dense/reward")

`best_of` follows from the metrics, so that a resumed run computes it from `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class Objective:
    """A metric to maximize or to minimize; the run keeps the checkpoint with its best value.

    Attributes:
      metric: its name, such as `eval/dense/reward`; it counts at every rollout whose metrics have it.
      maximize: whether more is better.
    """

    metric: str
    maximize: bool = True

    def __post_init__(self) -> None:
        check_types(self)

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether `value` is a gain; NaN never is, and any other first value is."""
        if math.isnan(value) or than is None:
            return not math.isnan(value)
        return value > than if self.maximize else value < than


class Best(NamedTuple):
    """The best value of an objective so far.

    Attributes:
      value: None before the first. at: finished rollouts at that time.
    """

    value: float | None = None
    at: int = 0

    def after(self, objective: Objective, done: int, metrics: Mapping[str, float | int]) -> Best:
        """The best value after one more row of metrics, of `done` finished rollouts."""
        value = metrics.get(objective.metric)
        return self if value is None or not objective.is_better(value, self.value) else Best(value, done)


class NoSuchMetricError(ValueError):
    """The run has no metric of the objective's name."""


def check_metric(objective: Objective, metrics: Mapping[str, float | int]) -> None:
    """Raises NoSuchMetricError unless `metrics` has the objective's metric."""
    if objective.metric not in metrics:
        raise NoSuchMetricError(
            f"expected the objective's metric among those that the run logs: {', '.join(sorted(metrics))}; "
            f"got {objective.metric!r}"
        )
