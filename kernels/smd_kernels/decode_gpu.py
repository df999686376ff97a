"""Decode attention on Hopper GPUs in Pallas Mosaic GPU: one thread block of 128 threads per row and KV head.

One ring of TMA tiles reads K and V once: all tiles of K, then all tiles of V, so that V is prefetched during the
softmax. Keys are the M rows of a wgmma tile; the group's queries, padded to 8, are its N columns: scores^T = K q^T and
out^T = V^T weights^T waste no rows on a small group. The scores of all slots stay in shared memory, so the softmax is
exact: weights are normalised before they are rounded for the second product, and `received` sums them in float32.

    K tile 0 | K tile 1 | … | maximum, sum | V tile 0 | V tile 1 | …        each step frees the buffer for the
    scores[0]  scores[1]                     weights 0 -> received, out     tile `stages` steps later

Results do not depend on the order of thread blocks: they are bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from smd_kernels.hardware import DECODE_KEYS, DECODE_STAGES, GPU_GROUP, decode_tiles

WIDTH = GPU_GROUP  # columns of scores^T: the group's queries, padded
# Finite, so that a row without valid slots has no inf - inf; `softmax` sets masked slots to 0.
MASKED = float(jnp.finfo(jnp.float32).min)


def decode_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    interpret: Any = None,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """See `smd_kernels.decode.decode_attention`; for inputs that `hardware.why_not_decode` accepts.

    Args:
      interpret: None, or parameters of JAX's interpreter of GPU kernels, for tests without a GPU.
    """
    batch, kv_heads, slots, head_dim = k.shape
    group = q.shape[1] // kv_heads
    tiles = decode_tiles(slots)
    # Only small arrays are padded: queries to the tile width, validity to whole tiles. TMA pads K and V with zeros.
    grouped = jnp.pad(q.reshape(batch, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, WIDTH - group), (0, 0)))
    live = jnp.pad(valid.astype(jnp.float32), ((0, 0), (0, 0), (0, tiles * DECODE_KEYS - slots)))
    out, received = plgpu.kernel(
        partial(_kernel, group=group),
        out_type=(
            jax.ShapeDtypeStruct((batch, kv_heads, head_dim, WIDTH), q.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, tiles, DECODE_KEYS), jnp.float32),
        ),
        scratch_types=_scratch(tiles, head_dim),
        grid=(batch, kv_heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="decode_attention",
    )(grouped, k, v, live.reshape(batch, kv_heads, tiles, DECODE_KEYS))
    out = jnp.swapaxes(out, 2, 3)[:, :, :group].reshape(q.shape)
    return out, received.reshape(batch, kv_heads, tiles * DECODE_KEYS)[:, :, :slots]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a thread block.

    Attributes:
      ring: `[stages, keys, head_dim]`, the tile of step i at index `i % stages`. arrived: a barrier per stage.
      queries: `[8, head_dim]`. live: `[tiles, keys]` float32, 1 in valid slots. started: barrier of both.
      scores: `[tiles, keys, 8]` float32. weights: `[8, keys]`, of the current tile of V.
    """

    ring: Any
    arrived: Any
    queries: Any
    live: Any
    started: Any
    scores: Any
    weights: Any


def _scratch(tiles: int, head_dim: int) -> _Scratch:
    tiled = partial(
        plgpu.SMEM, dtype=jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )
    return _Scratch(
        ring=tiled((DECODE_STAGES, DECODE_KEYS, head_dim)),
        arrived=plgpu.Barrier(num_barriers=DECODE_STAGES),
        queries=tiled((WIDTH, head_dim)),
        live=plgpu.SMEM((tiles, DECODE_KEYS), jnp.float32),
        # One arrival each for the copies of `queries` and `live`.
        started=plgpu.Barrier(num_arrivals=2),
        scores=plgpu.SMEM((tiles, DECODE_KEYS, WIDTH), jnp.float32),
        weights=tiled((WIDTH, DECODE_KEYS)),
    )


def _kernel(q_ref, k_ref, v_ref, live_ref, out_ref, received_ref, *scratch, group: int) -> None:
    """Refs in main memory: q `[batch, kv_heads, 8, head_dim]`, k and v `[batch, kv_heads, slots, head_dim]`, live and
    received float32 `[batch, kv_heads, tiles, keys]`, out `[batch, kv_heads, head_dim, 8]`."""
    here = (jax.lax.axis_index("row"), jax.lax.axis_index("head"))
    smem = _Scratch(*scratch)
    tiles = live_ref.shape[2]
    plgpu.copy_gmem_to_smem(q_ref.at[here], smem.queries, smem.started)
    plgpu.copy_gmem_to_smem(live_ref.at[here], smem.live, smem.started)
    ring = Ring(k_ref.at[here], v_ref.at[here], smem.ring, smem.arrived, tiles)
    ring.fill()
    plgpu.barrier_wait(smem.started)
    start = _as_wgmma(jnp.full(smem.scores.shape[1:], MASKED, jnp.float32))
    highest = jax.lax.fori_loop(0, tiles, partial(own_scores, ring, smem, smem.queries, 0), start)
    weights_of = softmax(smem, highest, tiles, group, received_ref.at[here])

    def multiply(acc):
        jax.lax.fori_loop(0, tiles, partial(own_outputs, acc, ring, smem.weights, weights_of, 0), None)
        return acc[...]

    out = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((k_ref.shape[3], WIDTH), jnp.float32))
    out_ref[here] = out.astype(out_ref.dtype)


