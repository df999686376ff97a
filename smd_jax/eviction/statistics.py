"""What a cache keeps beside its keys because an eviction policy asks for it: statistics of what was attended.

A policy names its statistics, and the sampler keeps a state of each wherever it keeps keys: while prompts are read,
whole or in chunks, while tokens are decoded, in rows that an engine seats late, in quantised caches, on a mesh.

    init ─► observe ─► observe ─► … ─► CacheView.statistic(…)       `observe` follows every attention of a layer;
                                       when the policy scores        the newest query is always in

There are two kinds of state:

    per slot    [rows, kv_heads, slots, ...]   belongs to a key, and moves with it: it is evicted, gathered and padded
                                               as the key is, and is zero where a slot is empty or newly written
    per row     [rows, ...]                    belongs to the row, and stays where it is

To add one: a frozen dataclass with `init` and `observe`, and a policy that has it among its `statistics`. Nothing in
the library needs to know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from smd_jax.pytrees import any_leaves

State = TypeVar("State")  # a pytree of arrays of numbers, all with the rows first


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one layer's cache, for `Statistic.init`.

    Attributes:
      rows, heads, kv_heads, head_dim: of queries and keys. slots: keys at most.
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


@any_leaves
class Observation(struct.PyTreeNode):
    """Consecutive tokens of one layer, just written to the cache and attended: one token a row while decoding, the
    whole prompt or a chunk of it before.

    Attributes:
      queries: `[rows, heads, tokens, head_dim]` after RoPE.
      query_columns: `[rows, tokens]` ascending; -1 for tokens that are not there: padding, and those of rows that have
        ended, which are decoded along with the others. A statistic per row must leave these out; what rows that have
        ended hold never matters.
      keys, values: `[rows, kv_heads, slots, head_dim]` of all slots, those of the tokens included, as they were
        attended: in a quantised cache dequantised. Arbitrary where a slot is empty.
      columns: `[rows, kv_heads, slots]` column of each slot's key, -1 where it is empty.
      start: `[rows]` column of the first token of each row.
      received: `[rows, kv_heads, slots]` attention that each slot received from these queries, softmax weights summed
        over queries and the query heads of the group, float32 or wider. None unless a statistic of the policy has
        `needs_attention`.
      number: of the first query, counted over all that the cache has attended; the others' follow. The same for all
        rows, so that a ring writes one index; it is no column, because rows may be seated late.
      slot: where the key of the first token was written; the others' follow.
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
        """Positions of the tokens in their own sequences, -1 for those that are not there."""
        return jnp.where(self.query_columns >= 0, self.query_columns - self.start[:, None], -1)

    @property
    def positions(self) -> Int[Array, "rows kv_heads slots"]:
        """Positions of the slots' keys in their own sequences, -1 where a slot is empty."""
        return jnp.where(self.valid, self.columns - self.start[:, None, None], -1)

    @property
    def valid(self) -> Bool[Array, "rows kv_heads slots"]:
        """Slots that hold a key."""
        return self.columns >= 0


@dataclass(frozen=True)
class Statistic(Generic[State]):
    """Base of all statistics. Hashable, because policies are static arguments: equal ones compile once.

    Attributes:
      per_slot: whether the state belongs to the slots, see above; then `init` must give zeros.
      needs_attention: whether `Observation.received` is needed. While a prompt is read whole, all its attention
        weights then exist at once, those of a few prompts at a time.
    """

    per_slot: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False

    def init(self, shape: CacheShape) -> State:
        """The state before anything was observed: arrays `[rows, ...]`, or `[rows, kv_heads, slots, ...]` per slot."""
        raise TypeError(f"{type(self).__name__} has no init: its class must define one")

    def observe(self, state: State, seen: Observation) -> State:
        """The state after these tokens, of the same shapes and dtypes."""
        raise TypeError(f"{type(self).__name__} has no observe: its class must define one")

    def turn(self, state: State, count: Int[Array, ""]) -> State:
        """The same state for a cache that numbers all queries higher by `count`: a prompt numbers its queries by
        columns, and an engine seats it `count` steps after its cache was made. Only rings need to do anything."""
        del count
        return state


