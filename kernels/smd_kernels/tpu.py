"""Block attention on TPU in Pallas Mosaic: one kernel for the forward pass, one for dq, one for dk and dv.

The online softmax and its recomputation in the backward pass follow FlashAttention-2 (arXiv 2307.08691). The forward
and dq passes loop over the keys of a row tile; the dk and dv pass loops over the rows of a key tile. The inner axis of
the grid runs in order, so sums stay in vector memory: no atomics, and results are bitwise reproducible. Score tiles
without a visible pair are neither computed nor fetched, except that a gap between live tiles may fetch one unused tile.

Per-row and per-key numbers arrive along lanes (`tpu_walk`). Where a score tile needs them along sublanes, each outer
tile transposes its own once. The dk and dv pass computes transposed scores, `[keys, rows]`.

The skip tables of `8 * blocks * (row_tiles + key_tiles + outer_tiles)` bytes must fit into scalar memory, 1 MiB less
16 KiB. With 1,024 rows and 1,152 keys that allows 4,962 blocks in tiles of 128 and 16,128 in `TPU_SIZES`; more blocks
run in groups.
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
from smd_kernels.decode_tpu import dot
from smd_kernels.hardware import TPU_SIZES, why_not_blocks, why_not_mixed
from smd_kernels.reference import soft_capped
from smd_kernels.tpu_walk import LANES, SCALAR_MEMORY, Operand, Spans, Walk, is_live, run, table_bytes

LOWEST = -1e30  # initial running maximum: finite, so that exp(-inf - LOWEST) is 0, not NaN


def _check(blocks: Blocks) -> None:
    q, k, v, *_ = blocks
    if reason := why_not_mixed(q.dtype, k.dtype, v.dtype) or why_not_blocks("mosaic_tpu", q.dtype, q.shape[2]):
        raise ValueError(reason)


def to_sublanes(x: Any) -> Any:
    """Transposes `[1, n]` along lanes to `[n, LANES]` along sublanes, with equal lanes."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T


def product(x: Any, y: Any, *, transposed: bool = False) -> Any:
    """`x @ y` or `x @ y.T`, summed in float32; float32 inputs are not rounded to bfloat16, the TPU's default."""
    return dot(x, y, (1, 1 if transposed else 0))


def scores_of(x: Any, y: Any, scale: float, softcap: float | None) -> Any:
    """`x @ y.T * scale`, capped."""
    return soft_capped(product(x, y, transposed=True) * scale, softcap)


def masked(scores: Any, column: Any, born: Any, evicted_at: Any) -> Any:
    """Scores, or `-inf` where the query does not see the key."""
    return jnp.where((born <= column) & (column < evicted_at), scores, -jnp.inf)


def through_cap(d_scores: Any, scores: Any, softcap: float | None) -> Any:
    """The gradient of the scores before the cap, by the derivative of tanh."""
    return d_scores if softcap is None else d_scores * (1.0 - jnp.square(scores / softcap))


