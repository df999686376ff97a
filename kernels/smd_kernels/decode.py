"""Decode attention: one query per row attends to the slots of a cache; returns the attention each slot received.

    slots    [ . . 3 7 . 9 | 10 11 . ]     any slot may be empty; `valid` marks those that hold a key
    weights    0 0 w w 0 w    w  w 0       softmax over the valid slots, for each query head
    received   0 0 r r 0 r    r  r 0       weights summed over the query heads that share the KV head

Eviction policies rank keys by `received`. No implementation copies, pads or transposes K and V: a decode step costs as
much as reading the cache once.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_kernels.hardware import NO_CAPS_OR_SINKS, why_not_decode, why_not_mixed
from smd_kernels.reference import masked_softmax, product_precision, soft_capped

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]


def decode_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    impl: Implementation = "xla",
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Attention of one query per row to the valid slots of a cache.

    Args:
      q, k, v: one dtype; `heads` is a multiple of `kv_heads`. Kernels take the dtypes and sizes that
        `smd_kernels.why_not_decode` accepts; "xla" takes any.
      valid: which slots hold a key; in any order.
      impl: "xla" runs anywhere, "mosaic_gpu" on Hopper GPUs, "mosaic_tpu" on TPUs. All multiply matrices in the dtype
        of the inputs and keep scores and softmax in float32. Kernels need at least one row. Static.
      softcap, sinks: as in `reference.attention_weights`; only "xla" supports them.

    Returns:
      The output in the dtype of `q`; and, float32 or wider, each slot's softmax weights summed over the query heads of
      its KV head. A row and KV head without valid slots returns zeros in both.

    Raises:
      ValueError: the implementation is unknown or cannot run these shapes and dtypes; the message gives the reason.
    """
    if impl == "xla":
        return _by_products(q, k, v, valid, softcap, sinks)
    if impl not in ("mosaic_gpu", "mosaic_tpu"):
        raise ValueError(f"expected impl to be 'xla', 'mosaic_gpu' or 'mosaic_tpu'; got {impl!r}")
    if softcap is not None or sinks is not None:
        raise ValueError(f"impl={impl!r} cannot run: {NO_CAPS_OR_SINKS}")
    # Checked before the compiler is imported.
    reason = why_not_mixed(q.dtype, k.dtype, v.dtype)
    reason = reason or why_not_decode(impl, q.dtype, q.shape[3], k.shape[2], q.shape[1] // k.shape[1])
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run: {reason}")
    # Imported here: Pallas' compilers take long to import, and most programs never decode on an accelerator.
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
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Decode attention in plain JAX: two batched products with a softmax between them."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, precision=product_precision(q.dtype), preferred_element_type=wide)
    batch, heads, _, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], head_dim)
    # The keys are the first factor: XLA:CPU would transpose them as the second, which takes longer than the product.
    # Without the barrier it swaps the factors back.
    by_slot = jax.lax.optimization_barrier(product("bhsd,bhgd->bhsg", k, grouped))
    scores = by_slot.swapaxes(2, 3) * head_dim**-0.5
    by_head = None if sinks is None else sinks.astype(wide).reshape(k.shape[1], -1, 1)
    valid = jnp.broadcast_to(valid[:, :, None], scores.shape)
    weights = masked_softmax(soft_capped(scores, softcap), valid, by_head)
    # Only the matrix product takes rounded weights; `received` sums the unrounded ones.
    out = product("bhgs,bhsd->bhgd", weights.astype(v.dtype), v)
    return out.reshape(q.shape).astype(q.dtype), weights.sum(2)
