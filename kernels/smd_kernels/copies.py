"""Keys that later queries see as a copy: rounded, say, once they are no longer the newest.

    query t sees key s itself      iff  s <= t < min(evicted_at[s], end[s])
                 its copy          iff  end[s] <= t < evicted_at[s]             end[s]: first column after s's segment

A copy has no gradient of its own. It stands for its key, and what its gradient would be is added to the key's: the
straight-through estimator (arXiv 1308.3432), which suits rounding.
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
      k, v: in the shape and dtype of the keys and values.
      first: column where the first segment begins; what is before is a segment too. Static.
      length: columns of every other segment. Static.
    """

    k: Float[Array, "*lead tokens head_dim"]
    v: Float[Array, "*lead tokens head_dim"]
    first: int
    length: int

    def ends(self, tokens: int) -> Int[np.ndarray, " {tokens}"]:
        """For each column, the first one after its segment."""
        column = np.arange(tokens, dtype=np.int32)
        ends = self.first + ((column - self.first) // self.length + 1) * self.length
        return np.where(column < self.first, self.first, ends).astype(np.int32)


def straight_through(x: Array, copy: Array) -> Any:
    """The copy, with the gradient of `x`."""
    # The bracket is exactly 0, and has the gradient of `x`.
    return jax.lax.stop_gradient(copy) + (x - jax.lax.stop_gradient(x))


def beside(
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    visible: Bool[Array, "#batch #kv_heads tokens tokens"],
    copies: Copies,
) -> tuple[Any, Any, Any]:
    """Twice as many keys, values and booleans: all as they are, then all copies."""
    tokens = k.shape[2]
    # Key and copy share the visibility of the key, and each query sees one of them, never both.
    later = jnp.asarray(np.arange(tokens)[:, None] >= copies.ends(tokens))[None, None]
    k, v = (jnp.concatenate([x, straight_through(x, y)], axis=2) for x, y in ((k, copies.k), (v, copies.v)))
    return k, v, jnp.concatenate([visible & ~later, visible & later], axis=3)


def blocks_beside(blocks: Blocks, copies: Copies) -> Blocks:
    """Blocks of whole sequences with twice as many keys; copies `[blocks, tokens, head_dim]`."""
    ends = jnp.broadcast_to(copies.ends(blocks.k.shape[1])[None], blocks.evicted_at.shape)
    k, v = (straight_through(x, y) for x, y in ((blocks.k, copies.k), (blocks.v, copies.v)))
    # The key is seen up to the end of its segment, its copy from there on. Where the key is evicted within its segment,
    # the copy's interval is empty.
    return blocks._replace(
        k=jnp.concatenate([blocks.k, k], axis=1),
        v=jnp.concatenate([blocks.v, v], axis=1),
        born=jnp.concatenate([blocks.born, ends], axis=1),
        evicted_at=jnp.concatenate([jnp.minimum(blocks.evicted_at, ends), blocks.evicted_at], axis=1),
    )
