"""The quantised part of a layer's cache: codes packed into bytes, and their ranges.

A key or value is quantised once, when its segment ends; eviction only moves its codes. Values have ranges per token.
Keys share ranges with all columns of their group, evicted or not, so these are in a table of all groups. It grows by 2
numbers per channel and `group` tokens, 1/group of a cache without eviction. After `group * budget` tokens it is as
large as the kept keys and values in full precision, so long responses need large groups.

KIVI always keeps the newest tokens in full precision. Here the prompt is quantised at its end and a segment at its own
end, so that all queries of a segment see the same cache.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt8

from smd_jax.message.quantization import (
    Parity,
    QuantConfig,
    Ranges,
    key_ranges,
    of_channels,
    of_columns,
    pack,
    packed_size,
    quantize,
    value_ranges,
)
from smd_jax.pytrees import PyTreeNode
from smd_kernels.codes import Codes


class QuantizedSlots(PyTreeNode):
    """Quantised keys and values of a layer's left slots.

    Attributes:
      keys, values: uint8 `[batch, kv_heads, slots, head_dim * bits / 8 rounded up]` codes.
      value_ranges: `[batch, kv_heads, slots, head_dim / value_group]`.
      key_ranges: `[batch, kv_heads, groups, head_dim]` of all groups of columns of prompt and response.
      config: static.
      prompt: columns of the prompt, at whose end a group ends. Static.
    """

    keys: UInt8[Array, "batch kv_heads slots bytes"]
    values: UInt8[Array, "batch kv_heads slots bytes"]
    value_ranges: Ranges
    key_ranges: Ranges
    config: QuantConfig = struct.field(pytree_node=False)
    prompt: int = struct.field(pytree_node=False)


def group_count(columns: int, config: QuantConfig) -> int:
    """Number of groups of consecutive columns that begin or end at a group boundary."""
    return -(-columns // config.group)


def no_slots(
    like: Float[Array, "batch kv_heads columns head_dim"], prompt: int, response: int, config: QuantConfig
) -> QuantizedSlots:
    """The initial state: no slots, and an empty table for these columns of prompt and response."""
    rows, (head_dim, dtype) = like.shape[:2], (like.shape[3], like.dtype)
    codes = jnp.zeros((*rows, 0, packed_size(head_dim, config.bits)), jnp.uint8)
    of_values = jnp.zeros((*rows, 0, head_dim // config.channels(head_dim)), dtype)
    table = jnp.zeros((*rows, group_count(prompt, config) + group_count(response, config), head_dim), dtype)
    return QuantizedSlots(codes, codes, Ranges(of_values, of_values), Ranges(table, table), config, prompt)


def append(
    slots: QuantizedSlots,
    keys: Float[Array, "batch kv_heads columns head_dim"],
    values: Float[Array, "batch kv_heads columns head_dim"],
    valid: Bool[Array, "batch kv_heads columns"],
    start: Int[Array, " batch"],
) -> tuple[QuantizedSlots, Parity]:
    """Quantises consecutive columns, from each row's `start` on, into new slots at the right. The first call takes the
    prompt, later calls a segment.

    Returns:
      The slots, and the parity of the new codes, `[batch, kv_heads, columns, bytes]`.
    """
    config = slots.config
    columns, head_dim = keys.shape[2:]
    prompt = slots.keys.shape[2] == 0
    first = columns if prompt else 0  # counted from `start`: the prompt ends with a group, a segment begins with one
    table = key_ranges(keys, valid, first, config)
    groups = group_count(slots.prompt, config)
    # The prompt's groups come first in the table, then those of segments; rows are at different columns.
    index = jnp.zeros_like(start) if prompt else groups + (start - slots.prompt) // config.group
    of_values = value_ranges(values, config)
    key_codes = quantize(keys, of_columns(table, first, columns, config), config)
    value_codes = quantize(values, of_channels(of_values, head_dim, config), config)

    def join(old: Array, new: Array) -> Array:
        return jnp.concatenate([old, new], axis=2)

    def put(old: Array, new: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)

    slots = slots.replace(
        keys=join(slots.keys, pack(key_codes, config.bits)),
        values=join(slots.values, pack(value_codes, config.bits)),
        value_ranges=jax.tree.map(join, slots.value_ranges, of_values),
        key_ranges=jax.tree.map(jax.vmap(put), slots.key_ranges, table, Ranges(index, index)),
    )
    # The lowest bit of every code, with which the learner rounds like the sampler.
    return slots, Parity(*(pack(codes & 1, 1) for codes in (key_codes, value_codes)))


def codes_of(slots: QuantizedSlots, columns: Int[Array, "batch kv_heads slots"]) -> Codes:
    """The input of decode attention for slots with these columns; column -1 may give any value."""
    config = slots.config
    # Counted from the prompt's end, where a group begins. The quotient rounds down, so the prompt's groups are negative
    # before their number is added.
    group = (columns - slots.prompt) // config.group + group_count(slots.prompt, config)
    return Codes(
        keys=slots.keys,
        values=slots.values,
        # An empty slot (column -1) may fall before the table; any group is fine.
        group=jnp.maximum(group, 0),
        key_low=slots.key_ranges.low,
        key_scale=slots.key_ranges.scale,
        value_low=slots.value_ranges.low,
        value_scale=slots.value_ranges.scale,
        bits=config.bits,
    )


def map_slots(move: Callable[[Array], Array], slots: QuantizedSlots) -> QuantizedSlots:
    """Applies `move` to everything that has one entry per slot."""
    return slots.replace(
        keys=move(slots.keys), values=move(slots.values), value_ranges=jax.tree.map(move, slots.value_ranges)
    )
