"""Attention under an interval mask of any kind: one integer per key, scores made tile by tile, eviction at any step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_kernels.blocks import BlockKernel, Blocks
from smd_kernels.copies import Copies, blocks_beside


def interval_attention(
    q: Float[Array, "batch heads tokens head_dim"],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    evicted_at: Int[Array, "batch kv_heads tokens"],
    kernel: BlockKernel,
    copies: Copies | None = None,
) -> Float[Array, "batch heads tokens head_dim"]:
    """Attention in which query t sees key s iff `s <= t < evicted_at[s]`; memory O(tokens), no tile of zeros computed.

    Args:
      evicted_at: int32; 0 for padding. kernel: does the arithmetic; static.
      copies: what later segments see of the keys, see `smd_kernels.copies`; None: the keys themselves.

    Returns:
      In the dtype of `q`; zeros, with zero gradients, for a query that sees no key.
    """
    rows = fold(q, k.shape[1])
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (k, v, evicted_at.astype(jnp.int32), copies))
    blocks = whole_sequences(rows, *flat[:3])
    if flat[3] is not None:
        blocks = blocks_beside(blocks, flat[3])
    out: Array = block_attention(kernel, blocks)
    return unfold(out.reshape(rows.shape), k.shape[1])


def whole_sequences(
    rows: Float[Array, "blocks tokens group head_dim"],
    k: Float[Array, "blocks tokens head_dim"],
    v: Float[Array, "blocks tokens head_dim"],
    evicted_at: Int[Array, "blocks tokens"],
) -> Blocks:
    """Blocks of all tokens from column 0 on, each a query and a key."""
    count, tokens, group, head_dim = rows.shape
    columns = jnp.arange(tokens, dtype=jnp.int32)[None]
    # All queries of a group stand in the same column; token by token, so that rows are in column order and kernels can
    # skip tiles.
    column = jnp.broadcast_to(jnp.repeat(columns, group, axis=1), (count, tokens * group))
    q = rows.reshape(count, tokens * group, head_dim)
    return Blocks(q, k, v, column, jnp.broadcast_to(columns, evicted_at.shape), evicted_at)


def fold(q: Float[Array, "batch heads tokens head_dim"], kv_heads: int) -> Float[Array, "blocks tokens group head_dim"]:
    """The queries of a group side by side, in column order: rows of their KV head's block."""
    batch, heads, tokens, head_dim = q.shape
    grouped = q.reshape(batch * kv_heads, heads // kv_heads, tokens, head_dim)
    return grouped.swapaxes(1, 2)


def unfold(
    rows: Float[Array, "blocks tokens group head_dim"], kv_heads: int
) -> Float[Array, "batch heads tokens head_dim"]:
    """The inverse of `fold`."""
    blocks, tokens, group, head_dim = rows.shape
    return rows.swapaxes(1, 2).reshape(blocks // kv_heads, kv_heads * group, tokens, head_dim)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def block_attention(kernel: BlockKernel, blocks: Blocks) -> Float[Array, "blocks rows head_dim"]:
    """A kernel's forward pass, with its own backward pass."""
    return kernel.forward(blocks)[0]


def _forward(kernel: BlockKernel, blocks: Blocks) -> tuple[Array, tuple[Blocks, Array, Array]]:
    out, lse = kernel.forward(blocks)
    return out, (blocks, out, lse)


def _backward(kernel: BlockKernel, saved: tuple[Blocks, Array, Array], d_out: Array) -> tuple[Blocks]:
    blocks, out, lse = saved
    dq, dk, dv = kernel.backward(blocks, out, lse, d_out)
    integers = (no_gradient(x) for x in (blocks.column, blocks.born, blocks.evicted_at))
    # Kernels sum dk and dv in float32 or wider; a gradient has the dtype of its array.
    return (Blocks(dq, dk.astype(blocks.k.dtype), dv.astype(blocks.v.dtype), *integers),)


block_attention.defvjp(_forward, _backward)


def no_gradient(x: Array) -> Any:
    """What JAX wants for the gradient of integers."""
    return np.zeros(x.shape, jax.dtypes.float0)
