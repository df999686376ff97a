"""The policy loss of sampled evictions, which are actions like tokens, with the advantage of the response."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.ratios import bounded_exp
from smd_jax.shapes import check_shape

EPSILON = 0.2  # of the clipping, that of PPO and of `Clip` for tokens


def eviction_weights(
    counted: Bool[Array, "batch compressions"], mask: Bool[Array, "batch R"]
) -> Float[Array, "batch compressions"]:
    """Each draw has the weight of a token in a mean over the minibatch's tokens. So with the default token weighting
    and a coefficient of 1, the sum of both losses has the gradient of one policy over tokens and evictions.

    Args:
      counted: draws with a later token in their row.
      mask: counted response tokens; draws of a row without any get weight 0.
    """
    learns = counted & mask.any(axis=1, keepdims=True)
    return learns.astype(jnp.float32) / jnp.maximum(mask.sum(), 1).astype(jnp.float32)


def eviction_loss(
    logprobs: Float[Array, "batch layers kv_heads compressions"],
    sampler_logprobs: Float[Array, "batch layers kv_heads compressions"],
    advantages: Float[Array, " batch"],
    weights: Float[Array, "batch compressions"],
) -> Float[Array, ""]:
    """-sum of weight * min(r A, clip(r, 1 - EPSILON, 1 + EPSILON) A), with the ratio r of the draws of one compression,
    layer and KV head. At the sampler's parameters r is 1, and the gradient is REINFORCE's.

    Args:
      advantages: of the responses.
      weights: of the draws; where 0, the other arrays may hold any value.
    """
    check_shape("advantages", advantages, logprobs.shape[:1])
    inside = (weights > 0)[:, None, None]
    # Masked before any arithmetic: a NaN times a weight of 0 is NaN.
    log_ratio = jnp.where(inside, logprobs, 0.0) - jax.lax.stop_gradient(jnp.where(inside, sampler_logprobs, 0.0))
    ratio = bounded_exp(log_ratio)  # a product over up to `buffer` draws
    gain = jnp.where(inside, advantages[:, None, None, None], 0.0)
    surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON) * gain)
    return -jnp.sum(weights[:, None, None] * surrogate)
