"""Keys and values in few bits, as decode attention reads them: codes packed into bytes, and the ranges they stand for.

    code c of a key      low[group, channel] + c * scale[group, channel]      the group of its slot, from a table
    code c of a value    low[slot, part] + c * scale[slot, part]              the part of head_dim its channel is in

Codes lie side by side in a byte, the first in its lowest bits. So the bytes of a slot, shifted and masked once for each
code of a byte, are *planes* of every so many-th channel. At 4 bits, with 8 channels:

    bytes      1|0  3|2  5|4  7|6          channels, the high bits first
    plane 0     0    2    4    6           bytes & 15
    plane 1     1    3    5    7           bytes >> 4
    by plane    0 2 4 6 1 3 5 7            the order of channels in which a kernel widens codes without moving any

A sum over channels is the same in any order: kernels take queries by plane, and give outputs by plane.
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
    """The slots of a layer's cache that are in few bits.

    Attributes:
      keys, values: `[batch, kv_heads, slots, head_dim * bits / 8 rounded up]`.
      group: `[batch, kv_heads, slots]` group of each slot's key; where a slot is empty, of any.
      key_low, key_scale: `[batch, kv_heads, groups, head_dim]`.
      value_low, value_scale: `[batch, kv_heads, slots, parts]`; parts divide head_dim.
      bits: of a code, 8, 4 or 2. Static.
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
        """Ranges that a slot's value has."""
        return self.value_low.shape[3]

    def widened(self) -> tuple[Array, Array]:
        """Keys and values `[batch, kv_heads, slots, head_dim]` in the dtype of the ranges."""

        def of_slots(table: Array) -> Array:
            return jnp.take_along_axis(table, self.group[..., None], axis=2)

        def of_channels(x: Array) -> Array:
            return jnp.repeat(x, self.head_dim // self.parts, axis=3)

        # A byte may be filled with codes that stand for nothing; `head_dim` cuts them off.
        keys, values = (unpack(x, self.bits, self.head_dim) for x in (self.keys, self.values))
        keys = dequantize(keys, of_slots(self.key_low), of_slots(self.key_scale))
        return keys, dequantize(values, of_channels(self.value_low), of_channels(self.value_scale))


def unpack(packed: UInt8[Array, "*lead bytes"], bits: int, count: int) -> UInt8[Array, "*lead {count}"]:
    """`count` codes of 1, 2, 4 or 8 bits, in their order."""
    shifts = jnp.arange(0, BYTE, bits, dtype=jnp.uint8).reshape((1,) * packed.ndim + (-1,))
    codes = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * BYTE // bits)[..., :count]


def dequantize(
    codes: UInt8[Array, "*lead channels"], low: Float[Array, "*lead channels"], scale: Float[Array, "*lead channels"]
) -> Float[Array, "*lead channels"]:
    """What codes stand for, in the dtype of `low`; computed in float32 or wider."""
    wide = jnp.promote_types(low.dtype, jnp.float32)
    return (low.astype(wide) + codes.astype(wide) * scale.astype(wide)).astype(low.dtype)


def by_plane(head_dim: int, bits: int) -> np.ndarray:
    """The channels in the order of the planes, `[head_dim]`; bytes have to be full."""
    return np.arange(head_dim).reshape(-1, BYTE // bits).T.reshape(-1)
