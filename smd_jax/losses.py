"""Policy losses: arrays in, `(loss, LossTerms)` out. No model inside; three numbers are enough to test them.

Every loss is a weighted sum over tokens, `sum(weights * per_token)`. The weights are made from the whole batch at once,
so the sum over microbatches, in any split and on any number of devices, is the loss of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

LossType = Literal["grpo", "bnpo", "dr_grpo"]


@dataclass(frozen=True)
class LossConfig:
    """The clipped policy-gradient loss.

    Attributes:
      loss_type: how tokens are weighted, see `token_weights`.
      epsilon: the ratio is clipped from below at `1 - epsilon`. epsilon_high: from above at `1 + epsilon_high`; None
        takes `epsilon`.
      beta: coefficient of the k3 KL to the reference policy; 0 needs no reference.
    """

    loss_type: LossType = "bnpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"expected 0 < epsilon < 1; got {self.epsilon}")
        if self.epsilon_high is not None and self.epsilon_high <= 0:
            raise ValueError(f"expected epsilon_high > 0; got {self.epsilon_high}")
        if self.beta < 0:
            raise ValueError(f"expected beta >= 0; got {self.beta}")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio that still has a gradient."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class LossInputs(struct.PyTreeNode):
    """What a policy loss looks at; all float32 (or wider) `[batch, response]`, but for the advantages.

    Attributes:
      logprobs: of the policy being trained; the only input with a gradient.
      old_logprobs: of the policy that the ratio is taken to.
      reference_logprobs: of the reference policy; None where beta is 0.
      advantages: `[batch]`.
      weights: weight of each token in the loss, 0 outside the response.
    """

    logprobs: Float[Array, "batch response"]
    old_logprobs: Float[Array, "batch response"]
    reference_logprobs: Float[Array, "batch response"] | None
    advantages: Float[Array, " batch"]
    weights: Float[Array, "batch response"]


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class LossTerms(struct.PyTreeNode):
    """Per-token terms for the metrics, `[batch, response]`.

    Attributes:
      ratio: new over old probability.
      kl: k3 estimate of KL(policy ‖ reference), zeros without a reference.
      clipped_low, clipped_high: where clipping took the gradient away.
    """

    ratio: Float[Array, "batch response"]
    kl: Float[Array, "batch response"]
    clipped_low: Bool[Array, "batch response"]
    clipped_high: Bool[Array, "batch response"]


def token_weights(mask: Bool[Array, "batch response"], loss_type: LossType) -> Float[Array, "batch response"]:
    """Each token's weight in the loss, made from the mask of the whole batch; weights outside the mask are 0.

    grpo     mean over sequences of the mean over a sequence's tokens (arXiv:2402.03300)
    bnpo     mean over all tokens of the batch (also DAPO's token-level loss, arXiv:2503.14476)
    dr_grpo  sum over tokens / (sequences * longest response, the columns of the mask) (arXiv:2503.20783)

    An empty sequence weighs nothing; if all are empty, all weights are 0.
    """
    tokens = mask.astype(jnp.float32)
    if loss_type == "grpo":
        return tokens / (jnp.maximum(tokens.sum(1, keepdims=True), 1.0) * mask.shape[0])
    if loss_type == "bnpo":
        return tokens / jnp.maximum(tokens.sum(), 1.0)
    return tokens / mask.size


def k3(logprobs: Float[Array, ...], reference_logprobs: Float[Array, ...]) -> Float[Array, ...]:
    """Schulman's k3 estimate of KL(policy ‖ reference) from tokens of the policy: never negative, low variance."""
    log_ratio = reference_logprobs - logprobs
    return jnp.exp(log_ratio) - 1.0 - log_ratio


def policy_loss(inputs: LossInputs, config: LossConfig) -> tuple[Float[Array, ""], LossTerms]:
    """Clipped surrogate (arXiv:1707.06347 eq. 7) plus beta times the k3 KL to the reference.

    Raises:
      ValueError: if beta is positive and there are no reference log-probabilities.
    """
    advantages = inputs.advantages[:, None]
    low, high = config.bounds
    # Outside the response the log-probabilities mean nothing and may be anything. They are replaced before any
    # arithmetic: a `where` after an exp that overflows would still give NaN gradients.
    inside = inputs.weights > 0
    logprobs = jnp.where(inside, inputs.logprobs, 0.0)
    ratio = jnp.exp(logprobs - jnp.where(inside, inputs.old_logprobs, 0.0))
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
    kl = jnp.zeros_like(ratio)
    if config.beta:
        if inputs.reference_logprobs is None:
            raise ValueError(f"expected reference log-probabilities, because beta is {config.beta}; got None")
        kl = k3(logprobs, jnp.where(inside, inputs.reference_logprobs, 0.0))
    loss = jnp.sum(inputs.weights * (config.beta * kl - surrogate))
    clipped_low = inside & (ratio < low) & (advantages < 0)
    clipped_high = inside & (ratio > high) & (advantages > 0)
    return loss, jax.lax.stop_gradient(LossTerms(ratio, kl, clipped_low, clipped_high))
