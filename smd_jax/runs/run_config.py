"""How long a run is, how often it saves and evaluates, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.config import check_whole
from smd_jax.runs.objective import Objective
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class RunConfig:
    """How a run is kept.

    Attributes:
      steps: rollouts in all, those before a resume included.
      checkpoint_every: rollouts between two checkpoints; the last one is always saved. 0 saves the last one only.
      evaluate_every: rollouts between two evaluations; the start and the end are evaluated, too. 0 never evaluates.
      keep: the newest checkpoints that stay on disk.
      objective: a metric by which the best checkpoint is kept, and the run may stop early; None: neither.
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

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint stays beside the newest."""
        return self.objective is not None and self.objective.keep_best
