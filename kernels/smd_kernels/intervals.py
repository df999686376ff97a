"""Attention under any interval mask: one integer per key, scores computed tile by tile, eviction at any step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from smd_kernels.blocks import BlockKernel, Blocks, to_int32
from smd_kernels.copies import Copies, append_copies_to_blocks
from smd_kernels.sinks import add_sinks, sink_gradient


def interval_attention(
    q: Float[Array, "batch heads tokens head_dim"],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    evicted_at: Integer[Array | np.ndarray, "batch kv_heads tokens"],
    kernel: BlockKernel,
    copies: Copies | None = None,
    sinks: Float[Array, "batch heads"] | None = None,
) -> Float[Array, "batch heads tokens head_dim"]:
    """Attention in which query t sees key s iff `s <= t < evicted_at[s]`, with its own backward pass.

    Tiles without a visible pair are skipped. Memory is O(tokens); on a GPU also an int32 for every tile of scores.

    Args:
      q, k, v: one dtype; `heads` is a multiple of `kv_heads`.
      evicted_at: first column that no longer sees each key; 0 for padding. Of any integer dtype.
      kernel: computes the attention of blocks, for example `XlaKernel()`. Static.
      copies: copies that later segments see instead of the keys; None if they see the keys.
      sinks: a score of each row and head that takes part in its softmax, and whose weight is dropped.

    Returns:
      The output in the dtype of `q`; zeros, with zero gradients, for a query that sees no key.

    Raises:
      ValueError: the kernel cannot run this dtype, head_dim or length.
    """
    if not q.size:
        return jnp.zeros_like(q)  # an empty batch: kernels do not accept zero blocks
    rows = fold(q, k.shape[1])
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (k, v, jnp.asarray(to_int32(evicted_at)), copies))
    blocks = whole_sequences(rows, *flat[:3])
    if flat[3] is not None:
        blocks = append_copies_to_blocks(blocks, flat[3])
    if sinks is not None:
        by_block = sinks.reshape(-1, rows.shape[2]).astype(jnp.promote_types(q.dtype, jnp.float32))
        sinks = jnp.tile(by_block, (1, rows.shape[1]))  # of every row, in the order of `whole_sequences`
    out: Array = block_attention(kernel, blocks, sinks)
    return unfold(out.reshape(rows.shape), k.shape[1])


def whole_sequences(
    rows: Float[Array, "blocks tokens group head_dim"],
    k: Float[Array, "blocks tokens head_dim"],
    v: Float[Array, "blocks tokens head_dim"],
    evicted_at: Int[Array, "blocks tokens"],
) -> Blocks:
    """Builds one block per batch row and KV head, in which every token is a query and a key."""
    count, tokens, group, head_dim = rows.shape
    columns = jnp.arange(tokens, dtype=jnp.int32)[None]
    # The query heads of a group share a column. Rows are in column order, so that kernels can skip tiles.
    column = jnp.broadcast_to(jnp.repeat(columns, group, axis=1), (count, tokens * group))
    q = rows.reshape(count, tokens * group, head_dim)
    return Blocks(q, k, v, column, jnp.broadcast_to(columns, evicted_at.shape), evicted_at)


def fold(q: Float[Array, "batch heads tokens head_dim"], kv_heads: int) -> Float[Array, "blocks tokens group head_dim"]:
    """Moves the query heads of each KV head into its block, in column order."""
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
def block_attention(
    kernel: BlockKernel, blocks: Blocks, sinks: Float[Array, "blocks rows"] | None
) -> Float[Array, "blocks rows head_dim"]:
    """Output of `kernel.forward`, differentiated by `kernel.backward`."""
    return _forward(kernel, blocks, sinks)[0]


def _forward(kernel: BlockKernel, blocks: Blocks, sinks: Array | None) -> tuple[Array, tuple[Any, ...]]:
    out, lse = kernel.forward(blocks)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out, (blocks, sinks, out, lse)


def _backward(kernel: BlockKernel, saved: tuple[Any, ...], d_out: Array) -> tuple[Blocks, Array | None]:
    blocks, sinks, out, lse = saved
    dq, dk, dv = kernel.backward(blocks, out, lse, d_out)
    integers = (no_gradient(x) for x in (blocks.column, blocks.born, blocks.evicted_at))
    # Kernels return dk and dv in float32 or wider; a gradient has the dtype of its input.
    d_blocks = Blocks(dq, dk.astype(blocks.k.dtype), dv.astype(blocks.v.dtype), *integers)
    return d_blocks, None if sinks is None else sink_gradient(sinks, out, lse, d_out)


block_attention.defvjp(_forward, _backward)


def no_gradient(x: Array) -> Any:
    """Zero gradient of an integer array, in the dtype that JAX expects."""
    return np.zeros(x.shape, jax.dtypes.float0)
