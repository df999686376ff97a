"""Attention with all scores at once, in plain JAX, and what each key received of it, by which policies rank keys."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_kernels.reference import masked_softmax, product_precision


def attend_and_observe(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    visible: Bool[Array, "#batch #kv_heads queries keys"],
) -> tuple[Float[Array, "batch heads queries head_dim"], Float[Array, "batch kv_heads keys"]]:
    """Attention, and the attention that each key received, summed over queries and the query heads of its group.

    Matrices are multiplied in the dtype of the inputs; scores, softmax and sums are float32 or wider.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, precision=product_precision(q.dtype), preferred_element_type=wide)
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, head_dim)
    scores = product("bhgtd,bhsd->bhgts", grouped, k) * head_dim**-0.5
    weights = masked_softmax(scores, jnp.broadcast_to(visible[:, :, None], scores.shape))
    # Weights are rounded for the matrix product alone: what keys received is summed from unrounded ones.
    out = product("bhgts,bhsd->bhgtd", weights.astype(v.dtype), v)
    return out.reshape(q.shape).astype(q.dtype), weights.sum((2, 3))
