"""Keys of which later queries see a copy, for example a quantised one.

    query t sees key s          iff  s <= t < min(evicted_at[s], end[s])
                 its copy       iff  end[s] <= t < evicted_at[s]             end[s]: first column after s's segment

The gradient of a copy is added to that of its key: the straight-through estimator (arXiv 1308.3432).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smd_kernels.blocks import Blocks
from smd_kernels.pytrees import any_leaves


@any_leaves
@partial(jax.tree_util.register_dataclass, data_fields=("k", "v"), meta_fields=("first", "length"))
@dataclass(frozen=True)
class Copies:
    """Copies of all keys and values.

    Attributes:
      k, v: shape and dtype of the keys and values.
      first: column where the first segment begins; the columns before it count as one segment. Static.
      length: columns per segment. Static.
    """

    k: Float[Array, "*lead tokens head_dim"]
    v: Float[Array, "*lead tokens head_dim"]
    first: int
    length: int

    def ends(self, tokens: int) -> Int[np.ndarray, " {tokens}"]:
        """First column after the segment of each column."""
        column = np.arange(tokens, dtype=np.int32)
        ends = self.first + ((column - self.first) // self.length + 1) * self.length
        return np.where(column < self.first, self.first, ends).astype(np.int32)


def straight_through(x: Array, copy: Array) -> Any:
    """Returns the value of `copy` with the gradient of `x`."""
    # The bracket is exactly 0 and has the gradient of `x`.
    return jax.lax.stop_gradient(copy) + (x - jax.lax.stop_gradient(x))


def append_copies(
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    visible: Bool[Array, "#batch #kv_heads tokens tokens"],
    copies: Copies,
) -> tuple[Any, Any, Any]:
    """Appends the copies to the keys and values, and their columns to a boolean mask.

    Returns:
      k and v `[batch, kv_heads, 2 * tokens, head_dim]` and the mask `[batch, kv_heads, tokens, 2 * tokens]`: all keys,
      then all copies.
    """
    tokens = k.shape[2]
    # A query that sees the key sees either the key or its copy, never both.
    later = jnp.asarray(np.arange(tokens)[:, None] >= copies.ends(tokens))[None, None]
    k, v = (jnp.concatenate([x, straight_through(x, y)], axis=2) for x, y in ((k, copies.k), (v, copies.v)))
    return k, v, jnp.concatenate([visible & ~later, visible & later], axis=3)


def append_copies_to_blocks(blocks: Blocks, copies: Copies) -> Blocks:
    """Appends copies `[blocks, tokens, head_dim]` to the keys of blocks that hold whole sequences."""
    ends = jnp.broadcast_to(copies.ends(blocks.k.shape[1])[None], blocks.evicted_at.shape)
    k, v = (straight_through(x, y) for x, y in ((blocks.k, copies.k), (blocks.v, copies.v)))
    # The key is visible up to the end of its segment, its copy from there on. A key that is evicted within its segment
    # has a copy with an empty interval.
    return blocks._replace(
        k=jnp.concatenate([blocks.k, k], axis=1),
        v=jnp.concatenate([blocks.v, v], axis=1),
        born=jnp.concatenate([blocks.born, ends], axis=1),
        evicted_at=jnp.concatenate([jnp.minimum(blocks.evicted_at, ends), blocks.evicted_at], axis=1),
    )
