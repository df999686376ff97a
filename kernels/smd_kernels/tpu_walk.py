"""Grid, tiles and skip tables of the TPU block attention kernels.

A pass runs over the grid (blocks, outer tiles, inner tiles) in order. Vectors with one number per row or key have the
shape `[blocks, 1, length]`, along lanes, without padding. As `[blocks, length, 1]` they would be padded to 128 lanes
and take more memory than q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from smd_kernels.blocks import Blocks, key_extremes, live_tiles, row_extremes, tile_ends

LANES = 128
SCALAR_MEMORY = 2**20 - 2**14  # bytes: 1 MiB on TPU v5e, minus the compiler's own use; the same on v6e


class Spans(NamedTuple):
    """Tables that decide which score tiles a pass visits; kernels read them from scalar memory.

    They are flat: scalar memory pads every row of a two-dimensional table to 128 words.

    Attributes:
      first, last: `[blocks * outer_tiles]` int32, first and last live inner tile; both 0 where none is live.
      column_low, column_high: `[blocks * row_tiles]` int32, lowest and highest column, without padding.
      born_low, evicted_high: `[blocks * key_tiles]` int32, lowest `born` and highest `evicted_at`, without keys that
        are never visible.
    """

    first: Any
    last: Any
    column_low: Any
    column_high: Any
    born_low: Any
    evicted_high: Any


def spans(blocks: Blocks, rows: int, keys: int, *, rows_outside: bool) -> Spans:
    """Computes the tables for tiles of `rows` by `keys`, which divide the blocks."""
    column_low, column_high = row_extremes(blocks.column, rows)
    born_low, evicted_high = key_extremes(blocks.born, blocks.evicted_at, keys)
    live = live_tiles(blocks, rows, keys)
    first, after = tile_ends(live if rows_outside else live.swapaxes(1, 2))
    # Inclusive, like the upper bound of `jnp.clip`.
    last = jnp.maximum(after - 1, 0)
    return Spans(*(x.reshape(-1) for x in (first, last, column_low, column_high, born_low, evicted_high)))


def is_live(spans: Spans, *, row_axis: int, key_axis: int) -> Any:
    """Whether a row may see a key in the score tile of this grid step. For use inside a kernel."""
    block = pl.program_id(0)
    row_tile = block * pl.num_programs(row_axis) + pl.program_id(row_axis)
    key_tile = block * pl.num_programs(key_axis) + pl.program_id(key_axis)
    return may_see(spans, row_tile, key_tile)


def may_see(spans: Spans, row_tile: Any, key_tile: Any) -> Any:
    """Whether a row of one tile may see a key of another; both are numbered over all blocks."""
    return (spans.born_low[key_tile] <= spans.column_high[row_tile]) & (
        spans.column_low[row_tile] < spans.evicted_high[key_tile]
    )


@dataclass(frozen=True)
class Walk:
    """Grid of one pass over blocks of whole tiles.

    Attributes:
      rows, keys: tile lengths.
      row_tiles, key_tiles: tiles per block.
      rows_outside: True if row tiles are the outer axis and key tiles the inner one; False for the reverse.
      stages: buffers of an input that changes with the inner tile.
    """

    rows: int
    keys: int
    row_tiles: int
    key_tiles: int
    rows_outside: bool
    stages: int

    @property
    def grid(self) -> tuple[int, int]:
        return (self.row_tiles, self.key_tiles) if self.rows_outside else (self.key_tiles, self.row_tiles)

    def _spec(self, of_rows: bool, shape: tuple[int, ...], place: Callable[..., Any]) -> pl.BlockSpec:
        """Tiles of the rows or the keys. A dead inner tile is not read: its step asks for a live one."""
        if of_rows == self.rows_outside:
            return pl.BlockSpec((None, *shape), lambda block, outer, inner, spans: (block, *place(outer)))
        outer_tiles, inner_tiles = self.grid

        def held(block, outer, inner, spans):
            at = block * outer_tiles + outer
            tiles = at, block * inner_tiles + inner
            row_tile, key_tile = tiles if self.rows_outside else tiles[::-1]
            # Pallas does not fetch an unchanged tile again. Steps before the first live tile ask for it, dead ones
            # after it for the last one: a gap between live tiles causes at most one fetch that is not needed.
            dead = jnp.where(inner < spans.first[at], spans.first[at], spans.last[at])
            return block, *place(jnp.where(may_see(spans, row_tile, key_tile), inner, dead))

        return pl.BlockSpec((None, *shape), held, pipeline_mode=pl.Buffered(self.stages))

    def matrix(self, of_rows: bool, head_dim: int) -> pl.BlockSpec:
        """Tiles of `[blocks, length, head_dim]`."""
        return self._spec(of_rows, (self.rows if of_rows else self.keys, head_dim), lambda tile: (tile, 0))

    def vector(self, of_rows: bool) -> pl.BlockSpec:
        """Tiles of `[blocks, 1, length]`."""
        return self._spec(of_rows, (1, self.rows if of_rows else self.keys), lambda tile: (0, tile))

    def blocks(self, head_dim: int) -> Blocks:
        """Specs of all arrays of `Blocks`, vectors along lanes."""
        q: Any = self.matrix(True, head_dim)
        k: Any = self.matrix(False, head_dim)
        column: Any = self.vector(True)
        born: Any = self.vector(False)
        return Blocks(q, k, k, column, born, born)


class Operand(NamedTuple):
    """An input array, or the shape and dtype of an output, and its tiles per grid step."""

    value: Any
    spec: pl.BlockSpec


def along_lanes(blocks: Blocks) -> Blocks:
    """Reshapes the vectors to `[blocks, 1, length]`."""
    column, born, evicted_at = (x[:, None] for x in (blocks.column, blocks.born, blocks.evicted_at))
    return Blocks(blocks.q, blocks.k, blocks.v, column, born, evicted_at)


def cost(blocks: Blocks, products: int, arrays: Any) -> pl.CostEstimate:
    """Cost of a pass with `products` matrix products per tile if all tiles are live: an upper bound, for XLA."""
    (count, rows, head_dim) = blocks.q.shape
    keys = blocks.k.shape[1]
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    pairs = count * rows * keys
    return pl.CostEstimate(flops=2 * products * pairs * head_dim, transcendentals=pairs, bytes_accessed=moved)


def table_bytes(count: int, walk: Walk) -> int:
    """Bytes of the tables of `Spans` for `count` blocks."""
    # Two int32 tables each for outer tiles, row tiles and key tiles.
    return 4 * count * (2 * walk.grid[0] + 2 * walk.row_tiles + 2 * walk.key_tiles)


def check_scalar_memory(count: int, walk: Walk) -> None:
    """Raises ValueError if the tables of `Spans` do not fit into scalar memory."""
    needed = table_bytes(count, walk)
    if needed > SCALAR_MEMORY:
        tiles = f"{count} blocks of {walk.row_tiles} row tiles and {walk.key_tiles} key tiles"
        raise ValueError(
            f"expected tables of at most {SCALAR_MEMORY} bytes of scalar memory; {tiles} need {needed}: "
            "use larger tiles or fewer blocks per call"
        )


def run(
    kernel: Callable[..., None],
    walk: Walk,
    blocks: Blocks,
    inputs: tuple[Operand, ...],
    outputs: tuple[Operand, ...],
    scratch: tuple[Any, ...],
    products: int,
    interpret: bool | pltpu.InterpretParams,
    softcap: float | None,
) -> Any:
    """Calls `kernel(spans, blocks, *inputs, *outputs, *scratch, scale=…, softcap=…)` at each grid step; returns the
    outputs.

    Args:
      blocks: padded to whole tiles.
      products: matrix products of the kernel per tile of scores, for the cost estimate.

    Raises:
      ValueError: the skip tables do not fit into scalar memory.
    """
    count, _, head_dim = blocks.q.shape
    check_scalar_memory(count, walk)
    shapes = tuple(x.value for x in outputs)
    values = tuple(x.value for x in inputs)
    call = pl.pallas_call(
        partial(kernel, scale=head_dim**-0.5, softcap=softcap),
        name=f"block_attention_{kernel.__name__}",
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count, *walk.grid),
            in_specs=(walk.blocks(head_dim), *(x.spec for x in inputs)),
            out_specs=tuple(x.spec for x in outputs),
            scratch_shapes=scratch,
        ),
        # Sums run over the inner axis, which must run in order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost(blocks, products, (blocks, values, shapes)),
        interpret=interpret,
    )
    table = spans(blocks, walk.rows, walk.keys, rows_outside=walk.rows_outside)
    return call(table, along_lanes(blocks), *values)
