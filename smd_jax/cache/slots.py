"""The KV cache of a rollout: `budget + buffer` slots per layer and KV head for any response length.

A layer's slots are in column order with the empty ones first, so the newest keys are always at the right:

    slots    [ . . 3 7 8 9 | 10 11 12 ]        budget 6, buffer 3; two slots still empty (column -1)
               kept keys     keys of the segment, written at `budget`, `budget + 1`, …

After the last slot is written the layer is compressed to its `budget` best keys, and the buffer is free again. Every
row and head writes the same slot at the same step, an in-place update of one slice.

In a quantised cache the kept keys are codes, and only the buffer is in full precision.

Equal layers may share a LayerCache, for a model that loops over them. All its arrays then have the layers as second
axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.cache import quantized as quantized_cache
from smd_jax.cache.quantized import QuantizedSlots
from smd_jax.devices.sharding import over_heads
from smd_jax.eviction.statistics import CacheShape, Observation, Statistic, observed
from smd_jax.message.quantization import Parity
from smd_jax.pytrees import PyTreeNode
from smd_kernels.codes import Codes

EMPTY = -1  # column of a slot that holds no key


class LayerCache(PyTreeNode):
    """Keys and values of one layer, and the statistics of its eviction policy.

    Attributes:
      keys: `[batch, kv_heads, slots, head_dim]` after RoPE, at their original positions; only the right slots if the
        left ones are quantised.
      values: like the keys.
      columns: `[batch, kv_heads, slots]` column of each key, -1 where the slot is empty.
      quantized: keys and values of the left slots, or None if all are in full precision.
      states: of the statistics, in their order.
      statistics: those of the policy. Static.

    Shapes are those of one layer; of a run of layers, `[batch, layers, …]`.
    """

    keys: Float[Array, "batch kv_heads precise head_dim"]
    values: Float[Array, "batch kv_heads precise head_dim"]
    columns: Int[Array, "batch kv_heads slots"]
    quantized: QuantizedSlots | None = None
    states: tuple[Any, ...] = ()
    statistics: tuple[Statistic[Any], ...] = struct.field(pytree_node=False, default=())

    @property
    def valid(self) -> Bool[Array, "batch kv_heads slots"]:
        return self.columns != EMPTY

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.columns.shape[-1]


KVCache = tuple[LayerCache, ...]  # one entry per layer or run of equal layers; sizes may differ


def of_run(cache: LayerCache) -> bool:
    """Whether this is the cache of a run of layers."""
    return cache.columns.ndim == 4


def at_layer(run: Any, index: Int[Array, ""] | int) -> Any:
    """One layer's part of a pytree of arrays `[batch, layers, …]`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), run)


def put_layer(run: Any, part: Any, index: Int[Array, ""] | int) -> Any:
    """A pytree of arrays `[batch, layers, …]` with another part of one layer; an update in place."""
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, axis=1), run, part)


def each_layer(f: Callable[..., Any], cache: LayerCache, *others: Any) -> Any:
    """`f` of a layer's cache, or of the cache of every layer of a run; `others` are the same for all layers."""
    if not of_run(cache):
        return f(cache, *others)
    return jax.vmap(lambda layer: f(layer, *others), in_axes=1, out_axes=1)(cache)


def no_keys(statistics: tuple[Statistic[Any], ...], shape: CacheShape) -> LayerCache:
    """An empty cache of a layer."""
    slots = (shape.rows, shape.kv_heads, shape.slots)
    keys = jnp.zeros((*slots, shape.head_dim), shape.dtype)
    states = tuple(statistic.init(shape) for statistic in statistics)
    return LayerCache(keys, keys, jnp.full(slots, EMPTY, jnp.int32), states=states, statistics=statistics)


