"""Block attention on Hopper GPUs in Pallas Mosaic GPU: forward pass and `BlockKernel`.

Scores stay in registers. A program holds one tile of rows and loops over the key tiles that the rows may see, with the
online softmax of FlashAttention (arXiv 2205.14135) in base 2; it masks only partly visible tiles. TMA prefetches; wgmma
multiplies in 16 bits and adds in float32. The backward pass is in `gpu_backward`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from smd_kernels import gpu_tiles as tiles
from smd_kernels.blocks import Blocks, BlockSizes, pad_blocks, pad_rows
from smd_kernels.gpu_backward import BackwardInputs, key_gradients, query_gradient
from smd_kernels.gpu_tiles import LANES, LONGEST_COPY, LOWEST, MOST_WARPGROUPS, Product, Ring, across, down
from smd_kernels.hardware import GPU_SIZES, why_not_blocks, why_not_mixed
from smd_kernels.pytrees import any_leaves


@dataclass(frozen=True)
class MosaicGpuKernel:
    """`BlockKernel` for Hopper GPUs: bfloat16 or float16, head_dim 64 or 128.

    Attributes:
      sizes: tile sizes, multiples of 64. `rows`, `rows_dq` and `keys_dkv` use one warpgroup per 64, at most seven.
        The other sizes are at most 256, the longest tile that TMA copies. Warpgroups share the registers, and larger
        values of the other sizes need more of them: with too few the compiler spills or fails
        (`experiments/compile_kernels.py` reports spills).
      interpret: False, or parameters of JAX's interpreter of GPU kernels, for tests without a GPU.

    Raises:
      ValueError: a tile size is not a multiple of 64, needs more warpgroups than a thread block has, or
        is longer than a copy.
    """

    sizes: BlockSizes = GPU_SIZES
    interpret: Any = False

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "rows_dq", "keys_dq", "rows_dkv", "keys_dkv"):
            if (size := vars(self.sizes)[name]) % LANES:
                raise ValueError(f"expected {name} to be a multiple of {LANES}; got {size}")
        # Each warpgroup copies its own 64 rows of the outer tile; the inner tile is one copy.
        for names, most in (
            (("rows", "rows_dq", "keys_dkv"), MOST_WARPGROUPS * LANES),
            (("keys", "keys_dq", "rows_dkv"), LONGEST_COPY),
        ):
            for name in names:
                if (size := vars(self.sizes)[name]) > most:
                    raise ValueError(f"expected {name} <= {most}; got {size}")

    def forward(self, blocks: Blocks) -> tuple[Float[Array, "blocks rows head_dim"], Float[Array, "blocks rows"]]:
        """See `BlockKernel.forward`; lse is float32.

        Raises:
          ValueError: an unsupported dtype or head_dim; or, interpreted, too few host threads.
        """
        _check(blocks)
        rows = blocks.q.shape[1]
        sizes = fit_sizes(self.sizes, blocks)
        padded = pad_blocks(blocks, sizes.rows, sizes.keys)
        out, lse = _forward(padded, sizes, self.interpret)
        return out[:, :rows], lse[:, :rows]

    def backward(
        self,
        blocks: Blocks,
        out: Float[Array, "blocks rows head_dim"],
        lse: Float[Array, "blocks rows"],
        d_out: Float[Array, "blocks rows head_dim"],
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel.backward`; dk and dv are float32. Raises ValueError like `forward`.

        Two passes without atomics: results are bitwise reproducible.
        """
        _check(blocks)
        rows = blocks.q.shape[1]
        keys = blocks.k.shape[1]
        sizes = fit_sizes(self.sizes, blocks)
        inputs = _backward_inputs(blocks, out, lse, d_out, sizes)
        dq = query_gradient(inputs, sizes, self.interpret)
        dk, dv = key_gradients(inputs, sizes, self.interpret)
        return dq[:, :rows], dk[:, :keys], dv[:, :keys]


def _check(blocks: Blocks) -> None:
    q, k, v, *_ = blocks
    if reason := why_not_mixed(q.dtype, k.dtype, v.dtype) or why_not_blocks("mosaic_gpu", q.dtype, q.shape[-1]):
        raise ValueError(reason)


