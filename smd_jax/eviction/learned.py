"""A policy that is trained: which keys go is a draw, and the draw has a probability that reward can raise or lower."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from smd_jax.eviction.base import CacheView, EvictionPolicy, Scores
from smd_jax.eviction.policies import drawn_by_position
from smd_jax.message.gate import Gate, LinearGate, gate_parameters
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class LearnedGate(EvictionPolicy):
    """Keys go by draws without replacement, in proportion to exp(-logit) of a gate (`smd_jax.message.gate`).

    A score of logit - Gumbel noise, whose lowest go first, is such a draw (Gumbel top-k, arXiv:1903.06059). Order and
    log-probability go into the trajectory, `smd_jax.message.draws`; `UpdateConfig.eviction_coef` trains the gate.

    The parameters must have the gate's, `smd_jax.message.gate.add_gate`. Beyond what the gate protects by itself
    (`LinearGate.sinks`) it has to learn what must stay.
    Inside of `Protect` or `Pyramid` it evicts as here, but nothing is recorded that it could be trained by.

    A group's rows share the draws made while their prompt is read, as those of `Random`. Shared draws are recorded and
    replayed, but not trained: see `EvictionDraws.trained`.

    Attributes:
      greedy: whether the keys of the lowest logits go, without chance and so without anything to record.

    Raises:
      TypeError: for a value that the type of its field does not allow.
    """

    weights: Gate = field(default_factory=LinearGate)
    greedy: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def gate(self) -> Gate | None:
        return None if self.greedy else self.weights

    def protected(self, budget: int) -> int:
        del budget
        return self.weights.protected

    def parameters(self, params: Any, layer: int) -> Any:
        return gate_parameters(params, layer)

    def score(self, view: CacheView) -> Scores:
        logits = self.weights.logits(view.parameters, view.keys, view.values, view.positions, view.newest[:, None])
        logits = logits[:, :, 0]
        if self.greedy:
            return logits
        # float32 by name: with 64-bit numbers enabled, JAX's default would be other numbers.
        return logits - drawn_by_position(view, lambda rng: jax.random.gumbel(rng, (), jnp.float32))
