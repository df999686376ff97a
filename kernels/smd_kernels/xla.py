"""Block attention in plain JAX, for CPUs and inputs that the hardware kernels do not support.

Memory for scores is bounded: short blocks are processed in groups, long blocks tile by tile with the online softmax of
FlashAttention (arXiv 2205.14135). The backward pass recomputes the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smd_kernels.blocks import Blocks, BlockSizes, even, in_groups, live_tiles, pad_blocks, pad_rows, tile_order
from smd_kernels.reference import product_precision, soft_capped

# Measured on two cores with 512 KiB of cache each: longer tiles exceed the cache, and wider ones skip fewer keys.
CPU_SIZES = BlockSizes(rows=384, keys=96, scores=2**19, blocks=8)
ACCELERATOR_SIZES = BlockSizes(rows=2048, keys=2048, scores=2**27, blocks=64)


@dataclass(frozen=True)
class XlaKernel:
    """`BlockKernel` in plain JAX, for any dtype, head_dim and platform.

    Attributes:
      sizes: tile sizes, of which it uses `rows`, `keys` and `scores`.
      softcap: scores are squeezed into ±softcap by tanh; None: no cap.
    """

    sizes: BlockSizes = CPU_SIZES
    softcap: float | None = None

    def forward(self, blocks: Blocks) -> tuple[Float[Array, "blocks rows head_dim"], Float[Array, "blocks rows"]]:
        """See `BlockKernel.forward`."""
        rows = blocks.q.shape[1]
        tile = self._tile(blocks)
        if tile is None:
            return self._in_groups(partial(_whole_forward, self.softcap), blocks)
        out, lse = self._in_groups(partial(_tiled_forward, tile, self.softcap), pad_blocks(blocks, *tile))
        return out[:, :rows], lse[:, :rows]

    def backward(
        self,
        blocks: Blocks,
        out: Float[Array, "blocks rows head_dim"],
        lse: Float[Array, "blocks rows"],
        d_out: Float[Array, "blocks rows head_dim"],
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel.backward`."""
        rows = blocks.q.shape[1]
        keys = blocks.k.shape[1]
        tile = self._tile(blocks)
        # The softmax gradient subtracts, per row, the sum over keys of weight times gradient of the weight. It equals
        # `out` times `d_out`, so no second pass over the keys is needed.
        delta = jnp.sum(out.astype(lse.dtype) * d_out.astype(lse.dtype), axis=-1)
        if tile is None:
            return self._in_groups(partial(_whole_backward, self.softcap), blocks, lse, delta, d_out)
        # The lse of a row that sees no key is `inf`.
        per_row = pad_rows(lse, tile.rows, jnp.inf), pad_rows(delta, tile.rows, 0.0), pad_rows(d_out, tile.rows, 0.0)
        padded = pad_blocks(blocks, *tile)
        dq, dk, dv = self._in_groups(partial(_tiled_backward, tile, self.softcap), padded, *per_row)
        return dq[:, :rows], dk[:, :keys], dv[:, :keys]

    def _tile(self, blocks: Blocks) -> Tile | None:
        """The tile of long blocks; None for blocks that are processed whole."""
        rows = blocks.q.shape[1]
        keys = blocks.k.shape[1]
        if rows * keys < self.sizes.scores // 2:
            return None
        return Tile(even(rows, self.sizes.rows, 8), even(keys, self.sizes.keys, 8))

    def _in_groups(self, f: Callable[..., Any], blocks: Blocks, *rest: Array) -> Any:
        """Runs `f` on groups of blocks, such that the tiles of a group have at most `sizes.scores` scores."""
        tile = self._tile(blocks) or Tile(blocks.q.shape[1], blocks.k.shape[1])
        return in_groups(f, max(self.sizes.scores // (tile.rows * tile.keys), 1), blocks, *rest)


class Tile(NamedTuple):
    """Size of a tile of scores."""

    rows: int
    keys: int


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    """Einsum that multiplies in the dtype of the inputs and sums in float32 or wider."""
    return jnp.einsum(subscripts, a, b, precision=product_precision(a.dtype), preferred_element_type=_wide(a))


def _visible(blocks: Blocks) -> Bool[Array, "blocks rows keys"]:
    column = blocks.column[:, :, None]
    return (blocks.born[:, None] <= column) & (column < blocks.evicted_at[:, None])


def _scores(softcap: float | None, blocks: Blocks) -> Float[Array, "blocks rows keys"]:
    """Scaled and capped scores, also of pairs that do not see each other."""
    return soft_capped(_product("nrd,nsd->nrs", blocks.q, blocks.k) * blocks.q.shape[-1] ** -0.5, softcap)


def _seen_scores(softcap: float | None, blocks: Blocks) -> Float[Array, "blocks rows keys"]:
    """Scores, -inf where a row does not see a key."""
    return jnp.where(_visible(blocks), _scores(softcap, blocks), -jnp.inf)


def _finish(total: Array, highest: Array, out: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns output and lse from sums relative to `exp(highest)`; a row that sees no key has a total of 0."""
    sees_none = total == 0
    total = jnp.where(sees_none, 1.0, total)
    return (out / total[..., None]).astype(dtype), jnp.where(sees_none, jnp.inf, highest + jnp.log(total))


def _finite(highest: Array) -> Array:
    """Replaces -inf, the maximum of a row that has seen no key, because -inf - -inf is NaN."""
    return jnp.where(highest == -jnp.inf, 0.0, highest)


def _whole_forward(softcap: float | None, blocks: Blocks) -> tuple[Array, Array]:
    scores = _seen_scores(softcap, blocks)
    highest = _finite(scores.max(-1))
    weights = jnp.exp(scores - highest[..., None])
    # Only the matrix product takes rounded weights; the denominator sums the unrounded ones.
    out = _product("nrs,nsd->nrd", weights.astype(blocks.v.dtype), blocks.v)
    return _finish(weights.sum(-1), highest, out, blocks.q.dtype)


def _whole_backward(
    softcap: float | None, blocks: Blocks, lse: Array, delta: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    dq, dk, dv = _tile_backward(softcap, blocks, lse, delta, d_out)
    return dq.astype(blocks.q.dtype), dk, dv


def _tile_backward(
    softcap: float | None, blocks: Blocks, lse: Array, delta: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    """Returns dq, dk and dv in float32 or wider."""
    narrow = blocks.q.dtype
    # Masked pairs have -inf - lse = -inf, also for an lse of inf: their weight is 0 without a second mask.
    scores = _scores(softcap, blocks)
    weights = jnp.exp(jnp.where(_visible(blocks), scores, -jnp.inf) - lse[..., None])
    d_weights = _product("nrd,nsd->nrs", d_out, blocks.v)
    d_scores = weights * (d_weights - delta[..., None]) * blocks.q.shape[-1] ** -0.5
    if softcap is not None:
        d_scores = d_scores * (1 - jnp.square(scores / softcap))  # the derivative of tanh
    d_scores = d_scores.astype(narrow)
    dq = _product("nrs,nsd->nrd", d_scores, blocks.k)
    dk = _product("nrs,nrd->nsd", d_scores, blocks.q)
    dv = _product("nrs,nrd->nsd", weights.astype(narrow), d_out)
    return dq, dk, dv


def _rows(x: Array, tile: Int[Array, ""], size: int) -> Array:
    """Cuts out tile number `tile` of `size` rows or keys."""
    return jax.lax.dynamic_slice_in_dim(x, tile * size, size, axis=1)


def _cut(size: Tile, blocks: Blocks, row: Int[Array, ""], key: Int[Array, ""]) -> Blocks:
    q, column = (_rows(x, row, size.rows) for x in (blocks.q, blocks.column))
    k, v, born, evicted_at = (_rows(x, key, size.keys) for x in blocks[1:3] + blocks[4:])
    return Blocks(q, k, v, column, born, evicted_at)


def _tiled_forward(size: Tile, softcap: float | None, blocks: Blocks) -> tuple[Array, Array]:
    count, rows, head_dim = blocks.q.shape
    wide = _wide(blocks.q)
    # The blocks of a group run in lockstep, over the tiles that any of them needs.
    count_live, live = tile_order(live_tiles(blocks, size.rows, size.keys))

    def one_row_tile(row: Int[Array, ""]) -> tuple[Array, Array]:
        def add(step: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, out = carry
            tile = _cut(size, blocks, row, live[row, step])
            scores = _seen_scores(softcap, tile)
            new = jnp.maximum(highest, scores.max(-1))
            weights = jnp.exp(scores - _finite(new)[..., None])
            # 0 while `highest` is -inf, when nothing has been summed yet.
            shrink = jnp.exp(highest - _finite(new))
            seen = _product("nrs,nsd->nrd", weights.astype(tile.v.dtype), tile.v)
            return new, total * shrink + weights.sum(-1), out * shrink[..., None] + seen

        nothing = jnp.full((count, size.rows), -jnp.inf, wide), jnp.zeros((count, size.rows), wide)
        start = (*nothing, jnp.zeros((count, size.rows, head_dim), wide))
        highest, total, out = jax.lax.fori_loop(0, count_live[row], add, start)
        return _finish(total, highest, out, blocks.q.dtype)

    # A loop, so that one tile of scores exists at a time. Loops with traced bounds have no derivative; the backward
    # pass is explicit.
    out, lse = jax.lax.map(one_row_tile, jnp.arange(rows // size.rows))
    return out.swapaxes(0, 1).reshape(count, rows, head_dim), lse.swapaxes(0, 1).reshape(count, rows)


def _tiled_backward(
    size: Tile, softcap: float | None, blocks: Blocks, lse: Array, delta: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    count, keys, head_dim = blocks.k.shape
    wide = lse.dtype
    count_live, live = tile_order(live_tiles(blocks, size.rows, size.keys).swapaxes(1, 2))

    def one_key_tile(dq: Array, key: Int[Array, ""]) -> tuple[Array, tuple[Array, Array]]:
        def add(step: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = carry
            row = live[key, step]
            per_row = (_rows(x, row, size.rows) for x in (lse, delta, d_out))
            dq_tile, dk_tile, dv_tile = _tile_backward(softcap, _cut(size, blocks, row, key), *per_row)
            summed = _rows(dq, row, size.rows) + dq_tile
            dq = jax.lax.dynamic_update_slice_in_dim(dq, summed, row * size.rows, axis=1)
            return dq, dk + dk_tile, dv + dv_tile

        zeros = jnp.zeros((count, size.keys, head_dim), wide)
        dq, dk, dv = jax.lax.fori_loop(0, count_live[key], add, (dq, zeros, zeros))
        return dq, (dk, dv)

    # Each key tile completes its own dk and dv, and adds to dq, which is carried: its sum has a fixed order.
    dq, parts = jax.lax.scan(one_key_tile, jnp.zeros(blocks.q.shape, wide), jnp.arange(keys // size.keys))
    dk, dv = (x.swapaxes(0, 1).reshape(blocks.k.shape) for x in parts)
    return dq.astype(blocks.q.dtype), dk, dv
