"""Attention with an explicit boolean mask, plain and in float32 (or wider): the definition of truth for every kernel.

Shapes, here and in every implementation: queries `[batch, heads, queries, head_dim]`, keys and values
`[batch, kv_heads, keys, head_dim]`, mask `[batch, kv_heads, queries, keys]`; `heads` is a multiple of `kv_heads`, and
query heads `g * h … g * (h + 1) - 1` share KV head `h`. A query that sees no key returns zeros and has zero gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """The precision of products of numbers of this type: float32 means float32. By default, accelerators would multiply
    it as TensorFloat-32 or bfloat16, in another order here than there; narrower types are multiplied as they are."""
    return jax.lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None


def masked_softmax(scores: Float[Array, ...], mask: Bool[Array, ...]) -> Float[Array, ...]:
    """Softmax over the last axis where `mask` is true; zeros, with zero gradients, in a row without any."""
    # exp(-inf) is 0, and so is its gradient: no second mask is needed.
    masked = jnp.where(mask, scores, -jnp.inf)
    # The maximum cancels out of the weights, so it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.max(masked, axis=-1, keepdims=True))
    # A row without any has -inf as its maximum, and -inf - -inf would be NaN.
    weights = jnp.exp(masked - jnp.maximum(highest, jnp.finfo(highest.dtype).min))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def interval_mask(evicted_at: Int[Array, "batch kv_heads tokens"]) -> Bool[Array, "batch kv_heads tokens tokens"]:
    """Query t sees key s iff `s <= t < evicted_at[s]`, as an explicit mask of queries by keys."""
    key = jnp.arange(evicted_at.shape[-1])[None, None, None, :]
    query = key.swapaxes(-1, -2)
    return (key <= query) & (query < evicted_at[..., None, :])


def attention_weights(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch #kv_heads queries keys"],
) -> Float[Array, "batch kv_heads group queries keys"]:
    """softmax(q k^T / sqrt(head_dim)) under the mask, in float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, head_dim).astype(wide)
    precision = product_precision(wide)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", grouped, k.astype(wide), precision=precision) * head_dim**-0.5
    return masked_softmax(scores, jnp.broadcast_to(mask[:, :, None], scores.shape))


def attention(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch #kv_heads queries keys"],
) -> Float[Array, "batch heads queries head_dim"]:
    """Masked attention; computed in float32 or wider, returned in the dtype of `q`."""
    weights = attention_weights(q, k, mask)
    precision = product_precision(weights.dtype)
    out = jnp.einsum("bhgts,bhsd->bhgtd", weights, v.astype(weights.dtype), precision=precision)
    return out.reshape(q.shape).astype(q.dtype)


def decode_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """One query per row against a slotted cache, and the weights each slot received, summed over its query heads.

    A row and KV head without valid slots gives zeros in both. The sums are float32 or wider.
    """
    mask = valid[:, :, None]
    return attention(q, k, v, mask), attention_weights(q, k, mask).sum((2, 3))
