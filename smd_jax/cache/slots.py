"""The KV cache of a rollout: `budget + buffer` slots per layer and KV head, whatever the response length.

A layer's slots are kept in column order with the empty ones first, so that the newest keys are always at the right:

    slots    [ . . 3 7 8 9 | 10 11 12 ]        budget 6, buffer 3; two slots still empty (column -1)
               kept keys     segment's own keys, written at `budget`, `budget + 1`, …

After the last slot is written the layer is compressed to its `budget` best keys, and the buffer is free again. Every
row and head writes the same slot at the same step: an in-place update of one slice.

In a quantised cache the kept keys are codes of a few bits, and the buffer alone is in full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.cache import quantized as quantized_cache
from smd_jax.cache.quantized import QuantizedSlots
from smd_jax.pytrees import any_leaves
from smd_jax.quantization import Parity
from smd_jax.sharding import over_heads

EMPTY = -1  # column of a slot that holds no key


@any_leaves
class LayerCache(struct.PyTreeNode):
    """Keys and values of one layer, and what its eviction policy asked to be kept beside them.

    Attributes:
      keys: `[batch, kv_heads, slots, head_dim]` after RoPE, at their original positions; of the right slots only, if
        the left ones are quantised.
      values: as the keys.
      columns: `[batch, kv_heads, slots]` column of each key, -1 where the slot is empty.
      received: `[batch, kv_heads, slots]` attention that the key received so far, summed over queries and the query
        heads of its group; None if the policy does not ask for it.
      queries: `[batch, heads, window, head_dim]` the newest queries, number n at index `n % window`; None if the policy
        does not ask for them. Prompt and fixed batches number them by columns; all rows of a cache share the numbers.
      quantized: keys and values of the left slots, or None if all are in full precision.
    """

    keys: Float[Array, "batch kv_heads precise head_dim"]
    values: Float[Array, "batch kv_heads precise head_dim"]
    columns: Int[Array, "batch kv_heads slots"]
    received: Float[Array, "batch kv_heads slots"] | None
    queries: Float[Array, "batch heads window head_dim"] | None
    quantized: QuantizedSlots | None = None

    @property
    def valid(self) -> Bool[Array, "batch kv_heads slots"]:
        return self.columns != EMPTY


KVCache = tuple[LayerCache, ...]  # one entry per layer; sizes may differ between layers


def write(
    cache: LayerCache,
    slot: Int[Array, ""],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens head_dim"],
    columns: Int[Array, "batch tokens"],
) -> LayerCache:
    """Writes keys and values of consecutive tokens to the slots from `slot` on; tokens without a column (-1: those of
    rows that have ended, padding) leave theirs empty."""
    own = slot if cache.quantized is None else slot - cache.quantized.keys.shape[2]
    columns = jnp.broadcast_to(columns[:, None], k.shape[:3]).astype(jnp.int32)

    def put(x: Array, new: Array, at: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), at, axis=2)

    received = cache.received
    return cache.replace(
        keys=put(cache.keys, k, own),
        values=put(cache.values, v, own),
        columns=put(cache.columns, columns, slot),
        received=None if received is None else put(received, jnp.zeros(k.shape[:3], received.dtype), slot),
    )


def full_precision(
    cache: LayerCache,
) -> tuple[Float[Array, "batch kv_heads slots head_dim"], Float[Array, "batch kv_heads slots head_dim"]]:
    """Keys and values of all slots, with those of few bits dequantised."""
    if cache.quantized is None:
        return cache.keys, cache.values
    # Codes do not change from step to step: the compiler would read those of all layers once, before the loop, and hold
    # them all in full precision. Tied to the buffer, which does change, they are read when they are needed.
    slots, own = jax.lax.optimization_barrier((cache.quantized, (cache.keys, cache.values)))
    left = quantized_cache.dequantized(slots, cache.columns[:, :, : slots.keys.shape[2]])
    keys, values = (jnp.concatenate(x, axis=2) for x in zip(left, own, strict=True))
    return keys, values


def visible(
    cache: LayerCache, columns: Int[Array, "batch queries"], window: int | None = None
) -> Bool[Array, "batch kv_heads queries slots"]:
    """Which keys the queries of these columns see: every live one but their successors', of the `window` newest
    columns if there is a window."""
    key = cache.columns[:, :, None]
    query = columns[:, None, :, None]
    seen = cache.valid[:, :, None] & (key <= query)
    return seen if window is None else seen & (query < key + window)


def quantize(cache: LayerCache, slots: QuantizedSlots, start: Int[Array, " batch"]) -> tuple[LayerCache, Parity]:
    """Quantises the keys and values that are in full precision, of the columns from each row's `start` on.

    Args:
      slots: those of the cache that are quantised already.

    Returns:
      A cache without a buffer, and the parity of the new codes, `[batch, kv_heads, columns, bytes]`.
    """
    valid = cache.valid[:, :, slots.keys.shape[2] :]
    slots, parity = quantized_cache.append(slots, cache.keys, cache.values, valid, start)
    nothing = cache.keys[:, :, :0]
    return cache.replace(keys=nothing, values=nothing, quantized=slots), parity


def observe(
    cache: LayerCache,
    received: Float[Array, "batch kv_heads slots"],
    q: Float[Array, "batch heads tokens head_dim"],
    first: Int[Array, ""],
) -> LayerCache:
    """Adds consecutive queries to the statistics that the layer keeps; `first` numbers the first one."""
    if cache.received is not None:
        cache = cache.replace(received=cache.received + received)
    if cache.queries is None:
        return cache
    window, tokens = cache.queries.shape[2], q.shape[2]
    if tokens == 1:  # an update of one slice stays in place everywhere
        queries = jax.lax.dynamic_update_slice_in_dim(cache.queries, q, first % window, axis=2)
        return cache.replace(queries=queries)
    newest = jnp.arange(max(tokens - window, 0), tokens)
    return cache.replace(queries=cache.queries.at[:, :, (first + newest) % window].set(q[:, :, newest]))


def newest_columns(last: Int[Array, ""] | int, window: int) -> Int[Array, " window"]:
    """Number of the query at each index of `LayerCache.queries` when `last` is the newest; negative: not seen yet."""
    return last - (last - jnp.arange(window)) % window


def select(
    scores: Float[Array, "batch kv_heads slots"], valid: Bool[Array, "batch kv_heads slots"], budget: int
) -> tuple[Int[Array, "batch kv_heads budget"], Int[Array, "batch kv_heads rest"]]:
    """The `budget` best slots and all others, both in ascending order. Ties keep the older key.

    Only those that go are searched for, because they are few. Where each slot moves to then follows from how many of
    them lie at its left, in memory and time of the order of the slots:

        slots   0 1 2 3 4 5      go 1 4      stay: slot - how many go up to it           go: budget + how many before it
        moved   0 4 1 2 5 3                  so 0 2 3 5 come to 0 1 2 3                  so 1 4 come to 4 5

    On a mesh every device selects for its own rows and heads.
    """
    return over_heads(partial(_select, budget), scores, valid)


def _select(budget: int, scores: Array, valid: Array) -> tuple[Array, Array]:
    slots = valid.shape[-1]
    # Only empty slots score -inf, so that the least wanted key still goes before them.
    ranked = jnp.where(valid, jnp.maximum(scores, jnp.finfo(scores.dtype).min), -jnp.inf)
    # Of equals, top_k takes the first. Searched from the right, these are the newest.
    _, from_right = jax.lax.top_k(-ranked[..., ::-1], slots - budget)
    goes = _scatter(jnp.zeros(valid.shape, jnp.int32), slots - 1 - from_right, jnp.ones_like(from_right))
    gone_so_far = jnp.cumsum(goes, axis=-1)
    slot = jax.lax.broadcasted_iota(jnp.int32, valid.shape, valid.ndim - 1)
    moved = jnp.where(goes == 1, budget + gone_so_far - 1, slot - gone_so_far)
    order = _scatter(jnp.zeros(valid.shape, jnp.int32), moved, slot)
    return order[..., :budget], order[..., budget:]


def _scatter(into: Array, index: Array, values: Array) -> Array:
    """`into` with `values` at distinct places of its last axis."""
    return jnp.put_along_axis(into, index, values, axis=-1, inplace=False)


def gather(cache: LayerCache, slots: Int[Array, "batch kv_heads budget"], buffer: int) -> LayerCache:
    """The chosen slots, moved to the left of `buffer` empty ones. Of a quantised cache, all slots must be."""

    def choose(x: Array) -> Array:
        return jnp.take_along_axis(x, slots.reshape(*slots.shape, *(1,) * (x.ndim - 3)), axis=2)

    return _move_slots(choose, cache, 0, buffer)


def pad(cache: LayerCache, left: int, right: int) -> LayerCache:
    """Empty slots at both ends. Of a quantised cache, all slots must be; those at the right are in full precision."""
    return _move_slots(lambda x: x, cache, left, right)


def _move_slots(move: Callable[[Array], Array], cache: LayerCache, left: int, right: int) -> LayerCache:
    """Applies `move` to everything that has one entry per slot, and puts so many empty slots to both ends."""

    def between(x: Array, fill: int = 0) -> Array:
        return _pad_slots(move(x), left, right, fill)

    if cache.quantized is None:
        cache = cache.replace(keys=between(cache.keys), values=between(cache.values))
    else:
        keys, values = (_pad_slots(x, 0, right, 0) for x in (cache.keys, cache.values))
        quantized = quantized_cache.map_slots(lambda x: _pad_slots(move(x), left, 0, 0), cache.quantized)
        cache = cache.replace(keys=keys, values=values, quantized=quantized)
    cache = cache.replace(columns=between(cache.columns, EMPTY))
    return cache if cache.received is None else cache.replace(received=between(cache.received))


def _pad_slots(x: Array, left: int, right: int, fill: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (left, right), *[(0, 0)] * (x.ndim - 3)], constant_values=fill)
