"""The policy loss of evictions: what is forgotten is an action like a token, and the response's reward judges both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.shapes import check_shape

EPSILON = 0.2  # of the clipping, that of PPO and of `Clip` for tokens


def eviction_weights(
    counted: Bool[Array, "batch compressions"], mask: Bool[Array, "batch R"]
) -> Float[Array, "batch compressions"]:
    """Each draw weighs as much as a token does in a mean over the minibatch's tokens: so, with the default weighting of
    tokens and a coefficient of 1, the two losses together have the gradient of one policy over tokens and evictions.

    Args:
      counted: draws that something came after. mask: response tokens that count; a row without any teaches nothing.
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
    layer and KV head. At the sampler's parameters r is 1, and the gradient that of REINFORCE, A times that of log p.

    Args:
      advantages: of the responses.
      weights: of the draws; where 0, the other arrays may hold anything.
    """
    check_shape("advantages", advantages, logprobs.shape[:1])
    inside = (weights > 0)[:, None, None]
    # Replaced before any arithmetic: a NaN times a weight of 0 would still be NaN, and so would its gradient.
    log_ratio = jnp.where(inside, logprobs, 0.0) - jax.lax.stop_gradient(jnp.where(inside, sampler_logprobs, 0.0))
    ratio = jnp.exp(log_ratio)
    gain = jnp.where(inside, advantages[:, None, None, None], 0.0)
    surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON) * gain)
    return -jnp.sum(weights[:, None, None] * surrogate)
