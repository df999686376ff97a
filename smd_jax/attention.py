"""`attend`: one entry to masked attention, whichever implementation does it.

Shapes and the convention for queries that see nothing are those of `smd_kernels.reference`.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.masks import LayerMask, to_visible
from smd_kernels import reference

Implementation = Literal["reference", "xla"]


def attend(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    mask: LayerMask,
    impl: Implementation | None = None,
) -> Float[Array, "batch heads queries head_dim"]:
    """Attention under one layer's mask.

    Args:
      mask: booleans `[batch, kv_heads, queries, keys]`, or a KeyInterval over as many keys as queries.
      impl: "reference" computes in float32 throughout; "xla" multiplies matrices in the dtype of the inputs and keeps
        scores and softmax in float32. None takes "xla", which for float32 inputs is the same arithmetic.

    Raises:
      ValueError: for an implementation that does not exist.
    """
    visible = to_visible(mask)
    if impl == "reference":
        return reference.attention(q, k, v, visible)
    if impl in (None, "xla"):
        return attend_and_observe(q, k, v, visible)[0]
    raise ValueError(f"expected impl to be None, 'reference' or 'xla'; got {impl!r}")


def attend_and_observe(
    q: Float[Array, "batch heads queries head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys head_dim"],
    visible: Bool[Array, "#batch #kv_heads queries keys"],
) -> tuple[Float[Array, "batch heads queries head_dim"], Float[Array, "batch kv_heads keys"]]:
    """Attention, and the attention that each key received, summed over queries and the query heads of its group."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, head_dim)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", grouped, k, preferred_element_type=wide) * head_dim**-0.5
    weights = reference.masked_softmax(scores, jnp.broadcast_to(visible[:, :, None], scores.shape))
    out = jnp.einsum("bhgts,bhsd->bhgtd", weights.astype(v.dtype), v, preferred_element_type=wide)
    return out.reshape(q.shape).astype(q.dtype), weights.sum((2, 3))
