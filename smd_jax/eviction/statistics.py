"""Statistics: per-key and per-row data that eviction policies read.

A policy declares its statistics, and the sampler keeps a state of each with the keys: in prefill, whole or in chunks,
while decoding, in rows that an engine seats late, in quantised caches, on a mesh.

    init ─► observe ─► observe ─► … ─► CacheView.statistic(…)       `observe` follows every attention of a layer;
                                       when the policy scores        the newest query is always in

There are two kinds of state:

    per slot    [rows, kv_heads, slots, ...]   belongs to a key and moves with it: it is evicted, gathered and padded
                                               like the key, and is zero in an empty or newly written slot
    per row     [rows, ...]                    belongs to the row and does not move

To add one, write a frozen dataclass with `init` and `observe`, and a policy with it among its `statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from smd_jax.pytrees import PyTreeNode

State = TypeVar("State")  # a pytree of arrays of numbers, all with the rows first


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one layer's cache, for `Statistic.init`.

    Attributes:
      rows, heads, kv_heads, head_dim: of queries and keys. slots: maximum number of keys.
      dtype: of queries, keys and values.
    """

    rows: int
    heads: int
    kv_heads: int
    slots: int
    head_dim: int
    dtype: DTypeLike

    @property
    def wide(self) -> DTypeLike:
        """float32, or the dtype of the keys if that is wider: for sums over many tokens."""
        return jnp.promote_types(self.dtype, jnp.float32)


class Observation(PyTreeNode):
    """Consecutive tokens of one layer after their attention: one token per row while decoding, the whole prompt or a
    chunk before.

    Attributes:
      queries: `[rows, heads, tokens, head_dim]` after RoPE.
      query_columns: `[rows, tokens]` ascending; -1 for padding and for tokens of finished rows, which are still
        decoded. A per-row statistic must ignore them.
      keys, values: `[rows, kv_heads, slots, head_dim]` of all slots, including those of the tokens, dequantised in a
        quantised cache. Arbitrary in empty slots.
      columns: `[rows, kv_heads, slots]` column of each slot's key, -1 for empty slots.
      start: `[rows]` column of the first token of each row.
      received: `[rows, kv_heads, slots]` attention that each slot received from these queries, softmax weights summed
        over queries and the query heads of the group, float32 or wider. None unless a statistic of the policy has
        `needs_attention`.
      number: number of the first query, counted over all queries of the cache; the others follow. It is the same for
        all rows, so that a ring buffer writes one index. It differs from the column, because rows may be seated late.
      slot: slot of the first token's key; the others follow.
    """

    queries: Float[Array, "rows heads tokens head_dim"]
    query_columns: Int[Array, "rows tokens"]
    keys: Float[Array, "rows kv_heads slots head_dim"]
    values: Float[Array, "rows kv_heads slots head_dim"]
    columns: Int[Array, "rows kv_heads slots"]
    start: Int[Array, " rows"]
    received: Float[Array, "rows kv_heads slots"] | None
    number: Int[Array, ""]
    slot: Int[Array, ""]

    @property
    def query_positions(self) -> Int[Array, "rows tokens"]:
        """Positions of the tokens in their own sequences, -1 for missing tokens."""
        return jnp.where(self.query_columns >= 0, self.query_columns - self.start[:, None], -1)

    @property
    def positions(self) -> Int[Array, "rows kv_heads slots"]:
        """Positions of the slots' keys in their own sequences, -1 for empty slots."""
        return jnp.where(self.valid, self.columns - self.start[:, None, None], -1)

    @property
    def valid(self) -> Bool[Array, "rows kv_heads slots"]:
        """Slots that hold a key."""
        return self.columns >= 0


@dataclass(frozen=True)
class Statistic(Generic[State]):
    """Base of all statistics. Hashable, because policies are static arguments: equal ones compile once.

    Attributes:
      per_slot: whether the state is per slot, see above; then `init` must return zeros.
      needs_attention: whether `Observation.received` is needed. A prompt that is read whole then needs memory for the
        attention weights of a few rows at a time, or of all rows of a device on a mesh with a tensor axis.
    """

    per_slot: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False

    def init(self, shape: CacheShape) -> State:
        """The initial state: arrays `[rows, ...]`, or `[rows, kv_heads, slots, ...]` per slot."""
        raise TypeError(f"{type(self).__name__} has no init: its class must define one")

    def observe(self, state: State, seen: Observation) -> State:
        """The state after these tokens, with the same shapes and dtypes."""
        raise TypeError(f"{type(self).__name__} has no observe: its class must define one")

    def shift(self, state: State, count: Int[Array, ""]) -> State:
        """The state with all query numbers shifted by `count`. Positive for a prompt that an engine seats `count` steps
        after its cache was made, negative after a segment of a conversation. Only ring buffers need to override it."""
        return state


