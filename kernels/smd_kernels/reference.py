"""Reference attention: a boolean mask and plain JAX in float32 or wider. Every kernel is tested against it.

Shapes, here and in every implementation: queries `[batch, heads, queries, head_dim]`, keys and values
`[batch, kv_heads, keys, head_dim]`, mask `[batch, kv_heads, queries, keys]`. `heads` is a multiple of `kv_heads`; query
heads `g * h … g * (h + 1) - 1` share KV head `h`. A query that sees no key returns zeros and has zero gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from smd_kernels.blocks import to_int32


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """Matrix product precision for inputs of this dtype: full float32 for float32 or wider, else the default.

    By default, accelerators multiply float32 as TensorFloat-32 or bfloat16.
    """
    return jax.lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None


def soft_capped(scores: Float[Array, ...], softcap: float | None) -> Float[Array, ...]:
    """Scores squeezed into ±softcap by tanh; None: unchanged."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def masked_softmax(
    scores: Float[Array, ...], mask: Bool[Array, ...], sinks: Float[Array, ...] | None = None
) -> Float[Array, ...]:
    """Softmax over the last axis where `mask` is true; a row without true entries is zero and has zero gradients.

    Args:
      sinks: one more score for each row; broadcasts to `[..., 1]`. It takes its share of the sum and is no entry of the
        result.
    """
    # exp(-inf) and its gradient are 0: no second mask is needed.
    masked = jnp.where(mask, scores, -jnp.inf)
    # The maximum cancels out of the weights, so it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.max(masked, axis=-1, keepdims=True))
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, highest.shape)
        highest = jnp.maximum(highest, jax.lax.stop_gradient(sinks))
    # The maximum of a row without true entries, and with no sink or one of -inf, is -inf, and -inf - -inf is NaN.
    highest = jnp.maximum(highest, jnp.finfo(highest.dtype).min)
    weights = jnp.exp(masked - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    return weights / jnp.where(total > 0, total, 1.0)


def interval_mask(
    evicted_at: Integer[Array | np.ndarray, "batch kv_heads tokens"],
) -> Bool[Array, "batch kv_heads tokens tokens"]:
    """Boolean mask `[…, queries, keys]` of a shadow mask: query t sees key s iff `s <= t < evicted_at[s]`."""
    key = jnp.arange(evicted_at.shape[-1])[None, None, None, :]
    query = key.swapaxes(-1, -2)
    return (key <= query) & (query < to_int32(evicted_at)[..., None, :])


def attention_weights(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch #kv_heads queries keys"],
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch kv_heads group queries keys"]:
    """Masked softmax(q k^T / sqrt(head_dim)), float32 or wider; zeros for a query that sees no key.

    Args:
      softcap: scores are squeezed into ±softcap by tanh before the softmax.
      sinks: a score of each query head that takes part in its softmax, and whose weight is dropped.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, head_dim).astype(wide)
    precision = product_precision(wide)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", grouped, k.astype(wide), precision=precision) * head_dim**-0.5
    mask = jnp.broadcast_to(mask[:, :, None], scores.shape)
    return masked_softmax(soft_capped(scores, softcap), mask, by_group(sinks, k.shape[1], wide))


def by_group(sinks: Float[Array, " heads"] | None, kv_heads: int, dtype: Any) -> Array | None:
    """Sinks `[kv_heads, group, 1, 1]`, as scores `[batch, kv_heads, group, queries, keys]` take them."""
    return None if sinks is None else sinks.astype(dtype).reshape(kv_heads, -1, 1, 1)


def attention(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "#batch #kv_heads queries keys"],
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch heads queries head_dim"]:
    """Masked attention, computed in float32 or wider and returned in the dtype of `q`.

    A query that sees no key returns zeros and has zero gradients. `softcap` and `sinks` as in `attention_weights`.
    """
    weights = attention_weights(q, k, mask, softcap, sinks)
    precision = product_precision(weights.dtype)
    out = jnp.einsum("bhgts,bhsd->bhgtd", weights, v.astype(weights.dtype), precision=precision)
    return out.reshape(q.shape).astype(q.dtype)


def decode_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Attention of one query per row to the valid slots of a cache.

    Returns:
      The output in the dtype of `q`; and, float32 or wider, each slot's weights summed over the query heads of its KV
      head. A row and KV head without valid slots returns zeros in both.
    """
    mask = valid[:, :, None]
    return attention(q, k, v, mask), attention_weights(q, k, mask).sum((2, 3))
