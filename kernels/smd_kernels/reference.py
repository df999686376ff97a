"""Attention with an explicit boolean mask, plain and in float32 (or wider): the definition of truth for every kernel.

Shapes, here and in every implementation: queries `[batch, heads, queries, head_dim]`, keys and values
`[batch, kv_heads, keys, head_dim]`, mask `[batch, kv_heads, queries, keys]`; `heads` is a multiple of `kv_heads`, and
query heads `g * h … g * (h + 1) - 1` share KV head `h`. A query that sees no key returns zeros and has zero gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_softmax(scores: Float[Array, ...], mask: Bool[Array, ...]) -> Float[Array, ...]:
    """Softmax over the last axis where `mask` is true; zeros, with zero gradients, in a row without any."""
    highest = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    highest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    # The inner `where` keeps masked entries finite: 0 * inf in the backward pass would be NaN.
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - highest, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def attention_weights(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch #kv_heads queries keys"],
) -> Float[Array, "batch kv_heads group queries keys"]:
    """softmax(q k^T / sqrt(head_dim)) under the mask, in float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, head_dim).astype(wide)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", grouped, k.astype(wide)) * head_dim**-0.5
    return masked_softmax(scores, jnp.broadcast_to(mask[:, :, None], scores.shape))


def attention(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch #kv_heads queries keys"],
) -> Float[Array, "batch heads queries head_dim"]:
    """Masked attention; computed in float32 or wider, returned in the dtype of `q`."""
    weights = attention_weights(q, k, mask)
    out = jnp.einsum("bhgts,bhsd->bhgtd", weights, v.astype(weights.dtype))
    return out.reshape(q.shape).astype(q.dtype)