@dataclass(frozen=True)
class ReceivedAttention(Statistic[Array]):
    """Attention that each key received so far, summed over queries and the query heads of its group:
    `[rows, kv_heads, slots]`, float32 or wider."""

    per_slot: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = True

    def init(self, shape: CacheShape) -> Float[Array, "rows kv_heads slots"]:
        # A sum over many queries: in bfloat16 it would stop growing once it is 256 times what is added.
        return jnp.zeros((shape.rows, shape.kv_heads, shape.slots), shape.wide)

    def observe(self, state: Array, seen: Observation) -> Array:
        assert seen.received is not None, "needs_attention"
        return state + seen.received


@dataclass(frozen=True)
class NewestQueries(Statistic[Array]):
    """The newest `window` queries, `[rows, heads, window, head_dim]` in the dtype of the keys.

    A ring: query number n lies at index `n % window`, so that a new one overwrites the oldest and nothing moves.

        window 4, after query 6      index  0 1 2 3
                                     query  4 5 6 3
    """

    window: int

    def init(self, shape: CacheShape) -> Float[Array, "rows heads window head_dim"]:
        return jnp.zeros((shape.rows, shape.heads, self.window, shape.head_dim), shape.dtype)

    def observe(self, state: Array, seen: Observation) -> Array:
        exists = seen.query_columns >= 0
        tokens = seen.queries.shape[2]
        if tokens == 1:  # an update of one slice stays in place everywhere, one by an array of indices does not
            index = seen.number % self.window
            before = jax.lax.dynamic_slice_in_dim(state, index, 1, axis=2)
            query = jnp.where(exists[:, None, :, None], seen.queries, before)
            return jax.lax.dynamic_update_slice_in_dim(state, query, index, axis=2)
        # For every index of the ring the newest token that belongs there: `end - age` for ages 1 … window.
        end = jnp.max(jnp.where(exists, jnp.arange(tokens) + 1, 0), axis=1)[:, None]
        token = end - 1 - (seen.number + end - 1 - jnp.arange(self.window)[None]) % self.window
        found = (token >= 0) & jnp.take_along_axis(exists, jnp.maximum(token, 0), axis=1)
        newest = jnp.take_along_axis(seen.queries, jnp.maximum(token, 0)[:, None, :, None], axis=2)
        return jnp.where(found[:, None, :, None], newest, state)

    def turn(self, state: Array, count: Int[Array, ""]) -> Array:
        # Query n + count belongs at index (n + count) % window, which is where a roll by `count` takes it.
        return jnp.roll(state, count, axis=2)

    def ages(self, number: Int[Array, ""] | int) -> Int[Array, " window"]:
        """How many queries before the newest, which has this number, each index of the ring was written. A query older
        than its sequence was never written; its index holds zeros or what an earlier row left there."""
        # Query `number` is at index `number % window`, where the difference is a multiple of the window: age 0.
        return (number - jnp.arange(self.window)) % self.window


def check_state(statistic: Statistic[Any], state: Any, shape: CacheShape) -> None:
    """Raises ValueError unless the leaves of a new state begin with the rows, or with rows, KV heads and slots."""
    begin = (shape.rows, shape.kv_heads, shape.slots) if statistic.per_slot else (shape.rows,)
    for leaf in jax.tree.leaves(state):
        if leaf.shape[: len(begin)] != begin:
            kind = "rows, kv_heads, slots" if statistic.per_slot else "rows"
            raise ValueError(
                f"expected {statistic}.init to give arrays that begin with {begin} ({kind}), because per_slot is "
                f"{statistic.per_slot}; got {leaf.shape}"
            )


def check_observed(statistic: Statistic[Any], before: Any, after: Any) -> None:
    """Raises ValueError unless observing left the state's structure, shapes and dtypes as they were."""

    def form(state: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype.name), state)

    if form(before) != form(after):
        raise ValueError(
            f"expected {statistic}.observe to give a state of the form that it took, {form(before)}; got {form(after)}"
        )
