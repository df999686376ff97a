"""Entropy bonus, and the selection of tokens with the highest entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Array, Bool

from smd_jax.learner.forward import Visibility
from smd_jax.learner.terms import Minibatch, Needs, Term, TermInputs, TermOutputs
from smd_jax.losses.entropy import check_quantile, high_entropy_tokens, weighted_entropy
from smd_jax.losses.weighting import TokenMean
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class TokenChoice:
    """Selects a share of the tokens by entropy.

    Attributes:
      quantile: share of tokens with the highest entropy; 1: all tokens.
      visibility: mask of the entropies.
      recorded: use the sampler's recorded entropies. With several steps per rollout these are from before the first.
    """

    quantile: float = 1.0
    visibility: Visibility = "shadow"
    recorded: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_quantile(self.quantile)

    def tokens(self, minibatch: Minibatch) -> Bool[Array, "batch R"] | None:
        """The selected counted tokens; None: all. Costs a forward pass without recorded entropies."""
        if self.quantile == 1:
            return None
        entropy = minibatch.trajectory.entropy if self.recorded else None
        if entropy is None:
            entropy = minibatch.replay(self.visibility).entropy
        return high_entropy_tokens(entropy, minibatch.mask, self.quantile)


@dataclass(frozen=True)
class EntropyTerm(Term):
    """`-coef * mean entropy` in nats, over the selected tokens, including those that a correction rejects."""

    coef: float = 0.01
    choice: TokenChoice = TokenChoice()

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.coef < math.inf:
            raise ValueError(
                f"expected a finite entropy_coef >= 0, because a negative one would reduce the entropy to 0; "
                f"got {self.coef}"
            )

    @property
    def needs(self) -> Needs:
        return Needs(entropy_gradient=True)

    def coefficient(self, step: Array) -> float:
        return -self.coef

    def prepare(self, minibatch: Minibatch) -> Array:
        chosen = self.choice.tokens(minibatch)
        return TokenMean().weights(minibatch.mask if chosen is None else chosen)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        return TermOutputs(weighted_entropy(inputs.entropy, inputs.prepared))
