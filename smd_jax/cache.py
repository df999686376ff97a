"""The KV cache of a rollout: `budget + buffer` slots per layer and KV head, whatever the response length.

A layer's slots are kept in column order with the empty ones first, so that the newest keys are always at the right:

    slots    [ . . 3 7 8 9 | 10 11 12 ]        budget 6, buffer 3; two slots still empty (column -1)
               kept keys     segment's own keys, written at `budget`, `budget + 1`, …

After the last slot is written the layer is compressed to its `budget` best keys, and the buffer is free again. Every
row and head writes the same slot at the same step: an in-place update of one slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

EMPTY = -1  # column of a slot that holds no key


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class LayerCache(struct.PyTreeNode):
    """Keys and values of one layer, and what its eviction policy asked to be kept beside them.

    Attributes:
      keys: `[batch, kv_heads, slots, head_dim]` after RoPE, at their original positions.
      values: `[batch, kv_heads, slots, head_dim]`.
      columns: `[batch, kv_heads, slots]` column of each key, -1 where the slot is empty.
      received: `[batch, kv_heads, slots]` attention that the key received so far, summed over queries and the query
        heads of its group; None if the policy does not ask for it.
      queries: `[batch, heads, window, head_dim]` the newest queries, that of column c at index `c % window`; None if
        the policy does not ask for them.
    """

    keys: Float[Array, "batch kv_heads slots head_dim"]
    values: Float[Array, "batch kv_heads slots head_dim"]
    columns: Int[Array, "batch kv_heads slots"]
    received: Float[Array, "batch kv_heads slots"] | None
    queries: Float[Array, "batch heads window head_dim"] | None

    @property
    def valid(self) -> Bool[Array, "batch kv_heads slots"]:
        return self.columns != EMPTY


KVCache = tuple[LayerCache, ...]  # one entry per layer; sizes may differ between layers


def write(
    cache: LayerCache,
    slot: Int[Array, ""],
    k: Float[Array, "batch kv_heads 1 head_dim"],
    v: Float[Array, "batch kv_heads 1 head_dim"],
    column: Int[Array, ""],
    live: Bool[Array, " batch"],
) -> LayerCache:
    """Writes one token's key and value to `slot`; rows that are not live leave the slot empty."""
    columns = jnp.where(live, column, EMPTY).astype(jnp.int32)[:, None, None]
    columns = jnp.broadcast_to(columns, (*k.shape[:2], 1))
    cache = cache.replace(
        keys=jax.lax.dynamic_update_slice_in_dim(cache.keys, k.astype(cache.keys.dtype), slot, axis=2),
        values=jax.lax.dynamic_update_slice_in_dim(cache.values, v.astype(cache.values.dtype), slot, axis=2),
        columns=jax.lax.dynamic_update_slice_in_dim(cache.columns, columns, slot, axis=2),
    )
    if cache.received is None:
        return cache
    fresh = jnp.zeros((*k.shape[:2], 1), cache.received.dtype)
    return cache.replace(received=jax.lax.dynamic_update_slice_in_dim(cache.received, fresh, slot, axis=2))


def observe(
    cache: LayerCache, received: Float[Array, "batch kv_heads slots"], q: Float[Array, "batch heads 1 head_dim"], column
) -> LayerCache:
    """Adds one query to the statistics that the layer keeps."""
    if cache.received is not None:
        cache = cache.replace(received=cache.received + received)
    if cache.queries is not None:
        index = column % cache.queries.shape[2]
        cache = cache.replace(queries=jax.lax.dynamic_update_slice_in_dim(cache.queries, q, index, axis=2))
    return cache


def newest_columns(last: Int[Array, ""] | int, window: int) -> Int[Array, " window"]:
    """Column of the query at each index of `LayerCache.queries` when `last` is the newest; negative: not seen yet."""
    return last - (last - jnp.arange(window)) % window


def select(
    scores: Float[Array, "batch kv_heads slots"], valid: Bool[Array, "batch kv_heads slots"], budget: int
) -> tuple[Int[Array, "batch kv_heads budget"], Bool[Array, "batch kv_heads slots"]]:
    """The `budget` best slots in ascending order, and which valid keys are dropped. Ties keep the older key."""
    # Only empty slots score -inf, so that the least wanted key still goes before them.
    ranked = jnp.where(valid, jnp.maximum(scores, jnp.finfo(scores.dtype).min), -jnp.inf)
    _, slots = jax.lax.top_k(ranked, budget)
    kept = jnp.zeros(valid.shape, bool)
    kept = jnp.put_along_axis(kept, slots, True, axis=-1, inplace=False)
    return jnp.sort(slots, axis=-1), valid & ~kept


def gather(cache: LayerCache, slots: Int[Array, "batch kv_heads budget"], buffer: int) -> LayerCache:
    """The chosen slots, moved to the left of `buffer` empty ones."""

    def move(x: Array, fill: int) -> Array:
        kept = jnp.take_along_axis(x, slots.reshape(*slots.shape, *(1,) * (x.ndim - 3)), axis=2)
        return _pad_slots(kept, 0, buffer, fill)

    return _map_slots(move, cache)


def pad(cache: LayerCache, left: int, right: int) -> LayerCache:
    """Empty slots at both ends."""
    return _map_slots(lambda x, fill: _pad_slots(x, left, right, fill), cache)


def _map_slots(move: Callable[[Array, int], Array], cache: LayerCache) -> LayerCache:
    """Applies `move(array, fill value of an empty slot)` to everything that has one entry per slot."""
    return cache.replace(
        keys=move(cache.keys, 0),
        values=move(cache.values, 0),
        columns=move(cache.columns, EMPTY),
        received=None if cache.received is None else move(cache.received, 0),
    )


def _pad_slots(x: Array, left: int, right: int, fill: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (left, right), *[(0, 0)] * (x.ndim - 3)], constant_values=fill)


def record(
    evicted_at: Int[Array, "batch kv_heads columns"],
    columns: Int[Array, "batch kv_heads slots"],
    dropped: Bool[Array, "batch kv_heads slots"],
    now: Int[Array, ""] | int,
) -> Int[Array, "batch kv_heads columns"]:
    """Notes in a layer's shadow mask that the dropped keys are invisible from column `now` on."""
    outside = evicted_at.shape[-1]
    target = jnp.where(dropped, columns, outside)
    batch, kv_heads, _ = target.shape
    rows, heads = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[None, :, None]
    return evicted_at.at[rows, heads, target].set(now, mode="drop")
