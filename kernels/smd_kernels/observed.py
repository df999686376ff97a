"""Masked attention in plain JAX and the attention each key received, by which eviction policies rank keys."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_kernels.reference import by_group, masked_softmax, product_precision, soft_capped


def attend_and_observe(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    visible: Bool[Array, "#batch #kv_heads queries keys"],
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch heads queries head_dim"], Float[Array, "batch kv_heads keys"]]:
    """Masked attention, and the attention weights that each key received.

    Multiplies matrices in the dtype of the inputs; scores, softmax and sums are float32 or wider. All scores exist at
    once: memory is O(queries * keys).

    Args:
      visible: which query sees which key; a size of 1 is broadcast over rows or KV heads. `heads` is a multiple of
        `kv_heads`.
      softcap, sinks: as in `reference.attention_weights`.

    Returns:
      The output in the dtype of `q`, zeros for a query that sees no key; and, float32 or wider, each key's weights
      summed over the queries and the query heads of its KV head.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, precision=product_precision(q.dtype), preferred_element_type=wide)
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, head_dim)
    scores = product("bhgtd,bhsd->bhgts", grouped, k) * head_dim**-0.5
    visible = jnp.broadcast_to(visible[:, :, None], scores.shape)
    weights = masked_softmax(soft_capped(scores, softcap), visible, by_group(sinks, k.shape[1], wide))
    # Only the matrix product takes rounded weights; `received` sums the unrounded ones.
    out = product("bhgts,bhsd->bhgtd", weights.astype(v.dtype), v)
    return out.reshape(q.shape).astype(q.dtype), weights.sum((2, 3))
