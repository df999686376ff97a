"""Backward pass of block attention on Hopper GPUs: one kernel for dq, one for dk and dv.

Both compute the weights again from the logs of the denominators, as FlashAttention-2 does (arXiv 2307.08691):

    weights = exp(scale * q k^T - lse)        d_scores = weights * (d_out v^T - delta),   delta = rowsum(out * d_out)
    dq = scale * d_scores k        dk = scale * d_scores^T q        dv = weights^T d_out

dq keeps a tile of rows and walks the keys; dk and dv keep a tile of keys and walk the rows, with all tiles transposed.
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
class Given(NamedTuple):
    """What both kernels read.

    Attributes:
      blocks: padded, so that all sizes of tiles divide them.
      lse2: `[blocks, rows]` float32, log to base 2 of the softmax denominators, inf in a row that sees nothing.
      delta: `[blocks, rows]` float32.
      d_out: `[blocks, rows, head_dim]`, of the dtype of q.
    """

    blocks: Blocks
    lse2: Any
    delta: Any
    d_out: Any


@any_leaves
class QueryScratch(NamedTuple):
    """Shared memory of the dq pass; `q` holds dq at the end. `loaded`: a barrier per warpgroup."""

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
    """Shared memory of the pass for dk and dv. `loaded`: a barrier per warpgroup."""

    k: Any
    v: Any
    born: Any
    evicted_at: Any
    loaded: Any
    queries: Ring  # q, column, lse2
    gradients: Ring  # d_out, delta


def query_gradient(given: Given, sizes: BlockSizes, interpret: Any) -> Float[Array, "blocks rows head_dim"]:
    """dq, in the dtype of q."""
    blocks = given.blocks
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
        # An arrival for each array that `compute` loads: q, d_out, column, lse2, delta.
        loaded=plgpu.Barrier(num_arrivals=5, num_barriers=warpgroups),
        keys=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.keys_dq), bounds, bounds),
        values=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.keys_dq)),
    )
    kernel = partial(_query_kernel, sizes=sizes, interpret=bool(interpret))
    out = jax.ShapeDtypeStruct(blocks.q.shape, blocks.q.dtype)
    run = tiles.launch(kernel, out, scratch, count * row_tiles, warpgroups, interpret)
    return run(tiles.walks(blocks, sizes.rows_dq, sizes.keys_dq), given)


def _query_kernel(walks: Any, given: Given, dq: Any, s: QueryScratch, *, sizes: BlockSizes, interpret: bool) -> None:
    blocks = given.blocks
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
        sources = [x.at[own] for x in (blocks.q, given.d_out, blocks.column, given.lse2, given.delta)]
        tiles.load(s.loaded.at[number], *zip(sources, buffers, strict=True))
        q, d_out, column, lse2, delta = buffers

        def step(i: Any, total: Any, *, masked: bool) -> Any:
            slot = lax.rem(i, sizes.stages)
            k, born, evicted_at = (x.at[slot] for x in s.keys.buffers)
            v = s.values.buffers[0].at[slot]
            plgpu.barrier_wait(s.keys.ready.at[slot])
            plgpu.barrier_wait(s.values.ready.at[slot])
            scores, d_weights = product(Product(q, k, transposed=True), Product(d_out, v, transposed=True))
            # v has been read for the last time; k is still needed for dq.
            plgpu.barrier_arrive(s.values.done.at[slot])
            if masked:
                rows = down(column[...], shape)
                visible = (across(born[...], shape) <= rows) & (rows < across(evicted_at[...], shape))
                scores = jnp.where(visible, scores, -jnp.inf)
            weights = jnp.exp2(scores * (head_dim**-0.5 * math.log2(math.e)) - down(lse2[...], shape))
            d_scores = weights * (d_weights - down(delta[...], shape))
            (total,) = product(Product(d_scores.astype(narrow), k), onto=(total,))
            plgpu.barrier_arrive(s.keys.done.at[slot])
            return total

        total = walk.run(step, jnp.zeros((LANES, head_dim), jnp.float32))
        # The scale is applied once to the sum, not to every tile; the buffer of the queries takes the output.
        q[...] = (total * head_dim**-0.5).astype(narrow)
        tiles.store((q, dq.at[own]))

    tiles.program(sizes.rows_dq // LANES, compute, fetch)


def key_gradients(
    given: Given, sizes: BlockSizes, interpret: Any
) -> tuple[Float[Array, "blocks keys head_dim"], Float[Array, "blocks keys head_dim"]]:
    """dk and dv, in float32."""
    blocks = given.blocks
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
        # An arrival for each array that `compute` loads: k, v, born, evicted_at.
        loaded=plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups),
        queries=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.rows_dkv), column, per_row),
        gradients=tiles.ring(sizes.stages, warpgroups, matrix(sizes.stages, sizes.rows_dkv), per_row),
    )
    kernel = partial(_key_kernel, sizes=sizes, interpret=bool(interpret))
    out = (jax.ShapeDtypeStruct(blocks.k.shape, jnp.float32),) * 2
    run = tiles.launch(kernel, out, scratch, count * key_tiles, warpgroups, interpret)
    return run(tiles.walks(blocks, sizes.rows_dkv, sizes.keys_dkv, of_keys=True), given)


def _key_kernel(
    walks: Any, given: Given, dk: Any, dv: Any, s: KeyScratch, *, sizes: BlockSizes, interpret: bool
) -> None:
    blocks = given.blocks
    block, tile, walk = tiles.own_tile(walks, blocks.k.shape[1] // sizes.keys_dkv)
    head_dim = blocks.q.shape[-1]
    narrow = blocks.q.dtype
    shape = (LANES, sizes.rows_dkv)
    product = partial(tiles.products, interpret=interpret)

    def fetch() -> None:
        q, column, lse2 = (x.at[block] for x in (blocks.q, blocks.column, given.lse2))
        d_out, delta = (x.at[block] for x in (given.d_out, given.delta))
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
            plgpu.barrier_arrive(s.queries.done.at[slot])
            plgpu.barrier_arrive(s.gradients.done.at[slot])
            return totals

        nothing = jnp.zeros((LANES, head_dim), jnp.float32)
        k_total, v_total = walk.run(step, (nothing, nothing))
        dk[own] = k_total * head_dim**-0.5
        dv[own] = v_total

    tiles.program(sizes.keys_dkv // LANES, compute, fetch)
