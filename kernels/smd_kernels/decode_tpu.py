"""Decode attention on TPUs in Pallas: one program per row and KV head, which holds all of its slots in VMEM.

A step costs as much as reading K and V; the grid's pipeline prefetches the next head's slots. All scores are in VMEM,
so the softmax takes one pass and `received` costs nothing extra.

A TPU stores the last axis in tiles of 128: with a `head_dim` of 64, half of the cache would be padding, also in main
memory. For such head dims the kernel takes K and V as `[head_dim, slots]`. XLA chooses that layout for the cache of a
rollout, so that swapping the axes moves no data.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from smd_kernels.hardware import TPU_LANES


def decode_attention(
    q: Float[Array, "batch heads 1 head_dim"],
    k: Float[Array, "batch kv_heads slots head_dim"],
    v: Float[Array, "batch kv_heads slots head_dim"],
    valid: Bool[Array, "batch kv_heads slots"],
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "batch heads 1 head_dim"], Float[Array, "batch kv_heads slots"]]:
    """See `smd_kernels.decode.decode_attention`; for inputs that `hardware.why_not_decode` accepts.

    Args:
      interpret: True or parameters run the kernel in an interpreter of Pallas, on any device; for tests.
    """
    batch, kv_heads, slots, head_dim = k.shape
    group = q.shape[1] // kv_heads
    slots_last = head_dim % TPU_LANES != 0
    if slots_last:
        k = jnp.swapaxes(k, 2, 3)
        v = jnp.swapaxes(v, 2, 3)
    spec = partial(pl.BlockSpec, index_map=lambda row, head: (row, head, 0, 0))
    of_heads = spec((None, None, group, head_dim))
    of_slots = spec((None, None, 1, slots))
    of_keys = spec((None, None, *k.shape[2:]))
    out, received = pl.pallas_call(
        partial(_kernel, slots_axis=1 if slots_last else 0),
        grid=(batch, kv_heads),
        in_specs=[of_heads, of_keys, of_keys, of_slots],
        out_specs=[of_heads, of_slots],
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, 1, slots), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="decode_attention",
    )(q.reshape(batch, kv_heads, group, head_dim), k, v, valid[:, :, None].astype(jnp.int32))
    return out.reshape(q.shape), received[:, :, 0]


def _kernel(q_ref, k_ref, v_ref, valid_ref, out_ref, received_ref, *, slots_axis: int) -> None:
    """Kernel body.

    Refs: q, out `[group, head_dim]`; k, v `[slots, head_dim]`, or `[head_dim, slots]` with `slots_axis` 1; valid int32
    and received float32 `[1, slots]`.
    """
    scores = dot(q_ref[...], k_ref[...], (1, 1 - slots_axis)) * q_ref.shape[1] ** -0.5
    valid = jnp.broadcast_to(valid_ref[...], scores.shape) != 0
    # Masked scores are finite, so that a row without valid slots has no inf - inf.
    scores = jnp.where(valid, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(valid, jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True)), 0.0)
    total = jnp.sum(weights, axis=1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    # Normalised and summed in float32 before rounding for the product, as in the other implementations.
    received_ref[...] = jnp.sum(weights, axis=0, keepdims=True)
    out_ref[...] = dot(weights.astype(v_ref.dtype), v_ref[...], (1, slots_axis)).astype(out_ref.dtype)


def dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Contracts one axis of each, summed in float32.

    float32 inputs are multiplied in full precision, which is not the TPU's default. bfloat16 ones name the default,
    because Mosaic cannot multiply them in the full precision that `jax_default_matmul_precision` may ask for.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