def fit_sizes(sizes: BlockSizes, blocks: Blocks) -> BlockSizes:
    """Reduces tile sizes to the lengths of the blocks."""
    rows, keys = (-(-x.shape[1] // LANES) * LANES for x in (blocks.q, blocks.k))
    return replace(
        sizes,
        rows=min(sizes.rows, rows),
        rows_dq=min(sizes.rows_dq, rows),
        rows_dkv=min(sizes.rows_dkv, rows),
        keys=min(sizes.keys, keys),
        keys_dq=min(sizes.keys_dq, keys),
        keys_dkv=min(sizes.keys_dkv, keys),
    )


def _backward_inputs(blocks: Blocks, out: Array, lse: Array, d_out: Array, sizes: BlockSizes) -> BackwardInputs:
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    # Both passes read the same padded arrays in tiles of different lengths.
    rows = math.lcm(sizes.rows_dq, sizes.rows_dkv)
    return BackwardInputs(
        blocks=pad_blocks(blocks, rows, math.lcm(sizes.keys_dq, sizes.keys_dkv)),
        lse2=pad_rows(lse * math.log2(math.e), rows, jnp.inf),
        delta=pad_rows(delta, rows, 0.0),
        d_out=pad_rows(d_out.astype(blocks.q.dtype), rows, 0.0),
    )


@any_leaves
class Scratch(NamedTuple):
    """Shared memory of the forward pass; `q` holds the output at the end. `loaded` has a barrier per warpgroup."""

    q: Any
    column: Any
    lse: Any
    loaded: Any
    keys: Ring  # k, born, evicted_at
    values: Ring  # v


def _forward(blocks: Blocks, sizes: BlockSizes, interpret: Any) -> tuple[Array, Array]:
    count, rows, head_dim = blocks.q.shape
    warpgroups = sizes.rows // LANES
    row_tiles = rows // sizes.rows
    matrix = partial(tiles.matrices, head_dim=head_dim, dtype=blocks.q.dtype)
    bounds = tiles.vectors(sizes.stages, sizes.keys, jnp.int32)
    scratch = Scratch(
        q=matrix(warpgroups, LANES),
        column=tiles.vectors(warpgroups, LANES, jnp.int32),
        lse=tiles.vectors(warpgroups, LANES, jnp.float32),
        # One arrival each for the copies of `q` and `column`.
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
        keys=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.keys), bounds, bounds),
        values=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.keys)),
    )
    kernel = partial(_forward_kernel, sizes=sizes, interpret=bool(interpret))
    out = jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype), jax.ShapeDtypeStruct((count, rows), jnp.float32)
    run = tiles.launch(kernel, out, scratch, count * row_tiles, warpgroups, interpret)
    return run(tiles.walks(blocks, sizes.rows, sizes.keys), blocks)


def _forward_kernel(
    walks: Any, blocks: Blocks, out: Any, lse: Any, s: Scratch, *, sizes: BlockSizes, interpret: bool
) -> None:
    block, tile, walk = tiles.own_tile(walks, blocks.q.shape[1] // sizes.rows)
    head_dim = blocks.q.shape[-1]
    narrow = blocks.q.dtype
    shape = (LANES, sizes.keys)
    # exp(x) = exp2(x log2(e)): one factor scales the scores and changes the base.
    base2 = head_dim**-0.5 * math.log2(math.e)
    product = partial(tiles.products, interpret=interpret)

    def fetch() -> None:
        k, v, born, evicted_at = (x.at[block] for x in (blocks.k, blocks.v, blocks.born, blocks.evicted_at))
        tiles.fetch(walk, sizes.keys, [(s.keys, (k, born, evicted_at)), (s.values, (v,))])

    def compute(number: Any) -> None:
        q = s.q.at[number]
        column = s.column.at[number]
        own = (block, pl.ds(tile * sizes.rows + number * LANES, LANES))
        tiles.load(s.loaded.at[number], (blocks.q.at[own], q), (blocks.column.at[own], column))

        def step(i: Any, carry: tuple[Any, Any, Any], *, masked: bool) -> tuple[Any, Any, Any]:
            highest, total, acc = carry
            slot = lax.rem(i, sizes.stages)
            k, born, evicted_at = (x.at[slot] for x in s.keys.buffers)
            plgpu.barrier_wait(s.keys.ready.at[slot])
            (scores,) = product(Product(q, k, transposed=True))
            if masked:
                rows = down(column[...], shape)
                visible = (across(born[...], shape) <= rows) & (rows < across(evicted_at[...], shape))
                scores = jnp.where(visible, scores, -jnp.inf)
            # k and its interval have been read: their buffers can be refilled during the softmax.
            tiles.release(s.keys.done.at[slot], by_threads=masked or interpret)
            new = jnp.maximum(highest, scores.max(axis=1) * base2)
            # `new` is finite (`LOWEST`) even before the first visible key: -inf - new is -inf, a weight of 0.
            weights = jnp.exp2(scores * base2 - down(new, shape))
            decay = jnp.exp2(highest - new)
            total = total * decay + weights.sum(axis=1)
            acc = acc * down(decay, acc.shape)
            plgpu.barrier_wait(s.values.ready.at[slot])
            (acc,) = product(Product(weights.astype(narrow), s.values.buffers[0].at[slot]), onto=(acc,))
            tiles.release(s.values.done.at[slot], by_threads=interpret)
            return new, total, acc

        nothing = jnp.full((LANES,), LOWEST, jnp.float32), jnp.zeros((LANES,), jnp.float32)
        highest, total, acc = walk.run(step, (*nothing, jnp.zeros((LANES, head_dim), jnp.float32)))
        sees_none = total == 0
        total = jnp.where(sees_none, 1.0, total)
        # The buffer of the queries is reused for the output, which TMA stores from there.
        q[...] = (acc * down(1.0 / total, acc.shape)).astype(narrow)
        # `highest` is in base 2, lse is the natural log.
        s.lse[number] = jnp.where(sees_none, jnp.inf, highest * math.log(2) + jnp.log(total))
        tiles.store((q, out.at[own]), (s.lse.at[number], lse.at[own]))

    tiles.program(sizes.rows // LANES, compute, fetch)
