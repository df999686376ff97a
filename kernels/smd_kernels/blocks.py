"""Block attention: the problem that every learner kernel solves, its inputs and tile sizes.

Blocks are independent. Each has its own queries and keys, and each key is visible to an interval of columns:

    visible[n, r, s]  =  (born[n, s] <= column[n, r])  and  (column[n, r] < evicted_at[n, s])

A block holds all tokens of one batch row and KV head (`intervals`), or one segment of a rollout with the keys that its
queries can see (`segments`). The query heads of a group are rows of their KV head's block, so kernels do not handle
grouped heads. Rows in column order let kernels skip more tiles; results do not depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smd_kernels.pytrees import any_leaves

# Later than any column: `born` of a key that no query sees.
LATEST = np.iinfo(np.int32).max


def to_int32(columns: Any) -> Any:
    """Columns as int32: 0 for a negative one, `LATEST` for one that int32 cannot hold. A NumPy array stays one."""
    # Clipped before the conversion, which would wrap to negative; in NumPy, because JAX without x64 always converts.
    if not np.can_cast(columns.dtype, np.int32):
        columns = (np if isinstance(columns, np.ndarray) else jnp).clip(columns, 0, LATEST)
    return columns.astype(np.int32)


@any_leaves
class Blocks(NamedTuple):
    """Queries, keys and visibility of one kernel call.

    Attributes:
      q: `[blocks, rows, head_dim]`. k, v: `[blocks, keys, head_dim]`, of the same dtype.
      column: `[blocks, rows]` int32, column of each query; negative for padding, which sees no key.
      born: `[blocks, keys]` int32, first column that sees the key; never negative.
      evicted_at: `[blocks, keys]` int32, first later column that does not see it; 0 for padding.
    """

    q: Float[Array, "blocks rows head_dim"]
    k: Float[Array, "blocks keys head_dim"]
    v: Float[Array, "blocks keys head_dim"]
    column: Int[Array, "blocks rows"]
    born: Int[Array, "blocks keys"]
    evicted_at: Int[Array, "blocks keys"]


@runtime_checkable
class BlockKernel(Protocol):
    """Forward and backward pass of block attention.

    Implementations are frozen dataclasses, so that they can be static arguments of `jax.jit`.
    """

    def forward(self, blocks: Blocks) -> tuple[Any, Any]:
        """Runs the forward pass.

        Returns:
          The output `[blocks, rows, head_dim]` in the dtype of `q`, zeros in a row that sees no key; and `lse`
          `[blocks, rows]`, float32 or wider, the natural log of each row's softmax denominator, `inf` in a row that
          sees no key. `exp(score - lse)` is the weight.
        """
        ...

    def backward(self, blocks: Blocks, out: Any, lse: Any, d_out: Any) -> tuple[Any, Any, Any]:
        """Runs the backward pass from the inputs and results of `forward` and the gradient of the output.

        Returns:
          dq in the dtype of `q`; dk and dv in float32 or wider, because the caller sums them over blocks.
        """
        ...


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of a kernel. The defaults suit hardware kernels at head_dim 128 in bfloat16.

    Attributes:
      rows, keys: tile of scores in the forward pass.
      rows_dq, keys_dq: tile in the backward pass for dq, which loops over the keys of a row tile.
      rows_dkv, keys_dkv: tile in the backward pass for dk and dv, which loops over the rows of a key tile.
      stages: tiles in flight between main and on-chip memory.
      scores: maximum number of scores that `XlaKernel` holds at once, over several blocks.
      blocks: blocks per kernel call in `segment_attention`; more blocks take more memory, fewer need more launches.

    Raises:
      ValueError: a size is less than 1 or no whole number.
    """

    rows: int = 128
    keys: int = 128
    rows_dq: int = 128
    keys_dq: int = 128
    rows_dkv: int = 128
    keys_dkv: int = 128
    stages: int = 2
    scores: int = 2**27
    blocks: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"expected {name} >= 1, a whole number; got {value!r}")