def forward_kernel(
    spans: Spans,
    blocks: Blocks,
    out: Any,
    lse: Any,
    column: Any,
    highest: Any,
    total: Any,
    acc: Any,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Outer axis: row tiles; inner axis: key tiles.

    Scratch: `column`, `highest`, `total` `[rows, LANES]`, `acc` shaped like q.
    """
    inner = pl.program_id(2)

    @pl.when(inner == 0)
    def start():
        column[...] = to_sublanes(blocks.column[...])
        # Scratch persists between grid steps; every outer tile resets it.
        highest[...] = jnp.full_like(highest, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(is_live(spans, row_axis=1, key_axis=2))
    def step():
        interval = blocks.born[...], blocks.evicted_at[...]
        scores = masked(scores_of(blocks.q[...], blocks.k[...], scale, softcap), column[:, :1], *interval)
        old = highest[:, :1]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new)
        # Earlier sums are relative to the previous maximum; rescale them to the new one.
        decay = jnp.exp(old - new)
        total[...] = total[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        acc[...] = acc[...] * decay + product(weights.astype(blocks.v.dtype), blocks.v[...])
        highest[...] = jnp.broadcast_to(new, highest.shape)

    @pl.when(inner == pl.num_programs(2) - 1)
    def finish():
        sees_any = total[...] > 0
        denominator = jnp.where(sees_any, total[...], 1.0)
        out[...] = (acc[...] / denominator[:, :1]).astype(out.dtype)
        # All lanes are equal: the first row of the transpose is the vector along lanes.
        lse[...] = jnp.where(sees_any, highest[...] + jnp.log(denominator), jnp.inf).T[:1]


def dq_kernel(
    spans: Spans,
    blocks: Blocks,
    lse: Any,
    delta: Any,
    d_out: Any,
    dq: Any,
    column: Any,
    lse_sublanes: Any,
    delta_sublanes: Any,
    acc: Any,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Outer axis: row tiles; inner axis: key tiles.

    Scratch: `column`, `lse_sublanes`, `delta_sublanes` `[rows, LANES]`, `acc` shaped like q.
    """
    inner = pl.program_id(2)

    @pl.when(inner == 0)
    def start():
        column[...] = to_sublanes(blocks.column[...])
        lse_sublanes[...] = to_sublanes(lse[...])
        delta_sublanes[...] = to_sublanes(delta[...])
        acc[...] = jnp.zeros_like(acc)

    @pl.when(is_live(spans, row_axis=1, key_axis=2))
    def step():
        interval = blocks.born[...], blocks.evicted_at[...]
        scores = scores_of(blocks.q[...], blocks.k[...], scale, softcap)
        weights = jnp.exp(masked(scores, column[:, :1], *interval) - lse_sublanes[:, :1])
        d_weights = product(d_out[...], blocks.v[...], transposed=True)
        d_scores = through_cap(weights * (d_weights - delta_sublanes[:, :1]), scores, softcap)
        acc[...] += product(d_scores.astype(blocks.k.dtype), blocks.k[...])

    @pl.when(inner == pl.num_programs(2) - 1)
    def finish():
        # Scaled once, not per tile.
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
    softcap: float | None,
) -> None:
    """Outer axis: key tiles; inner axis: row tiles; scores `[keys, rows]`.

    Scratch: `born`, `evicted_at` `[keys, LANES]`.
    """
    inner = pl.program_id(2)

    @pl.when(inner == 0)
    def start():
        # Keys are along sublanes here and rows along lanes: per-row vectors need no transpose.
        born[...] = to_sublanes(blocks.born[...])
        evicted_at[...] = to_sublanes(blocks.evicted_at[...])
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    @pl.when(is_live(spans, row_axis=2, key_axis=1))
    def step():
        interval = born[:, :1], evicted_at[:, :1]
        scores = scores_of(blocks.k[...], blocks.q[...], scale, softcap)
        weights = jnp.exp(masked(scores, blocks.column[...], *interval) - lse[...])
        d_weights = product(blocks.v[...], d_out[...], transposed=True)
        d_scores = through_cap(weights * (d_weights - delta[...]), scores, softcap)
        # The outputs of a key tile stay in vector memory until its last row tile; they are float32 and hold the sums.
        dv[...] += product(weights.astype(d_out.dtype), d_out[...])
        dk[...] += product(d_scores.astype(blocks.q.dtype), blocks.q[...])

    @pl.when(inner == pl.num_programs(2) - 1)
    def finish():
        dk[...] *= scale


def float32_shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def row_scratch(walk: Walk, head_dim: int) -> tuple[Any, ...]:
    """Scratch of a pass over row tiles: an int32 and two float32 numbers per row, along sublanes; sums like q."""
    vectors = (pltpu.VMEM((walk.rows, LANES), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32))
    return *vectors, pltpu.VMEM((walk.rows, head_dim), jnp.float32)


def backward_operands(walk: Walk, lse: Array, delta: Array, d_out: Array) -> tuple[Operand, ...]:
    """lse, delta and d_out for the backward passes, padded to whole tiles."""
    # Zeros pad lse too: the column of a padded row is negative, so all its scores are -inf.
    lse, delta, d_out = (pad_rows(x, walk.rows, 0) for x in (lse, delta, d_out))
    vector = walk.vector(True)
    matrix = walk.matrix(True, d_out.shape[2])
    return Operand(lse[:, None], vector), Operand(delta[:, None], vector), Operand(d_out, matrix)


