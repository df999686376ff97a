"""Quantisation of keys and values after KIVI (arXiv 2402.02750), and its replay in the learner.

A group of numbers with the range [low, high] becomes integers from 0 (low) to `2**bits - 1` (high):

    code = round((x - low) / scale)      scale = (high - low) / (2**bits - 1)      x is then read as low + code * scale

Keys are grouped by channel, over `group` consecutive columns, because their large channels are large in every token;
values by token, over `value_group` channels. Groups of keys end at the prompt's end, so left padding changes nothing:

    columns   . 0 1 2 3 | 4 5 6 7 8 9      prompt of 4 and a column of padding, `group` 3
    group     0 0 1 1 1 | 2 2 2 3 3 3

The learner's keys differ from the sampler's in the last bits, so an element halfway between two codes could round the
other way; at 2 bits this is a third of the range. So the sampler records one bit per element, the parity of its code,
and the learner takes the nearest code of that parity. The sampler's quotient is within 0.5 of its code, and the next
code of the same parity is 2 away. So a learner whose quotient differs by less than 0.5 finds the same code, at any
number of bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, UInt8

from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types
from smd_kernels.codes import BYTE, dequantize, unpack
from smd_kernels.copies import Copies
from smd_kernels.segments import Segments

Bits = Literal[8, 4, 2]


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """A quantised KV cache; static.

    Attributes:
      bits: size of a code: 8, 4 or 2.
      group: columns that share a key channel's range; must divide the rollout's buffer.
      value_group: channels that share a token's range; must divide head_dim, or be larger to include all channels.
    """

    bits: Bits
    group: int = 32
    value_group: int = 32

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("group", "value_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1; got {getattr(self, name)}")

    @property
    def highest(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    def channels(self, head_dim: int) -> int:
        """Channels of a value group.

        Raises:
          ValueError: if they do not divide `head_dim`.
        """
        size = min(self.value_group, head_dim)
        if head_dim % size:
            raise ValueError(f"expected a value_group that divides head_dim {head_dim}; got {self.value_group}")
        return size


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes."""
    return -(-count * bits // BYTE)


def pack(codes: UInt8[Array, "*lead count"], bits: int) -> UInt8[Array, "*lead bytes"]:
    """Packs codes of 1, 2, 4 or 8 bits, the first in a byte's lowest bits; zeros fill the last byte."""
    each = BYTE // bits
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    shifts = jnp.expand_dims(jnp.arange(0, BYTE, bits, dtype=jnp.uint8), range(codes.ndim))
    parts = codes.reshape(*codes.shape[:-1], -1, each) << shifts
    # Shifted codes share no bits, so their sum is their bitwise or.
    return jnp.sum(parts, axis=-1, dtype=jnp.uint8)


class Ranges(PyTreeNode):
    """Ranges of groups of keys or values, in their dtype: code c means `low + c * scale`.

    Attributes:
      low: minimum of a group.
      scale: step between two codes, 0 if all elements of a group are equal.
    """

    low: Float[Array, "batch kv_heads rows channels"]
    scale: Float[Array, "batch kv_heads rows channels"]


def key_ranges(
    keys: Float[Array, "batch kv_heads columns head_dim"],
    valid: Bool[Array, "#batch #kv_heads columns"],
    first: int,
    config: QuantConfig,
) -> Ranges:
    """The range of every channel of every group of columns, `[batch, kv_heads, groups, head_dim]`.

    Args:
      valid: false for columns without a key, which are ignored. A group without keys has the range [0, 0].
      first: a column at which a group begins, such as the prompt's width.
    """
    grouped, real = (by_group(x, first, config.group) for x in (keys, valid[..., None]))
    # Columns without a key must not widen a range: infinities are neutral for minimum and maximum.
    low = jnp.min(jnp.where(real, grouped, jnp.inf), axis=3)
    high = jnp.max(jnp.where(real, grouped, -jnp.inf), axis=3)
    some = real.any(axis=3)
    low, high = (jnp.where(some, x, 0).astype(keys.dtype) for x in (low, high))
    return _ranges(low, high, config)


def by_group(x: Array, first: int, group: int) -> Array:
    """`[batch, kv_heads, columns, ...]` -> `[batch, kv_heads, groups, group, ...]`; zeros for missing columns."""
    # Columns are also added at the left, so that a group begins at `first`.
    sides = (-first % group, -(x.shape[2] - first) % group)
    x = jnp.pad(x, [(0, 0), (0, 0), sides, *[(0, 0)] * (x.ndim - 3)])
    return x.reshape(*x.shape[:2], -1, group, *x.shape[3:])


def value_ranges(values: Float[Array, "batch kv_heads tokens head_dim"], config: QuantConfig) -> Ranges:
    """The range of every group of channels of every token, `[batch, kv_heads, tokens, groups]`."""
    grouped = values.reshape(*values.shape[:3], -1, config.channels(values.shape[3]))
    return _ranges(grouped.min(-1), grouped.max(-1), config)


def _ranges(low: Array, high: Array, config: QuantConfig) -> Ranges:
    # The difference is computed in float32 or wider; only the scale is rounded to the dtype of the keys.
    return Ranges(low, ((_wide(high) - _wide(low)) / config.highest).astype(low.dtype))


def of_columns(ranges: Ranges, first: int, columns: int, config: QuantConfig) -> Ranges:
    """Key ranges of groups -> of columns, `[batch, kv_heads, columns, head_dim]`; `first` as in `key_ranges`."""
    # The first group may begin with columns that `by_group` added.
    before = -first % config.group
    return jax.tree.map(lambda x: jnp.repeat(x, config.group, axis=2)[:, :, before : before + columns], ranges)


def of_channels(ranges: Ranges, head_dim: int, config: QuantConfig) -> Ranges:
    """Value ranges of groups -> of channels, `[batch, kv_heads, tokens, head_dim]`."""
    return jax.tree.map(lambda x: jnp.repeat(x, config.channels(head_dim), axis=3), ranges)


def quantize(
    x: Float[Array, "batch kv_heads rows head_dim"],
    ranges: Ranges,
    config: QuantConfig,
    parity: UInt8[Array, "batch kv_heads rows head_dim"] | None = None,
) -> UInt8[Array, "batch kv_heads rows head_dim"]:
    """The code of every element.

    Args:
      ranges: per element.
      parity: 0 or 1; rounds to the nearest code of this parity.
    """
    scale = _wide(ranges.scale)
    # A group of equal elements has scale 0, and a subnormal scale counts as 0. The inner `where` avoids dividing by it.
    flat = scale < jnp.finfo(scale.dtype).tiny
    quotient = jnp.where(flat, 0.0, (_wide(x) - _wide(ranges.low)) / jnp.where(flat, 1.0, scale))
    if parity is None:
        return jnp.clip(jnp.round(quotient), 0, config.highest).astype(jnp.uint8)
    lowest = parity.astype(scale.dtype)
    codes = lowest + 2 * jnp.round((quotient - lowest) / 2)
    # `highest` is odd: the last code is `highest - 1` of parity 0, `highest` of parity 1.
    return jnp.clip(codes, lowest, config.highest - 1 + lowest).astype(jnp.uint8)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Parity(PyTreeNode):
    """The lowest bit of every code, 8 per byte; of one layer, or with an axis of layers after the batch.

    Attributes:
      keys, values: uint8 `[batch, (layers,) kv_heads, columns, head_dim / 8 rounded up]`.
    """

    keys: UInt8[Array, "batch *layers kv_heads columns bytes"]
    values: UInt8[Array, "batch *layers kv_heads columns bytes"]


class QuantizedReplay(PyTreeNode):
    """The sampler's quantisation, for replay in the learner.

    A segment's keys and values are quantised when it ends, the prompt's when the response begins.

    Attributes:
      parity: the lowest bit of each of the sampler's codes.
      config: static.
      first: first column of the first segment, the prompt's width. Static.
      length: columns of a segment, the rollout's buffer. Static.
    """

    parity: Parity
    config: QuantConfig = struct.field(pytree_node=False)
    first: int = struct.field(pytree_node=False)
    length: int = struct.field(pytree_node=False)

    def layer(self, index: int) -> QuantizedReplay:
        """The same for one layer."""
        return self.replace(parity=jax.tree.map(lambda x: x[:, index], self.parity))

    def first_columns(self, columns: int) -> QuantizedReplay:
        """The same for the first `columns` columns. No later query sees the codes of a segment that is cut."""
        return self.replace(parity=jax.tree.map(lambda x: x[:, :, :, :columns], self.parity))

    def check_segments(self, segments: tuple[Segments, ...]) -> None:
        """Raises ValueError if the segments are not those of the quantisation."""
        for given in segments:
            if (given.first, given.length) != (self.first, self.length):
                raise ValueError(
                    f"expected the segments by which the cache was quantised, first={self.first} and "
                    f"length={self.length}; got {given}"
                )

    def copies(
        self,
        k: Float[Array, "batch kv_heads columns head_dim"],
        v: Float[Array, "batch kv_heads columns head_dim"],
        valid: Bool[Array, "#batch #kv_heads columns"],
    ) -> Copies:
        """One layer's quantised keys and values, as later segments see them, without gradients. Values of columns that
        are not `valid` are arbitrary."""
        columns, head_dim = k.shape[2:]
        # A copy has no gradient: its gradient goes to its key (`smd_kernels.copies`).
        k, v = jax.lax.stop_gradient((k, v))
        key_bits, value_bits = (unpack(x, 1, head_dim) for x in (self.parity.keys, self.parity.values))
        # All columns at once: no group crosses the end of a segment, so groups equal the sampler's.
        of_keys = of_columns(key_ranges(k, valid, self.first, self.config), self.first, columns, self.config)
        of_values = of_channels(value_ranges(v, self.config), head_dim, self.config)
        keys = dequantize(quantize(k, of_keys, self.config, key_bits), of_keys.low, of_keys.scale)
        values = dequantize(quantize(v, of_values, self.config, value_bits), of_values.low, of_values.scale)
        return Copies(keys, values, self.first, self.length)