def tile_ends(
    live: Bool[Array, "blocks tiles others"],
) -> tuple[Int[Array, "blocks tiles"], Int[Array, "blocks tiles"]]:
    """First live one of the other tiles for each tile, and the one after its last; both 0 if none is live."""
    # argmax of booleans finds the first true entry; on the reversed axis it finds the last.
    first = jnp.argmax(live, axis=-1)
    after = jnp.where(live.any(-1), live.shape[-1] - jnp.argmax(live[..., ::-1], axis=-1), 0)
    return first.astype(jnp.int32), after.astype(jnp.int32)


def tile_order(live: Bool[Array, "blocks tiles others"]) -> tuple[Int[Array, " tiles"], Int[Array, "tiles others"]]:
    """How many of the other tiles are live in any block for each tile, and which ones, in ascending order; dead ones
    follow. Between live tiles there are dead ones where branches of a tree share keys, or where keys were evicted."""
    live = live.any(0)
    return live.sum(-1, dtype=jnp.int32), jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32)


def row_extremes(column: Int[Array, "blocks rows"], tile: int) -> tuple[Array, Array]:
    """Lowest and highest column of each row tile, `[blocks, row_tiles]`; an empty range for a tile of padding."""
    tiled = column.reshape(column.shape[0], -1, tile)
    return jnp.where(tiled < 0, LATEST, tiled).min(-1), tiled.max(-1)


def key_extremes(
    born: Int[Array, "blocks keys"], evicted_at: Int[Array, "blocks keys"], tile: int
) -> tuple[Array, Array]:
    """Lowest `born` and highest `evicted_at` of each key tile, `[blocks, key_tiles]`.

    Keys that are never visible do not count; a tile of such keys has an empty range.
    """
    born, evicted_at = (x.reshape(x.shape[0], -1, tile) for x in (born, evicted_at))
    ever = born < evicted_at
    return jnp.where(ever, born, LATEST).min(-1), jnp.where(ever, evicted_at, 0).max(-1)


def live_tiles(blocks: Blocks, rows: int, keys: int) -> Bool[Array, "blocks row_tiles key_tiles"]:
    """Finds the tiles of `rows` by `keys` in which a row may see a key; both must divide the blocks (`pad_blocks`)."""
    earliest, latest = (x[:, :, None] for x in row_extremes(blocks.column, rows))
    born, evicted_at = (x[:, None] for x in key_extremes(blocks.born, blocks.evicted_at, keys))
    # The extremes may belong to different rows and keys: a live tile may have no visible pair, a dead one never has
    # one.
    return (born <= latest) & (earliest < evicted_at)


def pad_blocks(blocks: Blocks, rows: int, keys: int) -> Blocks:
    """Pads rows and keys to multiples of `rows` and `keys`; padded rows see no key, padded keys are not visible."""
    return Blocks(
        q=pad_rows(blocks.q, rows, 0),
        k=pad_rows(blocks.k, keys, 0),
        v=pad_rows(blocks.v, keys, 0),
        column=pad_rows(blocks.column, rows, -1),
        born=pad_rows(blocks.born, keys, LATEST),
        evicted_at=pad_rows(blocks.evicted_at, keys, 0),
    )


def pad_rows(x: Array, multiple: int, fill: int | float) -> Array:
    """Pads axis 1 of `[blocks, rows, ...]` to a multiple with `fill`."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=fill) if missing else x


def even(length: int, most: int, multiple: int = 1) -> int:
    """Shortest piece length, in multiples of `multiple`, that needs no more pieces than pieces of length `most`."""
    # `-(-a // b)` is a / b rounded up.
    return -(-length // (-(-length // most) * multiple)) * multiple


def in_groups(f: Callable[..., Any], most: int, blocks: Blocks, *rest: Array) -> Any:
    """Runs `f(blocks, *rest)` on groups of at most `most` blocks, one group after another."""
    count = blocks.q.shape[0]
    group = even(count, most)
    if group >= count:
        return f(blocks, *rest)
    # Zero blocks pad the last group: their `evicted_at` of 0 hides all keys, and their results are cut off.
    short = -count % group

    def split(x: Array) -> Array:
        return jnp.pad(x, [(0, short), *[(0, 0)] * (x.ndim - 1)]).reshape(-1, group, *x.shape[1:])

    parts = jax.lax.map(lambda part: f(*part), jax.tree.map(split, (blocks, *rest)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], parts)
