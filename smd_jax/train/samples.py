"""What a rollout is on its way from the sampler to the learner."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smd_jax.message.trajectory import Trajectory
from smd_jax.tasks.task import Row

# In `Samples.metrics`: rollouts that they come from, where there may be several.
ROLLOUTS = "dynamic_sampling/rollouts"


class Samples(NamedTuple):
    """One rollout and what the task said of it, on the host; the completions of a prompt are contiguous.

    Attributes:
      trajectory: `[batch, ...]`.
      rewards: float32 `[batch]`; NaN where a reward function failed, see `smd_jax.tasks.rewards`.
      task_rows: the row of the task that each completion belongs to.
      completions: their texts.
      counted_rows: `[batch]`, false for completions to leave out of the update; None: all count.
      metrics: metrics of everything that was drawn, also of what is left out.
      reward_parts: float32 `[batch]` of each function of `Loop.rewards`, NaN where it failed or does not apply; nothing
        where the task's own reward grades.
      advantages: float32 `[batch]`, where they follow from the rewards alone; None elsewhere. Only for `Loop.watch`.
    """

    trajectory: Trajectory
    rewards: np.ndarray
    task_rows: list[Row]
    completions: list[str]
    counted_rows: np.ndarray | None
    metrics: dict[str, Any]
    reward_parts: Mapping[str, np.ndarray] = MappingProxyType({})
    advantages: np.ndarray | None = None

    @property
    def rewarded_rows(self) -> np.ndarray | None:
        """`[batch]`, which completions have a reward; None: all."""
        missing = np.isnan(self.rewards)
        return ~missing if missing.any() else None