@dataclass(frozen=True)
class Ring:
    """Prefetches tiles to shared memory: step i loads tile i of K, step `tiles + i` tile i of V.

    Attributes:
      buffers: `[stages, keys, …]`. arrived: a barrier per stage.
    """

    k: Any
    v: Any
    buffers: Any
    arrived: Any
    tiles: int

    def fill(self) -> None:
        for step in range(self.buffers.shape[0]):
            self._start(jnp.int32(step))

    def wait(self, step: Array) -> Any:
        """Waits for the tile of a step and returns it, `[keys, head_dim]`; call `release` after its last use."""
        index = jax.lax.rem(step, self.buffers.shape[0])
        plgpu.barrier_wait(self.arrived.at[index])
        return self.buffers.at[index]

    def release(self, step: Array) -> None:
        self._start(step + self.buffers.shape[0])

    def _start(self, step: Array) -> None:
        # The steps of K, then those of V; none after the last tile of V.
        pl.when(step < self.tiles)(lambda: self._copy(self.k, step, step))
        pl.when((step >= self.tiles) & (step < 2 * self.tiles))(lambda: self._copy(self.v, step - self.tiles, step))

    def _copy(self, source: Any, tile: Array, step: Array) -> None:
        stages, keys = self.buffers.shape[:2]
        index = jax.lax.rem(step, stages)
        plgpu.copy_gmem_to_smem(source.at[pl.ds(tile * keys, keys)], self.buffers.at[index], self.arrived.at[index])


def own_scores(ring: Ring, smem: Any, queries: Any, before: int, tile: Array, highest: Array) -> Array:
    """Writes the scores of a tile in full precision, number `before + tile`; returns the running maximum."""
    highest = keep_scores(smem, ring.wait(tile), queries, before + tile, highest)
    ring.release(tile)
    return highest


def keep_scores(smem: Any, part: Any, queries: Any, tile: Array, highest: Array) -> Array:
    """Writes the scores of a tile of keys; returns the elementwise running maximum, `[keys, 8]`.

    Args:
      smem: scratch with the fields `scores` and `live`.
    """

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, part, _transposed(queries))
        return acc[...]

    acc = plgpu.WGMMAAccumulatorRef((highest.shape[0], WIDTH), jnp.float32)
    scores = pl.run_scoped(multiply, acc) * queries.shape[1] ** -0.5
    live = plgpu.layout_cast(smem.live[tile], plgpu.Layout.WGMMA.reduce(1))
    scores = jnp.where(_spread(live, scores.shape, 0) != 0, scores, MASKED)
    smem.scores[tile] = scores
    # Elementwise: `softmax` reduces the rows once.
    return jnp.maximum(highest, scores)


def softmax(smem: Any, highest: Array, tiles: int, group: int, received_ref: Any) -> Callable[[Array], Array]:
    """The function that returns the weights of a tile, `[keys, 8]` float32, and writes their sums over the queries."""
    highest = _spread(jnp.max(highest, axis=0), highest.shape, 1)

    def exponentials(tile: Array) -> Array:
        # 0 where masked, so that a row without valid slots sums to 0.
        scores = _as_wgmma(smem.scores[tile])
        return jnp.where(scores > MASKED, jnp.exp(scores - highest), 0.0)

    zeros = _as_wgmma(jnp.zeros(highest.shape, jnp.float32))
    total = jax.lax.fori_loop(0, tiles, lambda tile, sums: sums + exponentials(tile), zeros)
    total = _spread(jnp.sum(total, axis=0), total.shape, 1)
    # Padded queries have weights too; dividing by infinity sets them to 0.
    column = _as_wgmma(jax.lax.broadcasted_iota(jnp.int32, total.shape, 1))
    total = jnp.where(column < group, jnp.where(total > 0, total, 1.0), jnp.inf)

    def weights_of(tile: Array) -> Array:
        weights = exponentials(tile) / total
        # Summed before rounding.
        received_ref[tile] = jnp.sum(weights, axis=1)
        return weights

    return weights_of


def own_outputs(acc: Any, ring: Ring, buffer: Any, weights_of: Any, before: int, tile: Array, _: None) -> None:
    """Adds V^T weights^T of a tile in full precision to `acc` `[head_dim, 8]`."""
    weights = weights_of(before + tile)
    multiply_weights(acc, ring.wait(tile + ring.tiles), buffer, weights)
    ring.release(tile + ring.tiles)


def multiply_weights(acc: Any, values: Any, buffer: Any, weights: Array) -> None:
    """Adds values^T weights^T to `acc`; `buffer` holds the rounded weights."""
    _transposed(buffer)[...] = plgpu.layout_cast(weights.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    # wgmma sees the threads' writes to shared memory only after a commit.
    plgpu.commit_smem()
    plgpu.wgmma(acc, _transposed(values), _transposed(buffer))
    # The product must finish before its operands are overwritten.
    plgpu.wgmma_wait(0)


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _as_wgmma(x: Array) -> Array:
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def _spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcasts a vector along `axis` over the other axis."""
    return jax.lax.broadcast_in_dim(x, shape, (axis,))
