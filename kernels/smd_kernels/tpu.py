"""Block attention on TPU, written with Pallas for its Mosaic compiler: forward, dq, and dk with dv.

The online softmax and its recomputation in the backward pass are those of FlashAttention-2 (arXiv 2307.08691). Output
and dq walk the keys of a row tile; dk and dv walk the rows of a key tile. The grid runs in order on one core, so that
sums over the inner tiles stay in vector memory: no atomics, and the same bits each time. A tile of scores without a
visible pair is not computed; those before the first and after the last live one are not fetched either.

Per-row and per-key numbers arrive along lanes (`tpu_walk`). The side of a score tile that lies along sublanes needs
them there: each outer tile turns its own over once, and the dk pass computes its scores transposed, `[keys, rows]`.

The tables for skipping lie in scalar memory: `8 * blocks * (row_tiles + key_tiles + outer_tiles)` bytes have to fit
into 1 MiB less 16 KiB. With 1,024 rows and 1,152 keys that is 4,962 blocks in tiles of 128, and 16,128 in `TPU_SIZES`;
more are done in groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from smd_kernels.blocks import Blocks, BlockSizes, even, in_groups, pad_blocks, pad_rows
from smd_kernels.hardware import TPU_SIZES, why_not_blocks
from smd_kernels.tpu_walk import LANES, SCALAR_MEMORY, Operand, Spans, Walk, is_live, run, table_bytes

LOWEST = -1e30  # a row's highest score before its first visible key: finite, so that exp(-inf - LOWEST) is 0, not NaN


def _check(blocks: Blocks) -> None:
    if reason := why_not_blocks("mosaic_tpu", blocks.q.dtype, blocks.q.shape[2]):
        raise ValueError(reason)


def turned_down(x: Any) -> Any:
    """`[1, n]` along lanes -> `[n, LANES]` along sublanes, every lane the same."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T


