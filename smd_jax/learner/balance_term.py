"""Load-balancing loss of mixtures of experts, as Mixtral, Qwen3 and gpt-oss are trained with.

    count * sum over experts of  f * P          f: choices of the expert per token          P: its mean probability

Means are over all tokens that were read and all layers with experts (https://arxiv.org/abs/2101.03961). The choices are
those that the sampler recorded, which have no gradient; so a minibatch has one f, and microbatches add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.learner.terms import Minibatch, Needs, Term, TermInputs, TermOutputs
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class BalanceTerm(Term):
    """`coef * load-balancing loss`, for `UpdateConfig(terms=(BalanceTerm(count, coef),))`.

    Attributes:
      count: experts of a layer, `ModelConfig.experts.count`.
      coef: weight; the family's is `ModelConfig.experts.balance_coef`.
    """

    count: int
    coef: float = 0.001

    def __post_init__(self) -> None:
        check_types(self)
        if self.count < 1:
            raise ValueError(f"expected count >= 1; got {self.count}")
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"expected a finite coef >= 0; got {self.coef}")

    @property
    def needs(self) -> Needs:
        return Needs(router=True)

    def coefficient(self, step: Array) -> float:
        return self.coef

    def prepare(self, minibatch: Minibatch) -> Float[Array, "batch count"]:
        """Weight of each expert's probability in the loss: count * f over the number of tokens."""
        routing = minibatch.trajectory.routing
        if routing is None:
            raise ValueError("expected a trajectory with recorded routing, from a model with experts; got one without")
        chosen = jnp.arange(self.count)[None] == routing.astype(jnp.int32).reshape(-1, 1)
        tokens = jnp.maximum(jnp.sum(routing[..., 0] >= 0), 1)
        # Two divisions: the square of as many tokens as one batch has would overflow 32 bits.
        weights = self.count * (chosen.sum(0) / tokens) / tokens
        return jnp.broadcast_to(weights[None], (routing.shape[0], self.count))

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        routing = inputs.trajectory.routing
        assert inputs.router is not None and routing is not None  # it needs them
        if inputs.router.shape[-1] != self.count:
            raise ValueError(f"expected count {inputs.router.shape[-1]}, the model's experts; got {self.count}")
        shares = jax.nn.softmax(inputs.router, axis=-1)
        there = (routing[..., 0] >= 0)[..., None]
        loss = jnp.sum(jnp.where(there, shares * inputs.prepared[:, None, None], 0))
        return TermOutputs(loss, {"experts/balance_loss": loss})
