"""Logits of a block of columns at a time: no array is as long as the response and as wide as the vocabulary.

    hidden states   [rows, R, hidden]       ████|████|████|██░░    cut along R, the last block padded
    logits          [rows, block, vocab]    ████                   of one block, made again in the backward pass
    results         [rows, R]               ▁▁▁▁|▁▁▁▁|▁▁▁▁|▁▁

A row of 16,384 tokens over 151,936 tokens of vocabulary has 9.3 GiB of logits, and a backward pass holds several arrays
of that size. Blocks add no products.

Where columns are on several devices, a block has equally many of each, so that all devices work on every block:

    two devices     0 1 2 3 | 4 5 6 7      blocks of four     0 1 4 5 | 2 3 6 7
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smd_jax.devices.sharding import constrain_blocks, gathered_tree, parts
from smd_jax.model.protocol import ModelShape, Params

# Bytes of one block's logits on one device: enough rows for products at full rate (a GPU wants some hundreds for each
# time that it reads the head), and little compared with a model's weights.
LOGIT_BYTES = 2**28


def columns_at_once(shape: ModelShape, rows: int, columns: int) -> int:
    """Columns of a block, for `rows` of a batch on all devices of the mesh in `jax.set_mesh` together."""
    of = parts()
    itemsize = jnp.promote_types(shape.dtype, jnp.float32).itemsize
    token = -(-shape.vocab_size // of.vocabulary) * itemsize
    return of.columns * block_columns(-(-rows // of.rows), -(-columns // of.columns), token)


def block_columns(rows: int, columns: int, bytes_of_a_token: int) -> int:
    """Columns of a block: as many as have logits of at most `LOGIT_BYTES` on a device, at least one, and no more than
    there are. Blocks are as equal as they can be."""
    most = max(LOGIT_BYTES // (rows * bytes_of_a_token), 1)
    count = -(-columns // most)
    return -(-columns // count)


def over_columns(
    f: Callable[..., Any], params: Params, size: int, columns: Int[Array, " columns"], *arrays: Any
) -> Any:
    """`f(params, columns, *arrays)` of blocks of `size` columns, its results side by side. What `f` held of a block is
    not kept for the backward pass, but made again.

    Args:
      f: of a block: its columns' numbers `[size]`, and `[rows, size, ...]` of each array; gives a pytree of
        `[rows, size, ...]`.
      size: columns of a block on all devices together: a multiple of those that share columns.
      params: what `f` is differentiated by besides the arrays. Their gradients are summed over the blocks in float32 or
        wider.
      columns: what to call the columns of the arrays.
      arrays: pytrees of `[rows, columns, ...]`.
    """
    total = columns.shape[0]
    f = jax.checkpoint(f)
    ways = parts().columns
    # Columns that are apart are cut also where one block holds them: padded, they divide over the devices.
    if size >= total and ways == 1:
        return f(params, columns, *arrays)
    count = -(-total // size)
    missing = count * size - total
    each = size // ways

    def cut(x: Array) -> Array:
        """`[rows, columns, ...]` to `[count, rows, size, ...]`. Padding repeats the last column, whose values are
        ordinary; its results are cut off. Zeros could mean a division by zero."""
        padded = jnp.concatenate([x, jnp.repeat(x[:, -1:], missing, axis=1)], axis=1) if missing else x
        blocks = jnp.moveaxis(padded.reshape(x.shape[0], ways, count, each, *x.shape[2:]), 2, 0)
        return constrain_blocks(blocks.reshape(count, x.shape[0], size, *x.shape[2:]))

    def join(x: Array) -> Array:
        blocks = jnp.moveaxis(x.reshape(count, x.shape[1], ways, each, *x.shape[3:]), 0, 2)
        return blocks.reshape(x.shape[1], count * size, *x.shape[3:])[:, :total]

    if count == 1:
        (block,), *rest = cut(columns[None])[:, 0], *jax.tree.map(cut, arrays)
        return jax.tree.map(lambda x: join(x[None]), f(params, block, *jax.tree.map(lambda x: x[0], rest)))

    # Once for all blocks: within the loop, every block would gather the head from the devices again.
    whole = gathered_tree(jax.tree.map(_wide, params))

    def of_block(block: tuple[Any, ...]) -> Any:
        # Cast back: a head in 16 bits is multiplied in 16 bits, and only its gradient is summed in 32.
        narrow = jax.tree.map(lambda x, like: x.astype(like.dtype), whole, params)
        return f(narrow, *block)

    results = jax.lax.map(of_block, (cut(columns[None])[:, 0], *jax.tree.map(cut, arrays)))
    return jax.tree.map(join, results)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x
