"""Length of a run, its checkpoints and its evaluations, and the metric of its best checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.config import check_whole
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class Objective:
    """A metric to maximize or to minimize; the run keeps the checkpoint with its best value.

    Attributes:
      metric: its name, such as `eval/dense/reward`; compared at every rollout or evaluation that logs it.
      maximize: whether higher is better.
    """

    metric: str
    maximize: bool = True

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, checkpoints and evaluations of a run.

    Attributes:
      steps: rollouts in all, including those before a resume.
      checkpoint_every: rollouts between two checkpoints; the last one is always saved. 0: only the last one.
      evaluate_every: rollouts between two evaluations; start and end are evaluated, too. 0: never, without `evaluate`.
      keep: number of the newest checkpoints that stay on disk.
      objective: selects the best checkpoint, which stays, too; None: no best one is kept.
    """

    steps: int
    checkpoint_every: int = 0
    evaluate_every: int = 0
    keep: int = 3
    objective: Objective | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_whole("steps", self.steps, 1, "rollouts in all")
        check_whole("checkpoint_every", self.checkpoint_every, 0, "rollouts; 0: the last one only")
        check_whole("evaluate_every", self.evaluate_every, 0, "rollouts; 0: never")
        check_whole("keep", self.keep, 1, "checkpoints")