def product(x: Any, y: Any, *, transposed: bool = False) -> Any:
    """`x @ y`, or `x @ y.T`, in float32; by default the matrix unit would round float32 factors to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, y, contracted, precision=precision, preferred_element_type=jnp.float32)


def masked_scores(x: Any, y: Any, column: Any, born: Any, evicted_at: Any, scale: float) -> Any:
    """`x @ y.T * scale`, `-inf` where the row does not see the key; rows along either axis."""
    seen = (born <= column) & (column < evicted_at)
    return jnp.where(seen, product(x, y, transposed=True) * scale, -jnp.inf)


def forward_kernel(
    spans: Spans, blocks: Blocks, out: Any, lse: Any, column: Any, highest: Any, total: Any, acc: Any, *, scale: float
) -> None:
    """Row tile outside, key tiles inside. Scratch: `column`, `highest`, `total` `[rows, LANES]`, `acc` as q."""
    inner = pl.program_id(2)

    @pl.when(inner == 0)
    def start():
        column[...] = turned_down(blocks.column[...])
        # Scratch keeps its numbers from one grid step to the next: every outer tile starts anew.
        highest[...] = jnp.full_like(highest, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(is_live(spans, row_axis=1, key_axis=2))
    def step():
        interval = blocks.born[...], blocks.evicted_at[...]
        scores = masked_scores(blocks.q[...], blocks.k[...], column[:, :1], *interval, scale)
        before = highest[:, :1]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - now)
        # What has been summed is relative to the highest score before this tile: it is brought to the new one.
        fade = jnp.exp(before - now)
        total[...] = total[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
        acc[...] = acc[...] * fade + product(weights.astype(blocks.v.dtype), blocks.v[...])
        highest[...] = jnp.broadcast_to(now, highest.shape)

    @pl.when(inner == pl.num_programs(2) - 1)
    def finish():
        sees = total[...] > 0
        denominator = jnp.where(sees, total[...], 1.0)
        out[...] = (acc[...] / denominator[:, :1]).astype(out.dtype)
        # All lanes hold the same number: turned over, the first row is the vector along lanes.
        lse[...] = jnp.where(sees, highest[...] + jnp.log(denominator), jnp.inf).T[:1]


def dq_kernel(
    spans: Spans,
    blocks: Blocks,
    lse: Any,
    delta: Any,
    d_out: Any,
    dq: Any,
    column: Any,
    lse_down: Any,
    delta_down: Any,
    acc: Any,
    *,
    scale: float,
) -> None:
    """Row tile outside, key tiles inside. Scratch: `column`, `lse_down`, `delta_down` `[rows, LANES]`, `acc` as q."""
    inner = pl.program_id(2)

    @pl.when(inner == 0)
    def start():
        column[...] = turned_down(blocks.column[...])
        lse_down[...] = turned_down(lse[...])
        delta_down[...] = turned_down(delta[...])
        acc[...] = jnp.zeros_like(acc)

    @pl.when(is_live(spans, row_axis=1, key_axis=2))
    def step():
        interval = blocks.born[...], blocks.evicted_at[...]
        scores = masked_scores(blocks.q[...], blocks.k[...], column[:, :1], *interval, scale)
        d_weights = product(d_out[...], blocks.v[...], transposed=True)
        d_scores = jnp.exp(scores - lse_down[:, :1]) * (d_weights - delta_down[:, :1])
        acc[...] += product(d_scores.astype(blocks.k.dtype), blocks.k[...])

    @pl.when(inner == pl.num_programs(2) - 1)
    def finish():
        # Once for the sum, in place of once for every tile.
        dq[...] = (acc[...] * scale).astype(dq.dtype)


def dkv_kernel(
    spans: Spans,
    blocks: Blocks,
    lse: Any,
    delta: Any,
    d_out: Any,
    dk: Any,
    dv: Any,
    born: Any,
    evicted_at: Any,
    *,
    scale: float,
) -> None:
    """Key tile outside, row tiles inside, scores `[keys, rows]`. Scratch: `born`, `evicted_at` `[keys, LANES]`."""
    inner = pl.program_id(2)

    @pl.when(inner == 0)
    def start():
        # Keys lie along sublanes here, rows along lanes: what belongs to the rows needs no turning.
        born[...] = turned_down(blocks.born[...])
        evicted_at[...] = turned_down(blocks.evicted_at[...])
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    @pl.when(is_live(spans, row_axis=2, key_axis=1))
    def step():
        interval = born[:, :1], evicted_at[:, :1]
        scores = masked_scores(blocks.k[...], blocks.q[...], blocks.column[...], *interval, scale)
        weights = jnp.exp(scores - lse[...])
        d_weights = product(blocks.v[...], d_out[...], transposed=True)
        d_scores = weights * (d_weights - delta[...])
        # A key tile's outputs stay in vector memory until its last row tile: they are float32 and sum themselves up.
        dv[...] += product(weights.astype(d_out.dtype), d_out[...])
        dk[...] += product(d_scores.astype(blocks.q.dtype), blocks.q[...])

    @pl.when(inner == pl.num_programs(2) - 1)
    def finish():
        dk[...] *= scale


def wide(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def turned(tile: int, dtype: Any) -> Any:
    """Scratch for one number a row or key, along sublanes."""
    return pltpu.VMEM((tile, LANES), dtype)


def beside(walk: Walk, lse: Array, delta: Array, d_out: Array) -> tuple[Operand, ...]:
    """What the backward passes read beside the blocks, in whole tiles."""
    # Zeros will do, for lse too: the column of a padded row is negative, and all its scores are -inf.
    lse, delta, d_out = (pad_rows(x, walk.rows, 0) for x in (lse, delta, d_out))
    vector = walk.vector(True)
    matrix = walk.matrix(True, d_out.shape[2])
    return Operand(lse[:, None], vector), Operand(delta[:, None], vector), Operand(d_out, matrix)


@dataclass(frozen=True)
class MosaicTpuKernel:
    """`BlockKernel` for TPU, for inputs to which `why_not` has no objection.

    Attributes:
      sizes: largest tiles. Rows and keys are cut into as many tiles as these would make, all alike, in multiples of
        128; `stages` is 1 or 2.
      interpret: run in Pallas' interpreter, on any device: slow, for tests.
    """

    sizes: BlockSizes = TPU_SIZES
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.sizes.stages not in (1, 2):
            raise ValueError(f"expected sizes.stages 1 or 2 on TPU, got {self.sizes.stages}")

    def _walk(self, blocks: Blocks, rows: int, keys: int, *, rows_outside: bool) -> Walk:
        """How to walk over the blocks in tiles of at most `rows` × `keys`."""
        rows = even(blocks.q.shape[1], rows, LANES)
        keys = even(blocks.k.shape[1], keys, LANES)
        row_tiles = pl.cdiv(blocks.q.shape[1], rows)
        key_tiles = pl.cdiv(blocks.k.shape[1], keys)
        return Walk(rows, keys, row_tiles, key_tiles, rows_outside, self.sizes.stages)

    def _cut(self, blocks: Blocks, rows: int, keys: int, *, rows_outside: bool) -> tuple[Walk, Blocks]:
        """The same, and the blocks in whole tiles."""
        walk = self._walk(blocks, rows, keys, rows_outside=rows_outside)
        return walk, pad_blocks(blocks, walk.rows, walk.keys)

    def _most(self, blocks: Blocks) -> int:
        """Blocks whose tables fit into scalar memory together, in every pass; at least one, to be refused by `run`."""
        s = self.sizes
        passes = (s.rows, s.keys, True), (s.rows_dq, s.keys_dq, True), (s.rows_dkv, s.keys_dkv, False)
        walks = (self._walk(blocks, rows, keys, rows_outside=outside) for rows, keys, outside in passes)
        return max(min(SCALAR_MEMORY // table_bytes(1, walk) for walk in walks), 1)

    def forward(self, blocks: Blocks) -> tuple[Any, Any]:
        """See `BlockKernel`; lse is float32. Raises ValueError if a block has too many tiles for scalar memory."""
        _check(blocks)
        return in_groups(self._forward, self._most(blocks), blocks)

    def _forward(self, blocks: Blocks) -> tuple[Any, Any]:
        length = blocks.q.shape[1]
        walk, blocks = self._cut(blocks, self.sizes.rows, self.sizes.keys, rows_outside=True)
        count, rows, head_dim = blocks.q.shape
        out = Operand(jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype), walk.matrix(True, head_dim))
        lse = Operand(wide(count, 1, rows), walk.vector(True))
        vectors = (turned(walk.rows, jnp.int32), turned(walk.rows, jnp.float32), turned(walk.rows, jnp.float32))
        scratch = (*vectors, pltpu.VMEM((walk.rows, head_dim), jnp.float32))
        out, lse = run(forward_kernel, walk, blocks, (), (out, lse), scratch, 2, self.interpret)
        return out[:, :length], lse[:, 0, :length]

    def backward(self, blocks: Blocks, out: Any, lse: Any, d_out: Any) -> tuple[Any, Any, Any]:
        """See `BlockKernel`; dk and dv are float32. Raises ValueError as `forward` does."""
        _check(blocks)
        # What the gradient of a softmax subtracts in each row, without a walk over its keys.
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
        return in_groups(self._backward, self._most(blocks), blocks, lse, delta, d_out.astype(blocks.q.dtype))

    def _backward(self, blocks: Blocks, lse: Array, delta: Array, d_out: Array) -> tuple[Any, Any, Any]:
        return self._dq(blocks, lse, delta, d_out), *self._dkv(blocks, lse, delta, d_out)

    def _dq(self, blocks: Blocks, lse: Array, delta: Array, d_out: Array) -> Array:
        length = blocks.q.shape[1]
        walk, blocks = self._cut(blocks, self.sizes.rows_dq, self.sizes.keys_dq, rows_outside=True)
        head_dim = blocks.q.shape[2]
        dq = Operand(jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype), walk.matrix(True, head_dim))
        vectors = (turned(walk.rows, jnp.int32), turned(walk.rows, jnp.float32), turned(walk.rows, jnp.float32))
        scratch = (*vectors, pltpu.VMEM((walk.rows, head_dim), jnp.float32))
        inputs = beside(walk, lse, delta, d_out)
        (dq,) = run(dq_kernel, walk, blocks, inputs, (dq,), scratch, 3, self.interpret)
        return dq[:, :length]

    def _dkv(self, blocks: Blocks, lse: Array, delta: Array, d_out: Array) -> tuple[Array, Array]:
        length = blocks.k.shape[1]
        walk, blocks = self._cut(blocks, self.sizes.rows_dkv, self.sizes.keys_dkv, rows_outside=False)
        d_key = Operand(wide(*blocks.k.shape), walk.matrix(False, blocks.k.shape[2]))
        scratch = (turned(walk.keys, jnp.int32), turned(walk.keys, jnp.int32))
        inputs = beside(walk, lse, delta, d_out)
        dk, dv = run(dkv_kernel, walk, blocks, inputs, (d_key, d_key), scratch, 4, self.interpret)
        return dk[:, :length], dv[:, :length]
