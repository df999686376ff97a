"""Decode attention to a quantised cache on Hopper GPUs in Pallas Mosaic GPU.

One thread block of 128 threads per row and KV head, with the products and the softmax of `smd_kernels.decode_gpu`. TMA
loads tiles of codes. The threads dequantise them in registers and write them in bfloat16 to one tile of shared memory,
which wgmma reads. "Own" below are the slots in full precision.

    K codes 0 | … | own K 0 | … | maximum, sum | V codes 0 | … | own V 0 | …
      scores        scores                       weights -> received, out

Keys have the range of their group. Threads cannot index rows of a table in shared memory, but a one-hot matrix times
the table is exact. Shared memory holds the whole table.

A value has one range per part of head_dim. The scales are multiplied into the weights, separately for each part, and
sum(weight * low) is added at the end.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from smd_kernels import decode_gpu as plain
from smd_kernels.codes import BYTE, Codes, by_plane
from smd_kernels.decode_gpu import MASKED, WIDTH, Ring, _as_wgmma, _spread
from smd_kernels.hardware import DECODE_KEYS, DECODE_STAGES, decode_tiles, plane_tile

GROUPS = 64  # table rows per product
# `plgpu.load` takes an index before JAX 0.12.
WHOLE = ((),) if "idx" in signature(plgpu.load).parameters else ()


def decode_codes_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    codes: Codes,
    k: Float[Array, "batch kv_heads precise head_dim"],
    v: Float[Array, "batch kv_heads precise head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    interpret: Any = None,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """See `smd_kernels.decode_codes.decode_codes_attention`; for inputs that `hardware.why_not_decode_codes` accepts.

    Args:
      interpret: None, or parameters of JAX's interpreter of GPU kernels, for tests without a GPU.
    """
    batch, kv_heads, precise, head_dim = k.shape
    group = q.shape[1] // kv_heads
    slots = codes.slots
    tiles, own_tiles = decode_tiles(slots), decode_tiles(precise)
    order = by_plane(head_dim, codes.bits)

    def in_tiles(x: Array, count: int) -> Array:
        """Pads the last axis to whole tiles and splits it."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * DECODE_KEYS - x.shape[-1])])
        return x.reshape(*x.shape[:-1], count, DECODE_KEYS)

    queries = jnp.pad(q.reshape(batch, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, WIDTH - group), (0, 0)))
    seen = valid.astype(jnp.float32)
    live = jnp.concatenate([in_tiles(seen[..., :slots], tiles), in_tiles(seen[..., slots:], own_tiles)], axis=2)
    # Table, ranges and queries are small: XLA reorders their channels. TMA copies rows in multiples of 8.
    more = ((0, 0), (0, 0), (0, -codes.groups % 8), (0, 0))
    table = [jnp.pad(x[..., order], more) for x in (codes.key_low, codes.key_scale)]
    # [batch, kv_heads, tiles, parts, keys]: the ranges of a tile and part are contiguous.
    ranges = [in_tiles(jnp.swapaxes(x, 2, 3), tiles).swapaxes(2, 3) for x in (codes.value_low, codes.value_scale)]
    planes, own, received = plgpu.kernel(
        partial(_kernel, group=group, bits=codes.bits),
        out_type=(
            jax.ShapeDtypeStruct((batch, kv_heads, head_dim, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, head_dim, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct(live.shape, jnp.float32),
        ),
        scratch_types=_scratch(tiles + own_tiles, codes),
        grid=(batch, kv_heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="decode_codes_attention",
    )(
        queries[..., order],
        queries,
        codes.keys,
        codes.values,
        in_tiles(codes.group.astype(jnp.float32), tiles),
        *table,
        *ranges,
        k,
        v,
        live,
    )
    # Both terms are float32; their sum is rounded once.
    out = own + planes[:, :, np.argsort(order)]
    out = jnp.swapaxes(out, 2, 3)[:, :, :group].reshape(q.shape).astype(q.dtype)
    left, right = (
        x.reshape(batch, kv_heads, -1)[..., :count]
        for x, count in ((received[:, :, :tiles], slots), (received[:, :, tiles:], precise))
    )
    return out, jnp.concatenate([left, right], axis=2)


class _Scratch(NamedTuple):
    """Shared memory and barriers of a thread block.

    Attributes:
      codes: `[stages, keys, bytes]`. own: `[stages, keys, head_dim]`. wide: `[keys, head_dim]`, the current tile in
        bfloat16.
      queries, own_queries: `[8, head_dim]`, by plane and in channel order. low, scale: `[groups, head_dim]`, by plane.
      group: `[tiles, keys]` float32. live: `[all tiles, keys]` float32, 1 in valid slots. started: barrier of the
        arrays that are read once.
      value_low, value_scale: `[parts, keys]`, of the current tile of values. ranged: their barrier.
      scores: `[all tiles, keys, 8]` float32. weights: `[8, keys]`, of the current tile and part. own_weights: the same
        for a tile in full precision.
    """

    codes: Any
    codes_arrived: Any
    own: Any
    own_arrived: Any
    wide: Any
    queries: Any
    own_queries: Any
    low: Any
    scale: Any
    group: Any
    live: Any
    started: Any
    value_low: Any
    value_scale: Any
    ranged: Any
    scores: Any
    weights: Any
    own_weights: Any


def _scratch(all_tiles: int, codes: Codes) -> _Scratch:
    keys, head_dim = DECODE_KEYS, codes.head_dim
    groups = -(-codes.groups // GROUPS) * GROUPS

    def tiled(shape: tuple[int, ...], width: int) -> Any:
        # Both operands of a product have the same swizzle, in tiles that do not cross planes.
        transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    width = plane_tile(head_dim, codes.bits)
    own = 64
    return _Scratch(
        codes=plgpu.SMEM((DECODE_STAGES, keys, codes.keys.shape[3]), jnp.uint8),
        codes_arrived=plgpu.Barrier(num_barriers=DECODE_STAGES),
        own=tiled((2, keys, head_dim), own),
        own_arrived=plgpu.Barrier(num_barriers=2),
        wide=tiled((keys, head_dim), width),
        queries=tiled((WIDTH, head_dim), width),
        own_queries=tiled((WIDTH, head_dim), own),
        low=tiled((groups, head_dim), width),
        scale=tiled((groups, head_dim), width),
        group=plgpu.SMEM((decode_tiles(codes.slots), keys), jnp.float32),
        live=plgpu.SMEM((all_tiles, keys), jnp.float32),
        started=plgpu.Barrier(num_arrivals=6),
        value_low=plgpu.SMEM((codes.parts, keys), jnp.bfloat16),
        value_scale=plgpu.SMEM((codes.parts, keys), jnp.bfloat16),
        ranged=plgpu.Barrier(num_arrivals=2),
        scores=plgpu.SMEM((all_tiles, keys, WIDTH), jnp.float32),
        weights=tiled((WIDTH, keys), width),
        own_weights=tiled((WIDTH, keys), own),
    )


class _Inputs(NamedTuple):
    """Arrays in main memory of this row and head; shaped like the scratch of the same name."""

    queries: Any
    own_queries: Any
    keys: Any
    values: Any
    group: Any
    low: Any
    scale: Any
    value_low: Any
    value_scale: Any
    k: Any
    v: Any
    live: Any


def _kernel(*refs: Any, group: int, bits: int) -> None:
    """Kernel body; refs of `_Inputs`, of the outputs (by plane, own, received), and of `_Scratch`."""
    here = (jax.lax.axis_index("row"), jax.lax.axis_index("head"))
    count = len(_Inputs._fields)
    inputs = _Inputs(*(x.at[here] for x in refs[:count]))
    out_ref, own_ref, received_ref = (x.at[here] for x in refs[count : count + 3])
    smem = _Scratch(*refs[count + 3 :])
    # TMA fills rows beyond the table with zeros. JAX 0.12 refuses a slice that is known to end beyond an array.
    table = pl.ds(here[0] * 0, smem.low.shape[0])
    for source, target in (
        (inputs.queries, smem.queries),
        (inputs.own_queries, smem.own_queries),
        (inputs.low.at[table], smem.low),
        (inputs.scale.at[table], smem.scale),
        (inputs.group, smem.group),
        (inputs.live, smem.live),
    ):
        plgpu.copy_gmem_to_smem(source, target, smem.started)
    tiles = inputs.group.shape[0]
    own_tiles = inputs.live.shape[0] - tiles
    ring = Ring(inputs.keys, inputs.values, smem.codes, smem.codes_arrived, tiles)
    own = Ring(inputs.k, inputs.v, smem.own, smem.own_arrived, own_tiles)
    ring.fill()
    own.fill()
    plgpu.barrier_wait(smem.started)
    highest = _as_wgmma(jnp.full(smem.scores.shape[1:], MASKED, jnp.float32))
    highest = jax.lax.fori_loop(0, tiles, partial(_codes_scores, ring, smem, bits), highest)
    highest = jax.lax.fori_loop(0, own_tiles, partial(plain.own_scores, own, smem, smem.own_queries, tiles), highest)
    weights_of = plain.softmax(smem, highest, tiles + own_tiles, group, received_ref)
    head_dim = smem.wide.shape[1]
    parts = smem.value_low.shape[0]
    # Output row -> part of head_dim that its channel belongs to; the same in every plane.
    row = _as_wgmma(jax.lax.broadcasted_iota(jnp.int32, (head_dim, WIDTH), 0))
    each = BYTE // bits
    plane = head_dim // each
    part_of_row = (row - row // plane * plane) // (plane // parts)

    def multiply_codes(*accs: Any) -> Array:
        lows = _codes_outputs(accs, ring, smem, inputs, bits, weights_of, tiles)
        out = _as_wgmma(jnp.zeros((head_dim, WIDTH), jnp.float32))
        for part, (acc, low) in enumerate(zip(accs, lows, strict=True)):
            of_part = acc[...] + _spread(jnp.sum(low, axis=0), (head_dim, WIDTH), 1)
            out = jnp.where(part_of_row == part, of_part, out)
        return out

    acc = plgpu.WGMMAAccumulatorRef((head_dim, WIDTH), jnp.float32)
    out_ref[...] = pl.run_scoped(multiply_codes, *[acc] * parts)

    def multiply_own(acc: Any) -> Array:
        jax.lax.fori_loop(0, own_tiles, partial(plain.own_outputs, acc, own, smem.own_weights, weights_of, tiles), None)
        return acc[...]

    own_ref[...] = pl.run_scoped(multiply_own, acc)


def _bytes(part: Any) -> Array:
    """Loads the bytes of a tile as int32, in the layout of their codes."""
    # Not the fastest load: in the layout that TMA writes, threads may have bank conflicts.
    return _as_wgmma(plgpu.load(part, *WHOLE, optimized=False)).astype(jnp.int32)


def _unpacked(packed: Array, plane: int, bits: int) -> Array:
    """Unpacks one plane of bytes `[keys, bytes]` to float32."""
    if bits == BYTE:
        return packed.astype(jnp.float32)
    return ((packed >> (plane * bits)) & (2**bits - 1)).astype(jnp.float32)


def _codes_scores(ring: Ring, smem: _Scratch, bits: int, tile: Array, highest: Array) -> Array:
    """Writes the scores of a tile of codes; returns the elementwise running maximum, `[keys, 8]`."""
    keys, head_dim = smem.wide.shape
    packed = _bytes(ring.wait(tile))
    groups = plgpu.layout_cast(smem.group[tile], plgpu.Layout.WGMMA.reduce(1))
    groups = _spread(groups, (keys, GROUPS), 0)
    width = head_dim * bits // BYTE
    for plane in range(BYTE // bits):
        columns = pl.ds(plane * width, width)

        def pick(table: Any, columns: Any = columns) -> Array:
            def multiply(acc: Any) -> Array:
                for first in range(0, table.shape[0], GROUPS):
                    row = _as_wgmma(jax.lax.broadcasted_iota(jnp.int32, (keys, GROUPS), 1)).astype(jnp.float32)
                    picked = jnp.where(row + first == groups, 1.0, 0.0).astype(jnp.bfloat16)
                    plgpu.wgmma(acc, picked, table.at[pl.ds(first, GROUPS), columns])
                return acc[...]

            return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((keys, width), jnp.float32))

        wide = pick(smem.low) + _unpacked(packed, plane, bits) * pick(smem.scale)
        smem.wide.at[:, columns][...] = wide.astype(jnp.bfloat16)
    # wgmma sees the threads' writes to shared memory only after a commit, and the next copy waits for their reads.
    plgpu.commit_smem()
    ring.release(tile)
    return plain.keep_scores(smem, smem.wide, smem.queries, tile, highest)


def _codes_outputs(
    accs: tuple[Any, ...], ring: Ring, smem: _Scratch, inputs: _Inputs, bits: int, weights_of: Any, tiles: int
) -> list[Array]:
    """Adds codes^T (weights * scale)^T of each part to its accumulator `[head_dim, 8]`.

    Returns:
      For each part, weight * low summed over the tiles, `[keys, 8]`.
    """
    keys, head_dim = smem.wide.shape
    width = head_dim * bits // BYTE

    def body(tile: Array, lows: list[Array]) -> list[Array]:
        plgpu.copy_gmem_to_smem(inputs.value_low.at[tile], smem.value_low, smem.ranged)
        plgpu.copy_gmem_to_smem(inputs.value_scale.at[tile], smem.value_scale, smem.ranged)
        weights = weights_of(tile)
        packed = _bytes(ring.wait(tile + tiles))
        for plane in range(BYTE // bits):
            # Codes are integers below 256, which bfloat16 represents exactly.
            smem.wide.at[:, pl.ds(plane * width, width)][...] = _unpacked(packed, plane, bits).astype(jnp.bfloat16)
        # Threads have read the bytes; only a commit orders this before TMA's next copy.
        plgpu.commit_smem()
        ring.release(tile + tiles)
        plgpu.barrier_wait(smem.ranged)
        sums = []
        for part, acc in enumerate(accs):
            low, scale = (
                _spread(plgpu.layout_cast(x[part], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32), weights.shape, 0)
                for x in (smem.value_low, smem.value_scale)
            )
            sums.append(lows[part] + weights * low)
            plain.multiply_weights(acc, smem.wide, smem.weights, weights * scale)
        return sums

    zeros = _as_wgmma(jnp.zeros((keys, WIDTH), jnp.float32))
    return jax.lax.fori_loop(0, tiles, body, [zeros] * len(accs))
