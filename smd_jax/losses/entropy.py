"""Entropy in the loss: an entropy bonus, and a policy loss on high-entropy tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.ratios import lower_percentile
from smd_jax.shapes import check_shape


def high_entropy_tokens(
    entropy: Float[Array, "batch R"], mask: Bool[Array, "batch R"], quantile: float
) -> Bool[Array, "batch R"]:
    """The tokens of the mask with at least the entropy of the `1 - quantile` quantile: TRL's top_entropy_quantile
    (arXiv:2506.01939, which trains on 0.2 of the tokens).

    Args:
      entropy: of the distribution of each token, nats; outside the mask it may hold any value.
      mask: tokens of a whole minibatch. In a microbatch the threshold would depend on its size.
      quantile: share of the tokens to keep, from 0 (only those with the highest entropy) to 1 (all).

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
    """Raises ValueError unless the quantile is between 0 and 1."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"expected 0 <= top_entropy_quantile <= 1; got {quantile}")


def weighted_entropy(entropy: Float[Array, "batch R"], weights: Float[Array, "batch R"]) -> Float[Array, ""]:
    """`sum(weights * entropy)`, differentiable in the entropies, which may hold any value where the weight is 0."""
    check_shape("weights", weights, ("batch", "R"))
    check_shape("entropy", entropy, weights.shape)
    return jnp.sum(weights * jnp.where(weights > 0, entropy, 0.0))
