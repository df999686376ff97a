"""Block attention on Hopper GPUs, written with Pallas for its Mosaic GPU compiler: forward pass and entry points.

Scores never leave the registers: a program keeps one tile of rows, walks the key tiles that they may see with the
running softmax of FlashAttention (arXiv 2205.14135) in base 2, and masks only tiles that are not seen whole. TMA
fetches ahead; wgmma multiplies in the inputs' 16 bits and adds in float32. The backward pass is in `gpu_backward`.
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
from smd_kernels.gpu_backward import Given, key_gradients, query_gradient
from smd_kernels.gpu_tiles import LANES, LOWEST, Product, Ring, across, down
from smd_kernels.hardware import GPU_SIZES, why_not_blocks
from smd_kernels.pytrees import any_leaves


@dataclass(frozen=True)
class MosaicGpuKernel:
    """See `smd_kernels.blocks.BlockKernel`.

    Attributes:
      sizes: tiles, multiples of 64. `rows`, `rows_dq` and `keys_dkv` have a warpgroup for each 64; the others take
        registers, and where these do not suffice the compiler spills (`experiments/compile_kernels.py` finds out).
      interpret: False, or the parameters of JAX's interpreter for GPU kernels, for tests on a machine without one.
    """

    sizes: BlockSizes = GPU_SIZES
    interpret: Any = False

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "rows_dq", "keys_dq", "rows_dkv", "keys_dkv"):
            if (size := vars(self.sizes)[name]) % LANES:
                raise ValueError(f"expected {name} to be a multiple of {LANES}; got {size}")

    def forward(self, blocks: Blocks) -> tuple[Float[Array, "blocks rows head_dim"], Float[Array, "blocks rows"]]:
        """Raises ValueError for queries that the kernel is not made for."""
        _check(blocks)
        rows = blocks.q.shape[1]
        sizes = fitting(self.sizes, blocks)
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
        """In two passes, so that every sum has one owner and no atomics: the same bits each time.

        Raises ValueError as `forward` does.
        """
        _check(blocks)
        rows = blocks.q.shape[1]
        keys = blocks.k.shape[1]
        sizes = fitting(self.sizes, blocks)
        given = _given(blocks, out, lse, d_out, sizes)
        dq = query_gradient(given, sizes, self.interpret)
        dk, dv = key_gradients(given, sizes, self.interpret)
        return dq[:, :rows], dk[:, :keys], dv[:, :keys]


def _check(blocks: Blocks) -> None:
    if reason := why_not_blocks("mosaic_gpu", blocks.q.dtype, blocks.q.shape[-1]):
        raise ValueError(reason)


def fitting(sizes: BlockSizes, blocks: Blocks) -> BlockSizes:
    """Sizes with no tile longer than the blocks need."""
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


def _given(blocks: Blocks, out: Array, lse: Array, d_out: Array, sizes: BlockSizes) -> Given:
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    # Both passes read the same padded arrays, in tiles of their own lengths.
    rows = math.lcm(sizes.rows_dq, sizes.rows_dkv)
    return Given(
        blocks=pad_blocks(blocks, rows, math.lcm(sizes.keys_dq, sizes.keys_dkv)),
        lse2=pad_rows(lse * math.log2(math.e), rows, jnp.inf),
        delta=pad_rows(delta, rows, 0.0),
        d_out=pad_rows(d_out.astype(blocks.q.dtype), rows, 0.0),
    )


@any_leaves
class Scratch(NamedTuple):
    """Shared memory of the forward pass; `q` holds the output at the end. `loaded`: a barrier per warpgroup."""

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
        # Two arrivals: the copies of `q` and `column`.
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
    # exp(x) is exp2(x log2(e)): one factor scales the scores and changes the base.
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
            # k and its interval have been read: their buffers may be filled again while the softmax goes on.
            plgpu.barrier_arrive(s.keys.done.at[slot])
            new = jnp.maximum(highest, scores.max(axis=1) * base2)
            # `new` is finite even where no key is visible yet (`LOWEST`): -inf less it is -inf, a weight of 0.
            weights = jnp.exp2(scores * base2 - down(new, shape))
            shrink = jnp.exp2(highest - new)
            total = total * shrink + weights.sum(axis=1)
            acc = acc * down(shrink, acc.shape)
            plgpu.barrier_wait(s.values.ready.at[slot])
            (acc,) = product(Product(weights.astype(narrow), s.values.buffers[0].at[slot]), onto=(acc,))
            plgpu.barrier_arrive(s.values.done.at[slot])
            return new, total, acc

        nothing = jnp.full((LANES,), LOWEST, jnp.float32), jnp.zeros((LANES,), jnp.float32)
        highest, total, acc = walk.run(step, (*nothing, jnp.zeros((LANES, head_dim), jnp.float32)))
        blind = total == 0
        total = jnp.where(blind, 1.0, total)
        # The queries are not needed any more: their buffer takes the output, from which TMA stores it.
        q[...] = (acc / down(total, acc.shape)).astype(narrow)
        # `highest` is to base 2; the lse is natural.
        s.lse[number] = jnp.where(blind, jnp.inf, highest * math.log(2) + jnp.log(total))
        tiles.store((q, out.at[own]), (s.lse.at[number], lse.at[own]))

    tiles.program(sizes.rows // LANES, compute, fetch)
