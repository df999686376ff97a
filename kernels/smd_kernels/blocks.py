"""Block attention: the one problem that every kernel of this package solves, and the sizes it is cut into.

Blocks are independent; each has its own queries and its own keys, and a key is seen by an interval of columns:

    visible[n, r, s]  =  (born[n, s] <= column[n, r])  and  (column[n, r] < evicted_at[n, s])

A block is a batch row and KV head with all its tokens (`intervals`), or one segment of a rollout with the keys that its
queries could still see (`segments`). The queries of a group are rows of their KV head's block, so a kernel knows
nothing of grouped heads. Rows in column order let it skip tiles that no row of it can see; nothing else depends on it.
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

# Later than any column: `born` of a key that nobody sees.
LATEST = np.iinfo(np.int32).max


@any_leaves
class Blocks(NamedTuple):
    """One call's queries, keys and what may see what.

    Attributes:
      q: `[blocks, rows, head_dim]`. k, v: `[blocks, keys, head_dim]`, all of one dtype.
      column: `[blocks, rows]` int32, column of each query; negative for a row that is padding and sees nothing.
      born: `[blocks, keys]` int32, first column that sees the key, its own; never negative.
      evicted_at: `[blocks, keys]` int32, first column that no longer does; 0 for a key that is padding.
    """

    q: Float[Array, "blocks rows head_dim"]
    k: Float[Array, "blocks keys head_dim"]
    v: Float[Array, "blocks keys head_dim"]
    column: Int[Array, "blocks rows"]
    born: Int[Array, "blocks keys"]
    evicted_at: Int[Array, "blocks keys"]


@runtime_checkable
class BlockKernel(Protocol):
    """Forward and backward of block attention. Implementations are frozen dataclasses: static arguments of a jit."""

    def forward(self, blocks: Blocks) -> tuple[Any, Any]:
        """Returns the output `[blocks, rows, head_dim]` in the dtype of `q`, zeros in a row that sees nothing, and in
        float32 or wider the log of each row's softmax denominator `[blocks, rows]`, `inf` in a row that sees nothing:
        then `exp(score - lse)` is the weight, 0 there too."""
        ...

    def backward(self, blocks: Blocks, out: Any, lse: Any, d_out: Any) -> tuple[Any, Any, Any]:
        """Returns the gradients of q, in its dtype, and of k and v, in float32 or wider, because the caller still sums
        those over blocks."""
        ...


@dataclass(frozen=True)
class BlockSizes:
    """How much a kernel holds at once. The defaults are for hardware kernels at head_dim 128 in bfloat16.

    Attributes:
      rows, keys: tile of scores of the forward pass.
      rows_dq, keys_dq: tile of the backward pass that makes dq, which walks the keys of one row tile.
      rows_dkv, keys_dkv: tile of the backward pass that makes dk and dv, which walks the rows of one key tile.
      stages: tiles in flight between main and on-chip memory.
      scores: that the plain JAX form may hold at once, over several blocks.
      blocks: gathered and attended to in one call of a kernel, one for each segment, KV head and row of the batch; more
        cost memory, fewer cost launches.
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
            if value < 1:
                raise ValueError(f"expected {name} >= 1; got {value}")


class LiveTiles(NamedTuple):
    """Which tiles of scores have anything to see, from the extremes of each: `[blocks, row tiles, key tiles]`."""

    live: Bool[Array, "blocks row_tiles key_tiles"]

    def of_rows(self) -> tuple[Int[Array, "blocks row_tiles"], Int[Array, "blocks row_tiles"]]:
        """For each row tile, its first live key tile and the one after its last; both 0 where there is none."""
        return _ends(self.live)

    def of_keys(self) -> tuple[Int[Array, "blocks key_tiles"], Int[Array, "blocks key_tiles"]]:
        """For each key tile, its first live row tile and the one after its last; both 0 where there is none."""
        return _ends(self.live.swapaxes(1, 2))


def _ends(live: Bool[Array, "blocks tiles others"]) -> tuple[Array, Array]:
    # argmax of booleans is the first true one; over the reversed axis it finds the last.
    first = jnp.argmax(live, axis=-1)
    after = jnp.where(live.any(-1), live.shape[-1] - jnp.argmax(live[..., ::-1], axis=-1), 0)
    return first.astype(jnp.int32), after.astype(jnp.int32)


def row_extremes(column: Int[Array, "blocks rows"], tile: int) -> tuple[Array, Array]:
    """Lowest and highest column of each row tile, `[blocks, row_tiles]`; an empty range for padding alone."""
    tiled = column.reshape(column.shape[0], -1, tile)
    return jnp.where(tiled < 0, LATEST, tiled).min(-1), tiled.max(-1)


def key_extremes(
    born: Int[Array, "blocks keys"], evicted_at: Int[Array, "blocks keys"], tile: int
) -> tuple[Array, Array]:
    """Lowest `born` and highest `evicted_at` of each key tile, `[blocks, key_tiles]`; an empty range if never seen."""
    born, evicted_at = (x.reshape(x.shape[0], -1, tile) for x in (born, evicted_at))
    ever = born < evicted_at
    return jnp.where(ever, born, LATEST).min(-1), jnp.where(ever, evicted_at, 0).max(-1)


def live_tiles(blocks: Blocks, rows: int, keys: int) -> LiveTiles:
    """Tiles of `rows` by `keys` in which a row may see a key; both must divide the blocks (`pad_blocks`)."""
    earliest, latest = (x[:, :, None] for x in row_extremes(blocks.column, rows))
    born, evicted_at = (x[:, None] for x in key_extremes(blocks.born, blocks.evicted_at, keys))
    # The extremes may belong to different rows and keys, so a live tile can turn out to have nothing visible; a dead
    # one has nothing for certain.
    return LiveTiles((born <= latest) & (earliest < evicted_at))


def pad_blocks(blocks: Blocks, rows: int, keys: int) -> Blocks:
    """Blocks whose rows and keys are multiples of these; what is added sees nothing and is seen by nothing."""
    return Blocks(
        q=pad_rows(blocks.q, rows, 0),
        k=pad_rows(blocks.k, keys, 0),
        v=pad_rows(blocks.v, keys, 0),
        column=pad_rows(blocks.column, rows, -1),
        born=pad_rows(blocks.born, keys, LATEST),
        evicted_at=pad_rows(blocks.evicted_at, keys, 0),
    )


def pad_rows(x: Array, multiple: int, fill: int | float) -> Array:
    """`[blocks, rows, ...]` with rows up to a multiple."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=fill) if missing else x


def even(length: int, most: int, multiple: int = 1) -> int:
    """The shortest piece that makes as few pieces of a length as `most` would: what is left to pad is least."""
    # `-(-a // b)` is a / b rounded up.
    return -(-length // (-(-length // most) * multiple)) * multiple


def in_groups(f: Callable[..., Any], most: int, blocks: Blocks, *rest: Array) -> Any:
    """`f(blocks, *rest)`, at most so many blocks at a time, one group after another."""
    count = blocks.q.shape[0]
    group = even(count, most)
    if group >= count:
        return f(blocks, *rest)
    # Blocks of zeros fill the last group: `evicted_at` 0 hides their keys, and their results are cut off.
    short = -count % group

    def split(x: Array) -> Array:
        return jnp.pad(x, [(0, short), *[(0, 0)] * (x.ndim - 1)]).reshape(-1, group, *x.shape[1:])

    parts = jax.lax.map(lambda part: f(*part), jax.tree.map(split, (blocks, *rest)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], parts)
