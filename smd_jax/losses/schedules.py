"""Schedules of loss coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from smd_jax.typed_fields import check_types

Shape = Literal["linear", "cosine"]


@dataclass(frozen=True)
class CoefSchedule:
    """A coefficient that moves from `start` to `end` and stays there.

    Attributes:
      start: the coefficient at optimizer step 0.
      end: the coefficient from step `steps` on.
      steps: optimizer steps from `start` to `end`.
      shape: "linear", or "cosine" (half a wave).
    """

    start: float
    end: float
    steps: int
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        check_types(self)
        if self.steps < 1:
            raise ValueError(f"expected steps >= 1 from start to end; got {self.steps}")

    def at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The coefficient at an optimizer step, which may be traced."""
        # Remaining share of the start; optax's cosine schedule cannot rise from 0.
        if self.shape == "linear":
            left = optax.linear_schedule(1.0, 0.0, self.steps)(step)
        else:
            left = optax.cosine_decay_schedule(1.0, self.steps)(step)
        return jnp.asarray(self.end + (self.start - self.end) * left, float)
