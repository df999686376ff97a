"""Quantised keys and values as decode attention reads them: codes packed into bytes, and the range of each code.

    code c of a key      low[group, channel] + c * scale[group, channel]      `group` of the slot, from a table
    code c of a value    low[slot, part] + c * scale[slot, part]              `part` of head_dim that has the channel

A byte packs 8 / bits codes, the first in its lowest bits. Shifting and masking the bytes of a slot once per code in a
byte gives *planes*: each has every (8 / bits)-th channel. At 4 bits, with 8 channels:

    bytes      1|0  3|2  5|4  7|6          channels, the high bits first
    plane 0     0    2    4    6           bytes & 15
    plane 1     1    3    5    7           bytes >> 4
    by plane    0 2 4 6 1 3 5 7            channel order in which a kernel unpacks codes without moving them

A sum over channels does not depend on their order: kernels take queries and return outputs by plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from smd_kernels.pytrees import any_leaves

BYTE = 8


@any_leaves
@partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "group", "key_low", "key_scale", "value_low", "value_scale"),
    meta_fields=("bits",),
)
@dataclass(frozen=True)
class Codes:
    """Quantised slots of one layer's cache.

    Attributes:
      keys, values: `[batch, kv_heads, slots, head_dim * bits / 8 rounded up]` packed codes.
      group: `[batch, kv_heads, slots]` group of each slot's key; any valid group in an empty slot.
      key_low, key_scale: `[batch, kv_heads, groups, head_dim]` ranges of the keys.
      value_low, value_scale: `[batch, kv_heads, slots, parts]` ranges of the values; `parts` divides `head_dim`.
      bits: bits per code: 8, 4 or 2. Static.
    """

    keys: UInt8[Array, "batch kv_heads slots bytes"]
    values: UInt8[Array, "batch kv_heads slots bytes"]
    group: Int[Array, "batch kv_heads slots"]
    key_low: Float[Array, "batch kv_heads groups head_dim"]
    key_scale: Float[Array, "batch kv_heads groups head_dim"]
    value_low: Float[Array, "batch kv_heads slots parts"]
    value_scale: Float[Array, "batch kv_heads slots parts"]
    bits: int

    @property
    def head_dim(self) -> int:
        return self.key_low.shape[3]

    @property
    def groups(self) -> int:
        return self.key_low.shape[2]

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    @property
    def parts(self) -> int:
        """Ranges per value."""
        return self.value_low.shape[3]

    def dequantized(self) -> tuple[Array, Array]:
        """Returns keys and values `[batch, kv_heads, slots, head_dim]` in the dtype of the ranges."""

        def of_slots(table: Array) -> Array:
            return jnp.take_along_axis(table, self.group[..., None], axis=2, mode="promise_in_bounds")

        def of_channels(x: Array) -> Array:
            return jnp.repeat(x, self.head_dim // self.parts, axis=3)

        # The last byte may hold unused codes; `head_dim` cuts them off.
        keys, values = (unpack(x, self.bits, self.head_dim) for x in (self.keys, self.values))
        keys = dequantize(keys, of_slots(self.key_low), of_slots(self.key_scale))
        return keys, dequantize(values, of_channels(self.value_low), of_channels(self.value_scale))


def unpack(packed: UInt8[Array, "*lead bytes"], bits: int, count: int) -> UInt8[Array, "*lead {count}"]:
    """Unpacks the first `count` codes of 1, 2, 4 or 8 bits."""
    each = BYTE // bits
    # A shift per channel: an extra axis for the codes of a byte takes XLA:CPU twice as long.
    shifts = (jnp.arange(count) % each * bits).astype(jnp.uint8).reshape((1,) * (packed.ndim - 1) + (-1,))
    return (jnp.repeat(packed, each, axis=-1)[..., :count] >> shifts) & jnp.uint8(2**bits - 1)


def dequantize(
    codes: UInt8[Array, "*lead channels"], low: Float[Array, "*lead channels"], scale: Float[Array, "*lead channels"]
) -> Float[Array, "*lead channels"]:
    """Returns `low + codes * scale` in the dtype of `low`; computed in float32 or wider."""
    wide = jnp.promote_types(low.dtype, jnp.float32)
    return (low.astype(wide) + codes.astype(wide) * scale.astype(wide)).astype(low.dtype)


def by_plane(head_dim: int, bits: int) -> np.ndarray:
    """Channel numbers `[head_dim]` in plane order; `head_dim * bits` must be a multiple of 8."""
    return np.arange(head_dim).reshape(-1, BYTE // bits).T.reshape(-1)
