"""Decode attention to a quantised cache on TPUs in Pallas: one program per row and KV head.

A TPU stores the last axis of an array in tiles of 128, so the 64 bytes or the few ranges of a slot would be padded. The
kernel takes such arrays with the slots last; XLA chooses that layout for the cache of a rollout.

The codes, ranges and full-precision slots of a head are in VMEM; the grid's pipeline prefetches those of the next head.
Keys and values are dequantised in VMEM only.

The range of a slot's key is a row of a table. A TPU has no gather over sublanes, but a one-hot matrix times the table
is exact. A second one-hot product spreads a value's ranges over the channels of their parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from smd_kernels.codes import BYTE, Codes, by_plane
from smd_kernels.decode_tpu import dot
from smd_kernels.hardware import TPU_LANES


def decode_codes_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    codes: Codes,
    k: Float[Array, "batch kv_heads precise head_dim"],
    v: Float[Array, "batch kv_heads precise head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """See `smd_kernels.decode_codes.decode_codes_attention`; for inputs that `hardware.why_not_decode_codes` accepts.

    Args:
      interpret: True or parameters run the kernel in an interpreter of Pallas, on any device; for tests.
    """
    batch, kv_heads, precise, head_dim = k.shape
    group = q.shape[1] // kv_heads
    slots = codes.slots
    order = by_plane(head_dim, codes.bits)
    queries = q.reshape(batch, kv_heads, group, head_dim)
    # One-hot: the part of head_dim that each channel belongs to, by plane.
    spread = order[:, None] // (head_dim // codes.parts) == np.arange(codes.parts)
    seen = valid[:, :, None].astype(jnp.int32)
    slots_last = head_dim % TPU_LANES != 0
    whole_tiles = codes.keys.shape[3] % TPU_LANES == 0
    inputs = (
        queries,
        queries[..., order],
        *((codes.keys, codes.values) if whole_tiles else (jnp.swapaxes(x, 2, 3) for x in (codes.keys, codes.values))),
        codes.group[:, :, None],
        # The table and the queries are small: XLA reorders their channels.
        codes.key_low[..., order],
        codes.key_scale[..., order],
        jnp.swapaxes(codes.value_low, 2, 3),
        jnp.swapaxes(codes.value_scale, 2, 3),
        jnp.swapaxes(k, 2, 3) if slots_last else k,
        jnp.swapaxes(v, 2, 3) if slots_last else v,
        seen[..., :slots],
        seen[..., slots:],
    )
    by_head = partial(pl.BlockSpec, index_map=lambda row, head: (row, head, 0, 0))
    whole = pl.BlockSpec(spread.shape, lambda row, head: (0, 0))
    results = (
        jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, kv_heads, 1, slots), jnp.float32),
        jax.ShapeDtypeStruct((batch, kv_heads, 1, precise), jnp.float32),
    )
    planes, own, received, own_received = pl.pallas_call(
        partial(_kernel, bits=codes.bits, codes_axis=0 if whole_tiles else 1, slots_axis=1 if slots_last else 0),
        grid=(batch, kv_heads),
        in_specs=[*(by_head((None, None, *x.shape[2:])) for x in inputs), whole],
        out_specs=[by_head((None, None, *x.shape[2:])) for x in results],
        out_shape=results,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="decode_codes_attention",
    )(*inputs, jnp.asarray(spread, q.dtype))
    # Both terms are float32; their sum is rounded once.
    out = own + planes[..., np.argsort(order)]
    received = jnp.concatenate([received, own_received], axis=3)
    return out.reshape(q.shape).astype(q.dtype), received[:, :, 0]


def _kernel(*refs: Any, bits: int, codes_axis: int, slots_axis: int) -> None:
    """Kernel body; refs in the order of `inputs` and `results` above, without the batch and head axes.

    Args:
      codes_axis: axis of the slots in arrays of codes. slots_axis: the same in keys and values in full precision.
    """
    (q, q_planes, keys, values, group, low, scale, value_low, value_scale, k, v, seen, own_seen, spread, *results) = (
        refs
    )
    out, own_out, received, own_received = results
    dtype = q.dtype
    highest = jnp.finfo(jnp.float32).min
    picked = jax.lax.broadcasted_iota(jnp.int32, (low.shape[0], group.shape[1]), 0) == group[...]
    picked = picked.astype(dtype)  # [groups, slots]
    lows, scales = (dot(x[...], picked, (0, 0)) for x in (low, scale))
    wide = (lows + _unpacked(keys, bits, codes_axis) * scales).astype(dtype)
    masked = seen[...] != 0
    own_masked = own_seen[...] != 0
    factor = q.shape[1] ** -0.5
    # Masked scores are finite, so that a row without valid slots has no inf - inf.
    scores = jnp.where(masked, dot(q_planes[...], wide, (1, 0)) * factor, highest)
    own = jnp.where(own_masked, dot(q[...], k[...], (1, 1 - slots_axis)) * factor, highest)
    most = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), jnp.max(own, axis=1, keepdims=True))
    weights = jnp.where(masked, jnp.exp(scores - most), 0.0)
    own = jnp.where(own_masked, jnp.exp(own - most), 0.0)
    total = jnp.sum(weights, axis=1, keepdims=True) + jnp.sum(own, axis=1, keepdims=True)
    total = jnp.where(total > 0, total, 1.0)
    weights = weights / total
    own = own / total
    # Normalised and summed in float32 before rounding for the product, as in the other implementations.
    received[...] = jnp.sum(weights, axis=0, keepdims=True)
    own_received[...] = jnp.sum(own, axis=0, keepdims=True)
    lows, scales = (dot(spread[...], x[...], (1, 0)) for x in (value_low, value_scale))
    wide = (lows + _unpacked(values, bits, codes_axis) * scales).astype(dtype)
    out[...] = dot(weights.astype(dtype), wide, (1, 1))
    own_out[...] = dot(own.astype(dtype), v[...], (1, slots_axis))


def _unpacked(packed: Any, bits: int, slots_axis: int) -> Array:
    """Unpacks codes to float32 `[head_dim, slots]`, by plane.

    Args:
      packed: `[bytes, slots]`, or `[slots, bytes]` with `slots_axis` 0.
    """
    # A TPU can neither shift bytes nor convert them to float32.
    wide = packed[...].astype(jnp.int32)
    planes = [(wide >> shift) & (2**bits - 1) for shift in range(0, BYTE, bits)]
    numbers = jnp.concatenate(planes, axis=1 - slots_axis).astype(jnp.float32)
    return numbers if slots_axis == 1 else numbers.T
