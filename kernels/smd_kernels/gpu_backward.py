"""Backward pass of block attention on Hopper GPUs: one kernel for dq, one for dk and dv.

Both recompute the weights from lse, as in FlashAttention-2 (arXiv 2307.08691):

    weights = exp(scale * q k^T - lse)        d_scores = weights * (d_out v^T - delta),   delta = rowsum(out * d_out)
    dq = scale * d_scores k        dk = scale * d_scores^T q        dv = weights^T d_out

The dq kernel holds a tile of rows and loops over keys. The dk and dv kernel holds a tile of keys and loops over rows,
with transposed score tiles.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from smd_kernels import gpu_tiles as tiles
from smd_kernels.blocks import Blocks, BlockSizes
from smd_kernels.gpu_tiles import LANES, Product, Ring, across, down
from smd_kernels.pytrees import any_leaves


@any_leaves
class BackwardInputs(NamedTuple):
    """Inputs of both kernels.

    Attributes:
      blocks: padded to multiples of the tile sizes of both kernels.
      lse2: `[blocks, rows]` float32, base-2 log of the softmax denominators; inf in a row that sees no key.
      delta: `[blocks, rows]` float32, see above.
      d_out: `[blocks, rows, head_dim]`, gradient of the output in the dtype of q.
    """

    blocks: Blocks
    lse2: Any
    delta: Any
    d_out: Any


@any_leaves
class QueryScratch(NamedTuple):
    """Shared memory of the dq pass; `q` holds dq at the end. `loaded` has a barrier per warpgroup."""

    q: Any
    d_out: Any
    column: Any
    lse2: Any
    delta: Any
    loaded: Any
    keys: Ring  # k, born, evicted_at
    values: Ring  # v


@any_leaves
class KeyScratch(NamedTuple):
    """Shared memory of the dk and dv pass. `loaded` has a barrier per warpgroup."""

    k: Any
    v: Any
    born: Any
    evicted_at: Any
    loaded: Any
    queries: Ring  # q, column, lse2
    gradients: Ring  # d_out, delta


def query_gradient(inputs: BackwardInputs, sizes: BlockSizes, interpret: Any) -> Float[Array, "blocks rows head_dim"]:
    """Returns dq in the dtype of q."""
    blocks = inputs.blocks
    count, rows, head_dim = blocks.q.shape
    warpgroups = sizes.rows_dq // LANES
    row_tiles = rows // sizes.rows_dq
    matrix = partial(tiles.matrices, head_dim=head_dim, dtype=blocks.q.dtype)
    bounds = tiles.vectors(sizes.stages, sizes.keys_dq, jnp.int32)
    per_row = tiles.vectors(warpgroups, LANES, jnp.float32)
    scratch = QueryScratch(
        q=matrix(warpgroups, LANES),
        d_out=matrix(warpgroups, LANES),
        column=tiles.vectors(warpgroups, LANES, jnp.int32),
        lse2=per_row,
        delta=per_row,
        # One arrival per array that `compute` loads: q, d_out, column, lse2, delta.
        loaded=plgpu.Barrier(num_arrivals=5, num_barriers=warpgroups),
        keys=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.keys_dq), bounds, bounds),
        values=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.keys_dq)),
    )
    kernel = partial(_query_kernel, sizes=sizes, interpret=bool(interpret))
    out = jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype)
    run = tiles.launch(kernel, out, scratch, count * row_tiles, warpgroups, interpret)
    return run(tiles.walks(blocks, sizes.rows_dq, sizes.keys_dq), inputs)


def _query_kernel(
    walks: Any, inputs: BackwardInputs, dq: Any, s: QueryScratch, *, sizes: BlockSizes, interpret: bool
) -> None:
    blocks = inputs.blocks
    block, tile, walk = tiles.own_tile(walks, blocks.q.shape[1] // sizes.rows_dq)
    head_dim = blocks.q.shape[-1]
    narrow = blocks.q.dtype
    shape = (LANES, sizes.keys_dq)
    product = partial(tiles.products, interpret=interpret)

    def fetch() -> None:
        k, v, born, evicted_at = (x.at[block] for x in (blocks.k, blocks.v, blocks.born, blocks.evicted_at))
        tiles.fetch(walk, sizes.keys_dq, [(s.keys, (k, born, evicted_at)), (s.values, (v,))])

    def compute(number: Any) -> None:
        own = (block, pl.ds(tile * sizes.rows_dq + number * LANES, LANES))
        buffers = [x.at[number] for x in (s.q, s.d_out, s.column, s.lse2, s.delta)]
        sources = [x.at[own] for x in (blocks.q, inputs.d_out, blocks.column, inputs.lse2, inputs.delta)]
        tiles.load(s.loaded.at[number], *zip(sources, buffers, strict=True))
        q, d_out, column, lse2, delta = buffers

        def step(i: Any, total: Any, *, masked: bool) -> Any:
            slot = lax.rem(i, sizes.stages)
            k, born, evicted_at = (x.at[slot] for x in s.keys.buffers)
            v = s.values.buffers[0].at[slot]
            plgpu.barrier_wait(s.keys.ready.at[slot])
            plgpu.barrier_wait(s.values.ready.at[slot])
            scores, d_weights = product(Product(q, k, transposed=True), Product(d_out, v, transposed=True))
            # The last read of v; k is still needed for dq.
            tiles.release(s.values.done.at[slot], by_threads=interpret)
            if masked:
                rows = down(column[...], shape)
                visible = (across(born[...], shape) <= rows) & (rows < across(evicted_at[...], shape))
                scores = jnp.where(visible, scores, -jnp.inf)
            weights = jnp.exp2(scores * (head_dim**-0.5 * math.log2(math.e)) - down(lse2[...], shape))
            d_scores = weights * (d_weights - down(delta[...], shape))
            (total,) = product(Product(d_scores.astype(narrow), k), onto=(total,))
            tiles.release(s.keys.done.at[slot], by_threads=masked or interpret)
            return total

        total = walk.run(step, jnp.zeros((LANES, head_dim), jnp.float32))
        # Scaled once, not per tile. The buffer of the queries is reused for the output.
        q[...] = (total * head_dim**-0.5).astype(narrow)
        tiles.store((q, dq.at[own]))

    tiles.program(sizes.rows_dq // LANES, compute, fetch)


def key_gradients(
    inputs: BackwardInputs, sizes: BlockSizes, interpret: Any
) -> tuple[Float[Array, "blocks keys head_dim"], Float[Array, "blocks keys head_dim"]]:
    """dk and dv, in float32."""
    blocks = inputs.blocks
    count, keys, head_dim = blocks.k.shape
    warpgroups = sizes.keys_dkv // LANES
    key_tiles = keys // sizes.keys_dkv
    matrix = partial(tiles.matrices, head_dim=head_dim, dtype=blocks.q.dtype)
    own_bounds = tiles.vectors(warpgroups, LANES, jnp.int32)
    column = tiles.vectors(sizes.stages, sizes.rows_dkv, jnp.int32)
    per_row = tiles.vectors(sizes.stages, sizes.rows_dkv, jnp.float32)
    scratch = KeyScratch(
        k=matrix(warpgroups, LANES),
        v=matrix(warpgroups, LANES),
        born=own_bounds,
        evicted_at=own_bounds,
        # One arrival per array that `compute` loads: k, v, born, evicted_at.
        loaded=plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups),
        queries=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.rows_dkv), column, per_row),
        gradients=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.rows_dkv), per_row),
    )
    kernel = partial(_key_kernel, sizes=sizes, interpret=bool(interpret))
    out = (jax.ShapeDtypeStruct(blocks.k.shape, jnp.float32),) * 2
    run = tiles.launch(kernel, out, scratch, count * key_tiles, warpgroups, interpret)
    return run(tiles.walks(blocks, sizes.rows_dkv, sizes.keys_dkv, of_keys=True), inputs)


def _key_kernel(
    walks: Any, inputs: BackwardInputs, dk: Any, dv: Any, s: KeyScratch, *, sizes: BlockSizes, interpret: bool
) -> None:
    blocks = inputs.blocks
    block, tile, walk = tiles.own_tile(walks, blocks.k.shape[1] // sizes.keys_dkv)
    head_dim = blocks.q.shape[-1]
    narrow = blocks.q.dtype
    shape = (LANES, sizes.rows_dkv)
    product = partial(tiles.products, interpret=interpret)

    def fetch() -> None:
        q, column, lse2 = (x.at[block] for x in (blocks.q, blocks.column, inputs.lse2))
        d_out, delta = (x.at[block] for x in (inputs.d_out, inputs.delta))
        tiles.fetch(walk, sizes.rows_dkv, [(s.queries, (q, column, lse2)), (s.gradients, (d_out, delta))])

    def compute(number: Any) -> None:
        own = (block, pl.ds(tile * sizes.keys_dkv + number * LANES, LANES))
        buffers = [x.at[number] for x in (s.k, s.v, s.born, s.evicted_at)]
        sources = [x.at[own] for x in (blocks.k, blocks.v, blocks.born, blocks.evicted_at)]
        tiles.load(s.loaded.at[number], *zip(sources, buffers, strict=True))
        k, v, born, evicted_at = buffers

        def step(i: Any, totals: tuple[Any, ...], *, masked: bool) -> tuple[Any, ...]:
            slot = lax.rem(i, sizes.stages)
            q, column, lse2 = (x.at[slot] for x in s.queries.buffers)
            d_out, delta = (x.at[slot] for x in s.gradients.buffers)
            plgpu.barrier_wait(s.queries.ready.at[slot])
            plgpu.barrier_wait(s.gradients.ready.at[slot])
            scores, d_weights = product(Product(k, q, transposed=True), Product(v, d_out, transposed=True))
            if masked:
                columns = across(column[...], shape)
                visible = (down(born[...], shape) <= columns) & (columns < down(evicted_at[...], shape))
                scores = jnp.where(visible, scores, -jnp.inf)
            weights = jnp.exp2(scores * (head_dim**-0.5 * math.log2(math.e)) - across(lse2[...], shape))
            d_scores = weights * (d_weights - across(delta[...], shape))
            factors = Product(d_scores.astype(narrow), q), Product(weights.astype(narrow), d_out)
            totals = product(*factors, onto=totals)
            # Threads have read column, lse2 and delta; one commit is for both stages.
            tiles.release(s.queries.done.at[slot], by_threads=True)
            tiles.release(s.gradients.done.at[slot], by_threads=False)
            return totals

        nothing = jnp.zeros((LANES, head_dim), jnp.float32)
        k_total, v_total = walk.run(step, (nothing, nothing))
        dk[own] = k_total * head_dim**-0.5
        dv[own] = v_total

    tiles.program(sizes.keys_dkv // LANES, compute, fetch)