def write(
    cache: LayerCache,
    slot: Int[Array, ""],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    columns: Int[Array, "batch tokens"],
    layer: Int[Array, ""] | int | None = None,
) -> LayerCache:
    """Writes keys and values of consecutive tokens to the slots from `slot` on, and resets their statistics. Tokens
    without a column (-1: finished rows, padding) leave their slots empty.

    Args:
      layer: which one of a run; None: the cache is of one layer.
    """
    # The buffer's arrays begin after the quantised slots.
    own = slot if cache.quantized is None else slot - cache.quantized.keys.shape[-2]
    columns = jnp.broadcast_to(columns[:, None], k.shape[:3]).astype(jnp.int32)

    # One slice, the same in all rows, so that the compiler updates the buffer in place.
    def put(x: Array, new: Array, at: Int[Array, ""]) -> Array:
        new = new.astype(x.dtype)
        if layer is None:
            return jax.lax.dynamic_update_slice_in_dim(x, new, at, axis=2)
        start = (0, layer, 0, at, *(0,) * (x.ndim - 4))
        return jax.lax.dynamic_update_slice(x, new[:, None], start)

    def forget(x: Array) -> Array:
        after = x.shape[3:] if layer is None else x.shape[4:]
        return put(x, jnp.zeros((*k.shape[:3], *after), x.dtype), slot)

    cache = cache.replace(
        keys=put(cache.keys, k, own), values=put(cache.values, v, own), columns=put(cache.columns, columns, slot)
    )
    return _map_states(forget, cache)


def drop(cache: LayerCache, evicted: Bool[Array, "batch *layers kv_heads slots"]) -> LayerCache:
    """Empties slots in place, between others that stay full, and zeroes their statistics."""

    def forget(x: Array) -> Array:
        return jnp.where(evicted.reshape(*evicted.shape, *(1,) * (x.ndim - evicted.ndim)), jnp.zeros((), x.dtype), x)

    return _map_states(forget, cache.replace(columns=jnp.where(evicted, EMPTY, cache.columns)))


def empty_first(cache: LayerCache) -> LayerCache:
    """Moves empty slots to the left; the others stay in column order."""
    order = jnp.argsort(cache.columns, axis=2, stable=True)
    return gather(cache, order, 0)


def codes(cache: LayerCache) -> Codes:
    """The quantised slots as input of decode attention."""
    slots = cache.quantized
    assert slots is not None, "a cache in full precision"
    # Codes do not change between steps, so the compiler would hoist dequantisation of all layers out of the loop and
    # hold them in full precision. The barrier ties them to the buffer, which changes.
    slots, _ = jax.lax.optimization_barrier((slots, (cache.keys, cache.values)))
    return quantized_cache.codes_of(slots, cache.columns[:, :, : slots.keys.shape[2]])


def full_precision(
    cache: LayerCache,
) -> tuple[Float[Array, "batch kv_heads slots head_dim"], Float[Array, "batch kv_heads slots head_dim"]]:
    """Keys and values of all slots, dequantised."""
    if cache.quantized is None:
        return cache.keys, cache.values
    left = codes(cache).dequantized()
    keys, values = (jnp.concatenate(x, axis=2) for x in zip(left, (cache.keys, cache.values), strict=True))
    return keys, values


def visible(
    cache: LayerCache,
    columns: Int[Array, "batch queries"],
    window: int | None = None,
    evicted_at: Int[Array, "batch T"] | None = None,
) -> Bool[Array, "batch kv_heads queries slots"]:
    """Which keys the queries of these columns see: live keys of earlier columns and their own, with a window only of
    the `window` newest columns, and with `evicted_at` (an entry for every column) only before it."""
    key = cache.columns[:, :, None]
    query = columns[:, None, :, None]
    # A padding query has column -1 and sees nothing, because every live key has a higher column.
    seen = cache.valid[:, :, None] & (key <= query)
    if evicted_at is not None:
        seen = seen & (query < of_columns(cache, evicted_at)[:, :, None])
    return seen if window is None else seen & (query < key + window)


