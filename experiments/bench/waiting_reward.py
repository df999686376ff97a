"""A reward that waits, like a judge on another machine. It imports no JAX, because it runs in its own process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WaitingReward:
    """Prefers short completions.

    Attributes:
      seconds: waiting time of a call, for all completions together.
    """

    seconds: float

    def __call__(self, completions: Sequence[str]) -> list[float]:
        time.sleep(self.seconds)
        return [-float(len(completion)) for completion in completions]