def observed(statistics: Sequence[Statistic[Any]], states: Sequence[Any], seen: Observation) -> tuple[Any, ...]:
    """The states of all statistics after these tokens.

    Raises:
      TypeError: an `observe` that returns another structure, shape or dtype.
    """
    after = tuple(x.observe(state, seen) for x, state in zip(statistics, states, strict=True))
    for statistic, old, new in zip(statistics, states, after, strict=True):
        (want, structure), (got, other) = _described(old), _described(new)
        if want != got or structure != other:
            name = type(statistic).__name__
            raise TypeError(f"expected {name}.observe to return a state as {want} in {structure}; got {got} in {other}")
    return after


def _described(state: Any) -> tuple[list[str], Any]:
    leaves, structure = jax.tree.flatten(state)
    return [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves], structure


@dataclass(frozen=True)
class ReceivedAttention(Statistic[Array]):
    """Attention that each key has received, summed over queries and the query heads of its group:
    `[rows, kv_heads, slots]`, float32 or wider."""

    per_slot: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = True

    def init(self, shape: CacheShape) -> Float[Array, "rows kv_heads slots"]:
        # A sum over many queries: in bfloat16 it would stop growing at 256 times an addend.
        return jnp.zeros((shape.rows, shape.kv_heads, shape.slots), shape.wide)

    def observe(self, state: Array, seen: Observation) -> Array:
        assert seen.received is not None, "needs_attention"
        return state + seen.received


@dataclass(frozen=True)
class NewestQueries(Statistic[Array]):
    """The newest `window` queries, `[rows, heads, window, head_dim]` in the dtype of the keys.

    A ring buffer: query number n is at index `n % window`, so a new query overwrites the oldest and nothing moves.

        window 4, after query 6      index  0 1 2 3
                                     query  4 5 6 3
    """

    window: int

    def init(self, shape: CacheShape) -> Float[Array, "rows heads window head_dim"]:
        return jnp.zeros((shape.rows, shape.heads, self.window, shape.head_dim), shape.dtype)

    def observe(self, state: Array, seen: Observation) -> Array:
        exists = seen.query_columns >= 0
        tokens = seen.queries.shape[2]
        if tokens == 1:  # updating one slice is in place on every backend, scattering by an array of indices is not
            index = seen.number % self.window
            before = jax.lax.dynamic_slice_in_dim(state, index, 1, axis=2)
            query = jnp.where(exists[:, None, :, None], seen.queries, before)
            return jax.lax.dynamic_update_slice_in_dim(state, query, index, axis=2)
        # For every index of the ring, the newest token that belongs there: `end - age` for ages 1 … window.
        end = jnp.max(jnp.where(exists, jnp.arange(tokens) + 1, 0), axis=1)[:, None]
        token = end - 1 - (seen.number + end - 1 - jnp.arange(self.window)[None]) % self.window
        found = (token >= 0) & jnp.take_along_axis(exists, jnp.maximum(token, 0), axis=1)
        newest = jnp.take_along_axis(seen.queries, jnp.maximum(token, 0)[:, None, :, None], axis=2)
        return jnp.where(found[:, None, :, None], newest, state)

    def shift(self, state: Array, count: Int[Array, ""]) -> Array:
        # Query n + count belongs at index (n + count) % window: a roll by `count`.
        return jnp.roll(state, count, axis=2)

    def ages(self, number: Int[Array, ""] | int) -> Int[Array, " window"]:
        """The age of each index of the ring: the number of queries since it was written, 0 for the newest query, which
        has this number. Indices older than their sequence hold zeros or data of an earlier row."""
        # Query `number` is at index `number % window`, where the difference is a multiple of the window.
        return (number - jnp.arange(self.window)) % self.window