@dataclass(frozen=True)
class MosaicTpuKernel:
    """`BlockKernel` for TPUs: bfloat16 or float32, head_dim 64 or 128.

    Attributes:
      sizes: largest tiles, rounded up to multiples of 128. Rows and keys are split evenly into as few tiles as
        possible. `stages` is 1 or 2.
      softcap: scores are squeezed into ±softcap by tanh; None: no cap.
      interpret: True or parameters run the kernel in an interpreter of Pallas, on any device; for tests.

    Raises:
      ValueError: `sizes.stages` is neither 1 nor 2.
    """

    sizes: BlockSizes = TPU_SIZES
    interpret: bool | pltpu.InterpretParams = False
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.sizes.stages not in (1, 2):
            raise ValueError(f"expected sizes.stages to be 1 or 2; got {self.sizes.stages}")

    def _walk(self, blocks: Blocks, rows: int, keys: int, *, rows_outside: bool) -> Walk:
        """The grid for tiles of at most `rows` by `keys`."""
        rows = even(blocks.q.shape[1], rows, LANES)
        keys = even(blocks.k.shape[1], keys, LANES)
        row_tiles = pl.cdiv(blocks.q.shape[1], rows)
        key_tiles = pl.cdiv(blocks.k.shape[1], keys)
        return Walk(rows, keys, row_tiles, key_tiles, rows_outside, self.sizes.stages)

    def _pad(self, blocks: Blocks, rows: int, keys: int, *, rows_outside: bool) -> tuple[Walk, Blocks]:
        """The grid for tiles of at most `rows` by `keys`, and the blocks padded to whole tiles."""
        walk = self._walk(blocks, rows, keys, rows_outside=rows_outside)
        return walk, pad_blocks(blocks, walk.rows, walk.keys)

    def _max_blocks(self, blocks: Blocks) -> int:
        """Most blocks per call whose skip tables fit into scalar memory in every pass; at least 1, as `run` checks."""
        s = self.sizes
        passes = (s.rows, s.keys, True), (s.rows_dq, s.keys_dq, True), (s.rows_dkv, s.keys_dkv, False)
        walks = (self._walk(blocks, rows, keys, rows_outside=outside) for rows, keys, outside in passes)
        return max(min(SCALAR_MEMORY // table_bytes(1, walk) for walk in walks), 1)

    def forward(self, blocks: Blocks) -> tuple[Any, Any]:
        """See `BlockKernel.forward`; lse is float32.

        Raises:
          ValueError: an unsupported dtype or head_dim, or a block whose skip tables do not fit into scalar memory.
        """
        _check(blocks)
        return in_groups(self._forward, self._max_blocks(blocks), blocks)

    def _forward(self, blocks: Blocks) -> tuple[Any, Any]:
        length = blocks.q.shape[1]
        walk, blocks = self._pad(blocks, self.sizes.rows, self.sizes.keys, rows_outside=True)
        count, rows, head_dim = blocks.q.shape
        out = Operand(jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype), walk.matrix(True, head_dim))
        lse = Operand(float32_shape(count, 1, rows), walk.vector(True))
        scratch = row_scratch(walk, head_dim)
        out, lse = run(forward_kernel, walk, blocks, (), (out, lse), scratch, 2, self.interpret, self.softcap)
        return out[:, :length], lse[:, 0, :length]

    def backward(self, blocks: Blocks, out: Any, lse: Any, d_out: Any) -> tuple[Any, Any, Any]:
        """See `BlockKernel.backward`; dk and dv are float32. Raises ValueError like `forward`."""
        _check(blocks)
        # The term that the softmax gradient subtracts in each row, without a pass over the keys.
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
        return in_groups(self._backward, self._max_blocks(blocks), blocks, lse, delta, d_out.astype(blocks.q.dtype))

    def _backward(self, blocks: Blocks, lse: Array, delta: Array, d_out: Array) -> tuple[Any, Any, Any]:
        return self._dq(blocks, lse, delta, d_out), *self._dkv(blocks, lse, delta, d_out)

    def _dq(self, blocks: Blocks, lse: Array, delta: Array, d_out: Array) -> Array:
        length = blocks.q.shape[1]
        walk, blocks = self._pad(blocks, self.sizes.rows_dq, self.sizes.keys_dq, rows_outside=True)
        head_dim = blocks.q.shape[2]
        dq = Operand(jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype), walk.matrix(True, head_dim))
        inputs = backward_operands(walk, lse, delta, d_out)
        scratch = row_scratch(walk, head_dim)
        (dq,) = run(dq_kernel, walk, blocks, inputs, (dq,), scratch, 3, self.interpret, self.softcap)
        return dq[:, :length]

    def _dkv(self, blocks: Blocks, lse: Array, delta: Array, d_out: Array) -> tuple[Array, Array]:
        length = blocks.k.shape[1]
        walk, blocks = self._pad(blocks, self.sizes.rows_dkv, self.sizes.keys_dkv, rows_outside=False)
        d_key = Operand(float32_shape(*blocks.k.shape), walk.matrix(False, blocks.k.shape[2]))
        scratch = (pltpu.VMEM((walk.keys, LANES), jnp.int32),) * 2
        inputs = backward_operands(walk, lse, delta, d_out)
        dk, dv = run(dkv_kernel, walk, blocks, inputs, (d_key, d_key), scratch, 4, self.interpret, self.softcap)
        return dk[:, :length], dv[:, :length]
