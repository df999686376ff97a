"""How far the policy is from a reference, token by token: a term of the loss, or a part of the reward.

    in the loss       loss += beta * estimate(log p, log p_ref)            pulls at every token's own probability
    in the reward     reward -= beta * (log p_old - log p_ref)             pulls through the advantages, as any reward

Both are estimated from the tokens that were drawn. In the loss a token answers for its own divergence alone; in the
reward also for that of the tokens after it, whose prefixes it changed, as the KL of whole responses has it.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.losses.distillation import sampled_divergence
from smd_jax.ratios import SAFETY_BOUND, log_ratio_inside
from smd_jax.shapes import check_shape

KLEstimator = Literal["k1", "k2", "k3"]


def reference_kl(
    logprobs: Float[Array, "batch R"], reference_logprobs: Float[Array, "batch R"], estimator: KLEstimator
) -> Float[Array, "batch R"]:
    """KL(policy ‖ reference) of every token, estimated from the token drawn; r = log p - log p_ref, in nats.

        estimator  value                  slope (gradient by log p)   on average the gradient of
        k1         r                      r                           KL(policy ‖ reference)
        k2         r² / 2                 r                           KL(policy ‖ reference)
        k3         exp(-r) - 1 + r        1 - exp(-r)                 KL(reference ‖ policy)

    The slope of k1 is not that of its value, 1, which is 0 on average and would be noise and no pull: it is k2's, as
    verl's "k1+" has it. k3 is GRPO's (arXiv:2402.03300 eq. 4) and TRL's; arXiv:2506.09477 shows what its gradient is.
    Of k1 and k2, r is cut at -20 and 20 before anything else; of k3, -r at 20.
    """
    if estimator == "k3":
        return k3(logprobs, reference_logprobs)
    return sampled_divergence(reference_logprobs, logprobs, "reverse", estimator)


def k3(logprobs: Float[Array, ...], reference_logprobs: Float[Array, ...]) -> Float[Array, ...]:
    """Schulman's k3 estimate of KL(policy ‖ reference) from tokens of the policy: never negative, low variance.

    The log ratio is cut at 20 (as in verl), where the estimate is 485 million: no gradient beyond, but no overflow.
    """
    # Cut from above alone: far below 0 the exponential vanishes, and what remains is linear.
    log_ratio = jnp.minimum(reference_logprobs - logprobs, SAFETY_BOUND)
    return jnp.exp(log_ratio) - 1.0 - log_ratio


def kl_penalty(
    logprobs: Float[Array, "batch R"],
    reference_logprobs: Float[Array, "batch R"],
    mask: Bool[Array, "batch R"],
    beta: float,
) -> Float[Array, "batch R"]:
    """What the KL takes off the reward of every token: `beta * (log p - log p_ref)`, 0 outside the mask.

    This is k1: of the three its expectation alone has the policy gradient of the KL. Where advantages belong to
    responses, the sum over a response is taken off its reward, before its group's mean is (TRL's RLOOTrainer; verl's
    use_kl_in_reward). PPO takes it off token by token, so that GAE sees where the policy left the reference.

    Args:
      logprobs: of the policy at the rollout's parameters, in nats.
    """
    check_shape("mask", mask, ("batch", "R"))
    check_shape("logprobs", logprobs, mask.shape)
    check_shape("reference_logprobs", reference_logprobs, mask.shape)
    return beta * log_ratio_inside(logprobs, reference_logprobs, mask)