def of_columns(cache: LayerCache, table: Int[Array, "batch T"]) -> Int[Array, "batch *layers kv_heads slots"]:
    """The table's entry for every slot's column; arbitrary for empty slots."""
    flat = jnp.maximum(cache.columns, 0).reshape(table.shape[0], -1)
    return jnp.take_along_axis(table, flat, axis=1).reshape(cache.columns.shape)


def quantize(cache: LayerCache, start: Int[Array, " batch"]) -> tuple[LayerCache, Parity | None]:
    """Quantises the full-precision keys and values, whose columns begin at each row's `start`.

    Returns:
      A cache without a buffer, and the parity of the new codes, `[batch, kv_heads, columns, bytes]`; for a cache in
      full precision, the same cache and None.
    """
    if (slots := cache.quantized) is None:
        return cache, None
    valid = cache.valid[:, :, slots.keys.shape[2] :]
    slots, parity = quantized_cache.append(slots, cache.keys, cache.values, valid, start)
    # Every slot is quantised now. `gather` and `pad` append the next buffer.
    nothing = cache.keys[:, :, :0]
    return cache.replace(keys=nothing, values=nothing, quantized=slots), parity


def observe(cache: LayerCache, seen: Observation) -> LayerCache:
    """Updates every statistic of the layer with the tokens that were just attended."""
    return cache.replace(states=observed(cache.statistics, cache.states, seen))


def needs_attention(statistics: tuple[Statistic[Any], ...]) -> bool:
    """Whether any statistic needs the attention that keys receive."""
    return any(statistic.needs_attention for statistic in statistics)


def shift(cache: LayerCache, count: Int[Array, ""], *, ring: bool) -> LayerCache:
    """Shifts a prompt's cache as if it had been made `count` steps later. Statistics with query numbers are shifted. In
    a ring cache the slots rotate as well, so that the next write overwrites the oldest slot."""
    # Query numbers are shared by all rows, even if the slots are not a ring.
    states = tuple(x.shift(state, count) for x, state in zip(cache.statistics, cache.states, strict=True))
    cache = cache.replace(states=states)
    if not ring:
        return cache

    roll = partial(jnp.roll, shift=count, axis=2)
    cache = cache.replace(keys=roll(cache.keys), values=roll(cache.values), columns=roll(cache.columns))
    return _map_states(roll, cache)


def settle(cache: LayerCache, written: Int[Array, " batch"], buffer: int) -> LayerCache:
    """Normalises a cache in which each row wrote the first `written` slots of its buffer: empty slots at the left, the
    newest key at the right, as after a full buffer.

        [ . 3 7 | 8 9 . ]   ─►   [ . . 3 7 8 9 ]        budget 3, buffer 3, 2 written

    So a row does not depend on the number of steps of other rows.
    """

    def roll(x: Array) -> Array:
        return jax.vmap(lambda row, count: jnp.roll(row, count, axis=1))(x, buffer - written)

    def shifted(statistic: Statistic[Any], state: Any) -> Any:
        def of_row(row: Any, count: Array) -> Any:
            one = statistic.shift(jax.tree.map(lambda x: x[None], row), count)
            return jax.tree.map(lambda x: x[0], one)

        return jax.vmap(of_row)(state, -written)

    states = tuple(shifted(*pair) for pair in zip(cache.statistics, cache.states, strict=True))
    cache = cache.replace(keys=roll(cache.keys), values=roll(cache.values), columns=roll(cache.columns), states=states)
    return _map_states(roll, cache)


