"""Coefficients that change from step to step."""

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
    """A coefficient that goes from `start` to `end`, up or down, and stays there.

    Attributes:
      start: the coefficient at optimizer step 0.
      end: the coefficient from step `steps` on.
      steps: optimizer steps from the one to the other.
      shape: "linear", or "cosine": half a wave, slow at both ends.
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
        # The share of the start that is left: optax's cosine starts at its highest value, and could not go up from 0.
        if self.shape == "linear":
            left = optax.linear_schedule(1.0, 0.0, self.steps)(step)
        else:
            left = optax.cosine_decay_schedule(1.0, self.steps)(step)
        return jnp.asarray(self.end + (self.start - self.end) * left, float)
