"""Entropy in the loss: a bonus for policies that stay undecided, and a policy loss of undecided tokens alone.

loss = policy loss of the tokens whose entropy is in the top quantile  -  entropy_coef * their mean entropy
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.ratios import lower_percentile
from smd_jax.shapes import check_shape


def high_entropy_tokens(
    entropy: Float[Array, "batch R"], mask: Bool[Array, "batch R"], quantile: float
) -> Bool[Array, "batch R"]:
    """The tokens of the mask whose entropy is at least that of the `1 - quantile` quantile of all of them: TRL's
    top_entropy_quantile (arXiv:2506.01939, where 0.2 of the tokens carry the learning).

    Args:
      entropy: of the distribution that each token was drawn from, nats; outside the mask it may be anything.
      mask: tokens of a whole minibatch. From a microbatch, the threshold would depend on its size.
      quantile: share of the tokens to keep, from 0 (those with the highest entropy alone) to 1 (all).

    Raises:
      ValueError: if the arrays are not both `[batch, R]`, or the quantile is not between 0 and 1.
    """
    check_quantile(quantile)
    check_shape("mask", mask, ("batch", "R"))
    check_shape("entropy", entropy, mask.shape)
    # Linear between neighbours, like torch.quantile and numpy's.
    threshold = lower_percentile(entropy, mask, 100.0 * (1.0 - quantile))
    return mask & (entropy >= threshold)


def check_quantile(quantile: float) -> None:
    """Raises ValueError for a share that is none."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"expected 0 <= top_entropy_quantile <= 1; got {quantile}")


def weighted_entropy(entropy: Float[Array, "batch R"], weights: Float[Array, "batch R"]) -> Float[Array, ""]:
    """`sum(weights * entropy)`, with a gradient through the entropies; where a token weighs 0 they may be anything."""
    check_shape("weights", weights, ("batch", "R"))
    check_shape("entropy", entropy, weights.shape)
    return jnp.sum(weights * jnp.where(weights > 0, entropy, 0.0))
