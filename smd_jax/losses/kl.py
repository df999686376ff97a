"""KL to a reference policy per token, as a term of the loss or a part of the reward.

    in the loss       loss += beta * estimate(log p, log p_ref)            gradient through each token's log p
    in the reward     reward -= beta * (log p_old - log p_ref)             gradient through the advantages

Both are estimated from the sampled tokens. In the loss, a token's gradient covers only its own divergence. In the
reward it also covers that of later tokens, whose prefixes it changed, like the KL of whole responses.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.ratios import SAFETY_BOUND, log_ratio_inside
from smd_jax.shapes import check_shape

KLEstimator = Literal["k1", "k2", "k3"]


def reference_kl(
    logprobs: Float[Array, "batch R"], reference_logprobs: Float[Array, "batch R"], estimator: KLEstimator
) -> Float[Array, "batch R"]:
    """KL(policy ‖ reference) of every token, estimated from the sampled token; r = log p - log p_ref, in nats.

        estimator  value                  slope (gradient by log p)   on average the gradient of
        k1         r                      r                           KL(policy ‖ reference)
        k2         r² / 2                 r                           KL(policy ‖ reference)
        k3         exp(-r) - 1 + r        1 - exp(-r)                 KL(reference ‖ policy)

    The slope of k1 is not that of its value, 1, whose gradient is pure noise, but k2's, as in verl's "k1+". k3 is that
    of GRPO (arXiv:2402.03300 eq. 4); arXiv:2506.09477 derives its gradient. For k1 and k2, r is first cut at
    -20 and 20; for k3, -r is cut at 20.
    """
    if estimator == "k3":
        return k3(logprobs, reference_logprobs)
    log_ratio = jax.lax.stop_gradient(jnp.clip(logprobs - reference_logprobs, -SAFETY_BOUND, SAFETY_BOUND))
    value = log_ratio if estimator == "k1" else log_ratio**2 / 2
    # The last factor is 0 with a gradient of 1: it makes `log_ratio` the gradient, also where the ratio is cut.
    return value + log_ratio * (logprobs - jax.lax.stop_gradient(logprobs))


def k3(logprobs: Float[Array, ...], reference_logprobs: Float[Array, ...]) -> Float[Array, ...]:
    """Schulman's k3 estimate of KL(policy ‖ reference) from tokens of the policy: never negative, low variance.

    The log ratio is cut at 20 (an estimate of 485 million) to avoid overflow, as in verl, which also cuts the estimate
    at 10; there is no gradient beyond.
    """
    # Cut only from above: far below 0 the exponential vanishes and the rest is linear.
    log_ratio = jnp.minimum(reference_logprobs - logprobs, SAFETY_BOUND)
    # Not exp - 1, which rounds away a policy that is close to its reference.
    return jnp.expm1(log_ratio) - log_ratio


def kl_penalty(
    logprobs: Float[Array, "batch R"],
    reference_logprobs: Float[Array, "batch R"],
    mask: Bool[Array, "batch R"],
    beta: float,
) -> Float[Array, "batch R"]:
    """The KL penalty of every token's reward: `beta * (log p - log p_ref)`, 0 outside the mask.

    This is k1, the only one of the three whose expectation has the policy gradient of the KL. With one advantage per
    response, the sum over a response is subtracted from its reward, before the group's mean (TRL's RLOOTrainer; verl's
    use_kl_in_reward). PPO subtracts it per token, so that GAE sees where the policy left the reference.

    Args:
      logprobs: of the policy at the rollout's parameters, in nats.
    """
    check_shape("mask", mask, ("batch", "R"))
    check_shape("logprobs", logprobs, mask.shape)
    check_shape("reference_logprobs", reference_logprobs, mask.shape)
    return beta * log_ratio_inside(logprobs, reference_logprobs, mask)
