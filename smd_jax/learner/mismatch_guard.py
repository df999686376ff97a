"""Checks at every rollout that sampler and learner are one policy, and locates the first difference.

    |log p_learner - log p_sampler|     float32   6e-5 over 30 layers, 5e-6 over 3        bound   1.1e-3, 5.6e-4
                                        16 bits   0.3 over 30 layers                              2
                                        float64   1e-10 over 3                                    1e-8

A mask that is wrong for one relevant key causes a difference of a tenth of a nat or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from smd_jax.devices.processes import on_host
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import ModelShape
from smd_jax.typed_fields import check_types

DIFFERENCE = "sampling/sampling_logp_difference/max"

# Nats, and nats per layer, by compute dtype. Ten times the measured values, see docs/runs.md.
BOUNDS: dict[str, tuple[float, float]] = {
    "float64": (1e-8, 1e-9),
    "float32": (5e-4, 2e-5),
    "float16": (0.5, 0.05),
    "bfloat16": (0.5, 0.05),
}


@dataclass(frozen=True)
class MismatchGuard:
    """Stops a run whose learner and sampler differ.

    Attributes:
      bound: largest allowed difference of a token's log-probabilities, in nats; None: see `default_bound`.
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.bound is not None and not self.bound > 0:
            raise ValueError(f"expected a bound > 0 nats, or None; got {self.bound}")

    def bound_for(self, shape: ModelShape) -> float:
        """The bound of a model, in nats."""
        return default_bound(shape) if self.bound is None else self.bound


def is_beyond(difference: float, bound: float | None) -> bool:
    """Whether a difference exceeds the bound; NaN always does. None: no bound."""
    return bound is not None and not difference <= bound


def default_bound(shape: ModelShape) -> float:
    """Ten times the largest difference caused by rounding, in nats."""
    dtype = shape.dtype
    # GPUs and TPUs multiply float32 in 10 or 8 bits unless the model or the process asks for more.
    if dtype == "float32" and not shape.full_float32 and jax.default_backend() != "cpu":
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        precise = precision in ("highest", "float32")
        dtype = "float32" if precise else "bfloat16"
    base, per_layer = BOUNDS[dtype]
    return base + per_layer * shape.num_layers


class Difference(NamedTuple):
    """Where sampler and learner first differ.

    Attributes:
      row: row of the batch.
      column: column of the response.
      position: position of the token in its own sequence, including the prompt.
      nats: log p_learner - log p_sampler of that token.
    """

    row: int
    column: int
    position: int
    nats: float

    def __str__(self) -> str:
        return f"first at row {self.row}, position {self.position} ({self.nats:+.3g} nats)"


def first_difference(trajectory: Trajectory, logprobs: Float[Array, "batch R"], bound: float) -> Difference | None:
    """The first token at which learner and sampler differ by more than `bound` nats; None without one.

    All processes must call it and get the same result.

    Args:
      logprobs: the learner's, under the recorded mask and at the parameters that sampled the trajectory.
    """
    counted, sampled, learned = map(on_host, (trajectory.response_mask, trajectory.logprobs, logprobs))
    delta = np.where(counted, learned - sampled, 0.0)
    apart = ~(np.abs(delta) <= bound)
    if not apart.any():
        return None
    # The earliest column of any row, and there the row with the largest difference.
    column = int(np.argmax(apart.any(axis=0)))
    row = int(np.argmax(np.where(apart[:, column], np.abs(delta[:, column]), -1.0)))
    position = int(on_host(trajectory.positions)[row, trajectory.prompt_width + column])
    return Difference(row, column, position, float(delta[row, column]))
