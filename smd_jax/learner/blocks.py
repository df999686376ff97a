"""Computes logits in blocks of columns, so that no array has the size response * vocabulary.

    hidden states   [rows, R, hidden]       ████|████|████|██░░    cut along R, the last block padded
    logits          [rows, block, vocab]    ████                   of one block, recomputed in the backward pass
    results         [rows, R]               ▁▁▁▁|▁▁▁▁|▁▁▁▁|▁▁

A row of 16,384 tokens with a vocabulary of 151,936 has 9.3 GiB of logits, and a backward pass holds several arrays of
that size.

If columns are sharded, a block has equally many columns of each device, so that all devices work on every block:

    two devices     0 1 2 3 | 4 5 6 7      blocks of four     0 1 4 5 | 2 3 6 7
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smd_jax.devices.sharding import constrain_blocks, constrain_tree, parts
from smd_jax.learner.storage import widened
from smd_jax.model.protocol import ModelShape, Params

# Bytes of one block's logits per device: enough rows for products at full rate (a GPU needs some hundreds per read of
# the head), and small compared with a model's weights.
LOGIT_BYTES = 2**28


def columns_at_once(shape: ModelShape, rows: int, columns: int) -> int:
    """Columns of a block, for `rows` rows over all devices of the current mesh: at least one per device, with at most
    `LOGIT_BYTES` of logits each. Blocks are nearly equal."""
    of = parts()
    itemsize = jnp.promote_types(shape.dtype, jnp.float32).itemsize
    token = -(-shape.vocab_size // of.vocabulary) * itemsize
    own = -(-columns // of.columns)
    most = max(LOGIT_BYTES // (-(-rows // of.rows) * token), 1)
    count = -(-own // most)
    return of.columns * -(-own // count)


def over_columns(
    f: Callable[..., Any], params: Params, size: int, columns: Int[Array, " columns"], *arrays: Any
) -> Any:
    """Applies `f(params, columns, *arrays)` to blocks of `size` columns and concatenates the results. The backward pass
    recomputes each block.

    Args:
      f: takes a block's column numbers `[size]` and `[rows, size, ...]` of each array; returns a pytree of
        `[rows, size, ...]`.
      size: columns of a block over all devices, a multiple of the devices that share columns.
      params: parameters of `f` to differentiate. Their gradients are summed over blocks in float32 or wider.
      columns: numbers of the arrays' columns.
      arrays: pytrees of `[rows, columns, ...]`.
    """
    total = columns.shape[0]
    f = jax.checkpoint(f)
    ways = parts().columns
    # Sharded columns are cut even into one block: padding makes them divide over the devices.
    if size >= total and ways == 1:
        return f(params, columns, *arrays)
    count = -(-total // size)
    missing = count * size - total
    each = size // ways

    def cut(x: Array) -> Array:
        """`[rows, columns, ...]` to `[count, rows, size, ...]`. Padding repeats the last column, because zeros could
        cause a division by zero; its results are dropped."""
        padded = jnp.concatenate([x, jnp.repeat(x[:, -1:], missing, axis=1)], axis=1) if missing else x
        blocks = jnp.moveaxis(padded.reshape(x.shape[0], ways, count, each, *x.shape[2:]), 2, 0)
        return constrain_blocks(blocks.reshape(count, x.shape[0], size, *x.shape[2:]))

    def join(x: Array) -> Array:
        blocks = jnp.moveaxis(x.reshape(count, x.shape[1], ways, each, *x.shape[3:]), 0, 2)
        return blocks.reshape(x.shape[1], count * size, *x.shape[3:])[:, :total]

    blocks = cut(columns[None])[:, 0], *jax.tree.map(cut, arrays)
    if count == 1:
        return jax.tree.map(lambda x: join(x[None]), f(params, *jax.tree.map(lambda x: x[0], blocks)))

    # Gathered once: inside the loop, every block would gather the head again.
    whole = constrain_tree(widened(params), gathered=True)

    def of_block(block: tuple[Any, ...]) -> Any:
        # Cast back, so that a 16-bit head is multiplied in 16 bits and only its gradient is summed in 32.
        narrow = jax.tree.map(lambda x, like: x.astype(like.dtype), whole, params)
        return f(narrow, *block)

    return jax.tree.map(join, jax.lax.map(of_block, blocks))