def select(
    scores: Float[Array, "batch kv_heads slots"], valid: Bool[Array, "batch kv_heads slots"], budget: int
) -> tuple[Int[Array, "batch kv_heads budget"], Int[Array, "batch kv_heads rest"]]:
    """The `budget` best slots and all others, both in ascending order. Ties keep the older key; NaN ranks lowest.

    Searches only for the evicted slots, because they are few. The new index of each slot follows from the number of
    evicted slots to its left, in linear time and memory:

        slots   0 1 2 3 4 5      go 1 4      stay: slot - how many go up to it           go: budget + how many before it
        moved   0 4 1 2 5 3                  so 0 2 3 5 come to 0 1 2 3                  so 1 4 come to 4 5

    On a mesh every device selects for its own rows and heads.
    """
    return over_heads(partial(_select, budget), scores, valid)


def _select(budget: int, scores: Array, valid: Array) -> tuple[Array, Array]:
    slots = valid.shape[-1]
    # Only empty slots score -inf, so the worst key still ranks above them. fmax, because top_k ranks NaN above
    # infinity: a key with a NaN score would stay forever and displace protected keys.
    ranked = jnp.where(valid, jnp.fmax(scores, jnp.finfo(scores.dtype).min), -jnp.inf)
    # top_k takes the first of equal values; searched from the right, these are the newest.
    _, from_right = jax.lax.top_k(-ranked[..., ::-1], slots - budget)
    # Converts indices from the right back to slots.
    fresh = jnp.zeros(valid.shape, jnp.int32)
    goes = jnp.put_along_axis(fresh, slots - 1 - from_right, jnp.ones_like(from_right), axis=-1, inplace=False)
    gone_so_far = jnp.cumsum(goes, axis=-1)
    slot = jax.lax.broadcasted_iota(jnp.int32, valid.shape, valid.ndim - 1)
    moved = jnp.where(goes == 1, budget + gone_so_far - 1, slot - gone_so_far)
    order = jnp.put_along_axis(fresh, moved, slot, axis=-1, inplace=False)
    return order[..., :budget], order[..., budget:]


def gather(cache: LayerCache, slots: Int[Array, "batch kv_heads budget"], buffer: int) -> LayerCache:
    """Moves the chosen slots to the left of `buffer` empty ones. If the cache is quantised, all slots must be."""

    def choose(x: Array) -> Array:
        return jnp.take_along_axis(x, slots.reshape(*slots.shape, *(1,) * (x.ndim - 3)), axis=2)

    return _move_slots(choose, cache, 0, buffer)


def pad(cache: LayerCache, left: int, right: int) -> LayerCache:
    """Adds empty slots at both ends. If the cache is quantised, all slots must be; new ones at the right are not."""
    return _move_slots(lambda x: x, cache, left, right)


def _move_slots(move: Callable[[Array], Array], cache: LayerCache, left: int, right: int) -> LayerCache:
    """Applies `move` to all per-slot arrays and adds empty slots at both ends."""

    def between(x: Array, fill: int = 0) -> Array:
        return _pad_slots(move(x), left, right, fill)

    if cache.quantized is None:
        cache = cache.replace(keys=between(cache.keys), values=between(cache.values))
    else:
        # All slots are quantised, so the full-precision arrays are empty.
        keys, values = (_pad_slots(x, 0, right, 0) for x in (cache.keys, cache.values))
        # Quantised slots get no empty slots at the right: those are the full-precision buffer.
        quantized = quantized_cache.map_slots(lambda x: _pad_slots(move(x), left, 0, 0), cache.quantized)
        cache = cache.replace(keys=keys, values=values, quantized=quantized)
    return _map_states(between, cache.replace(columns=between(cache.columns, EMPTY)))


def _map_states(move: Callable[[Array], Array], cache: LayerCache) -> LayerCache:
    """Applies `move` to every per-slot array of a statistic."""
    pairs = zip(cache.statistics, cache.states, strict=True)
    states = tuple(jax.tree.map(move, state) if statistic.per_slot else state for statistic, state in pairs)
    return cache.replace(states=states)


def _pad_slots(x: Array, left: int, right: int, fill: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (left, right), *[(0, 0)] * (x.ndim - 3)], constant_values=fill)
