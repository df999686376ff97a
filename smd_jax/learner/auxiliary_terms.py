"""Terms that are added to the policy loss: entropy bonus, the critic's value loss, load balancing of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.learner.forward import Visibility
from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.entropy import check_quantile, high_entropy_tokens, weighted_entropy
from smd_jax.losses.value import ValueConfig, value_loss
from smd_jax.losses.weighting import TokenMean
from smd_jax.metrics import token_mean
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
    needs = Needs(entropy_gradient=True)

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.coef < math.inf:
            raise ValueError(
                f"expected a finite entropy_coef >= 0, because a negative one would reduce the entropy to 0; "
                f"got {self.coef}"
            )

    def coefficient(self, step: Array) -> float:
        return -self.coef

    def prepare(self, minibatch: Minibatch) -> Array:
        chosen = self.choice.tokens(minibatch)
        return TokenMean().weights(minibatch.mask if chosen is None else chosen)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        return TermOutputs(weighted_entropy(inputs.entropy, inputs.prepared))


@dataclass(frozen=True)
class ValueTerm(Term):
    """The critic's loss over all counted tokens, including those that a correction rejects: it learns the sampled
    returns and uses no ratio."""

    config: ValueConfig = ValueConfig()
    needs = Needs(values=True)

    def coefficient(self, step: Array) -> float:
        return self.config.coef

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        batch = inputs.batch
        if batch.old_values is None or batch.returns is None:
            raise ValueError(
                "expected old_values and returns in the batch for the value loss, as from PPOLoop; got None"
            )
        assert inputs.values is not None  # it needs them
        loss, clipped = value_loss(inputs.values, batch.old_values, batch.returns, inputs.prepared, self.config)
        return TermOutputs(loss, {"loss/value_avg": loss}, clipped)

    def metrics(self, results: TermResults) -> Metrics:
        return {"val/clipfrac_avg": token_mean(results.rows, results.mask)}


@dataclass(frozen=True)
class BalanceTerm(Term):
    """`coef * load-balancing loss` of mixtures of experts, as in the training of Mixtral, Qwen3 and gpt-oss. Add it
    with `UpdateConfig(terms=(BalanceTerm(count, coef),))`:

        count * sum over experts of  f * P      f: choices of the expert per token      P: its mean probability

    Means are over all tokens that were read and all layers with experts (https://arxiv.org/abs/2101.03961). The choices
    are those that the sampler recorded, which have no gradient; so a minibatch has one f, and microbatches add up.

    Attributes:
      count: experts of a layer, `ModelConfig.experts.count`.
      coef: weight; the family's is `ModelConfig.experts.balance_coef`.
    """

    count: int
    coef: float = 0.001
    needs = Needs(router=True)

    def __post_init__(self) -> None:
        check_types(self)
        if self.count < 1:
            raise ValueError(f"expected count >= 1; got {self.count}")
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"expected a finite coef >= 0; got {self.coef}")

    def coefficient(self, step: Array) -> float:
        return self.coef

    def prepare(self, minibatch: Minibatch) -> Float[Array, "batch count"]:
        """Weight of each expert's probability in the loss: count * f over the number of tokens."""
        routing = minibatch.trajectory.routing
        assert routing is not None  # it needs the router
        chosen = jnp.arange(self.count)[None] == routing.astype(jnp.int32).reshape(-1, 1)
        tokens = jnp.maximum(jnp.sum(routing[..., 0] >= 0), 1)
        # Two divisions, because the square of a batch's token count could overflow 32 bits.
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
