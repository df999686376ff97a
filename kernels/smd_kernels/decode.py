"""Decode attention: one query per row against the slots of a cache, and the attention that each slot received.

    slots    [ . . 3 7 . 9 | 10 11 . ]     any of them may be empty: `valid` says which hold a key
    weights    0 0 w w 0 w    w  w 0       softmax over the valid ones, for each query head
    received   0 0 r r 0 r    r  r 0       weights summed over the query heads that share the KV head

The sums are what eviction policies rank keys by. K and V are read where they lie: no implementation copies, pads or
transposes them, because at this point of a rollout reading the cache once is what a step costs.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_kernels.hardware import why_not_decode
from smd_kernels.reference import masked_softmax, product_precision

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


def decode_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    impl: Implementation = "xla",
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Attention of one query per row over the valid slots, which need not lie together.

    Args:
      impl: "xla" runs anywhere; "mosaic_gpu" on Hopper, "mosaic_tpu" on TPUs. All multiply matrices in the dtype of the
        inputs and keep scores and softmax in float32.

    Returns:
      The output in the dtype of `q`, and in float32 (or wider, for wider inputs) the softmax weights summed over the
      query heads of each group. A row and KV head without valid slots gives zeros in both.

    Raises:
      ValueError: for an implementation that does not exist or cannot run these shapes; it says why.
    """
    if impl == "xla":
        return _by_products(q, k, v, valid)
    if impl not in ("mosaic_gpu", "mosaic_tpu"):
        raise ValueError(f"expected impl to be 'xla', 'mosaic_gpu' or 'mosaic_tpu'; got {impl!r}")
    # Tables answer first, so that a refusal needs no compiler.
    reason = why_not_decode(impl, q.dtype, q.shape[3], k.shape[2], q.shape[1] // k.shape[1])
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run: {reason}")
    # Here, because Pallas' compilers take long to import and most programs never decode on an accelerator.
    if impl == "mosaic_gpu":
        from smd_kernels.decode_gpu import decode_attention as kernel
    else:
        from smd_kernels.decode_tpu import decode_attention as kernel
    return kernel(q, k, v, valid)


def _by_products(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Two batched products with a softmax between them, in plain JAX."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, precision=product_precision(q.dtype), preferred_element_type=wide)
    batch, heads, _, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], head_dim)
    # The keys come first, row by row as they lie. As the second factor of q k^T XLA:CPU would transpose them, which
    # takes longer than the product; and without the barrier it turns the factors round again.
    by_slot = jax.lax.optimization_barrier(product("bhsd,bhgd->bhsg", k, grouped))
    scores = by_slot.swapaxes(2, 3) * head_dim**-0.5
    weights = masked_softmax(scores, jnp.broadcast_to(valid[:, :, None], scores.shape))
    # Weights are rounded for the matrix product alone: what keys received is summed from unrounded ones.
    out = product("bhgs,bhsd->bhgd", weights.astype(v.dtype), v)
    return out.reshape(q.shape).astype(q.dtype), weights.sum(2)
