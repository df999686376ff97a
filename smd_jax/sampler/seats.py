"""Assigns prefilled prompts to rows of a cache, all at once or when a row is free."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import EMPTY, KVCache
from smd_jax.devices.sharding import constrain_rows
from smd_jax.message.spans import SpanState
from smd_jax.pytrees import PyTreeNode
from smd_jax.sampler.prefill import Prefilled
from smd_jax.sampler.static import Sampler


class Seats(PyTreeNode):
    """Rows to begin.

    Attributes:
      source: `[rows]` index of the row's prefilled prompt; -1 leaves the row unchanged.
      rng: `[rows]` one PRNG key per row.
      limit: `[rows]` longest response.
    """

    source: Int[Array, " rows"]
    rng: Key[Array, " rows"]
    limit: Int[Array, " rows"]


class SamplerState(PyTreeNode):
    """The sampler's state between segments; every leaf but `cache_steps` has the rows first.

    Attributes:
      cache_steps: steps of the decode loop since the cache was made; see the timeline in `smd_jax.sampler.static`.
      drawn: `[rows]` tokens of each row's response so far.
      limit: `[rows]` longest response.
      done: `[rows]` finished rows.
      terminated: `[rows]` rows that ended before the length limit.
      stop: `[rows]` state of the search for stop strings.
      start: `[rows]` column of the first token.
      rng: `[rows]` PRNG keys.
      hidden: `[rows, hidden]` of the newest token.
      cache: per layer or run of layers.
      spans: state of the token-triggered spans; else None.
    """

    cache_steps: Int[Array, ""]
    drawn: Int[Array, " rows"]
    limit: Int[Array, " rows"]
    done: Bool[Array, " rows"]
    terminated: Bool[Array, " rows"]
    stop: Int[Array, " rows"]
    start: Int[Array, " rows"]
    rng: Key[Array, " rows"]
    hidden: Float[Array, "rows hidden"]
    cache: KVCache
    spans: SpanState | None = None


def empty(prefilled: Prefilled, rows: int) -> SamplerState:
    """Free rows, with caches like those of `prefilled` (arrays or their shapes)."""

    def zeros_like(x: Any) -> Array:
        return jnp.zeros((rows, *x.shape[1:]), x.dtype)

    zeros = jnp.zeros((rows,), jnp.int32)
    cache = jax.tree.map(zeros_like, prefilled.cache)
    # Unused keys. They are threefry keys, because the keys that replace them are (see `row_keys`), and a state keeps
    # its types.
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
    return SamplerState(
        cache_steps=jnp.zeros((), jnp.int32),
        drawn=zeros,
        limit=zeros,
        # A free row samples nothing, and its steps leave empty slots.
        done=jnp.ones((rows,), bool),
        terminated=jnp.zeros((rows,), bool),
        stop=zeros,
        start=zeros,
        rng=keys,
        hidden=zeros_like(prefilled.hidden),
        cache=tuple(layer.replace(columns=jnp.full_like(layer.columns, EMPTY)) for layer in cache),
        spans=jax.tree.map(zeros_like, prefilled.spans),
    )


def constrained(state: SamplerState) -> SamplerState:
    """Pins rows and heads to their axes of the mesh, see `constrain_rows`."""
    cache = tuple(constrain_rows(layer, 2 if kv_cache.of_run(layer) else 1) for layer in state.cache)
    return constrain_rows(state.replace(cache=())).replace(cache=cache)


def seat(sampler: Sampler, state: SamplerState, prefilled: Prefilled, seats: Seats) -> SamplerState:
    """Begins new rows; all others are unchanged."""
    new = seats.source >= 0

    def choose(old: Array, prompts: Array) -> Array:
        # -1 would index the last prompt. Any index is fine for unchanged rows.
        chosen = prompts[jnp.maximum(seats.source, 0)]
        return jnp.where(new.reshape(-1, *(1,) * (old.ndim - 1)), chosen, old)

    # Prompts are read at step 0: statistics that store queries by number, and the slots of a ring (a cache that is
    # never compressed), rotate to the current step, which all rows share. See the timeline in `smd_jax.sampler.static`.
    shift = partial(kv_cache.shift, ring=not sampler.compresses)
    shifted = tuple(kv_cache.each_layer(shift, layer, state.cache_steps) for layer in prefilled.cache)
    return state.replace(
        drawn=jnp.where(new, 0, state.drawn),
        limit=jnp.where(new, seats.limit, state.limit),
        done=state.done & ~new,
        terminated=state.terminated & ~new,
        stop=jnp.where(new, 0, state.stop),
        start=choose(state.start, prefilled.start),
        rng=jnp.where(new, seats.rng, state.rng),
        hidden=choose(state.hidden, prefilled.hidden),
        # All slots of a new row, including empty ones, so that nothing of the previous row remains.
        cache=jax.tree.map(choose, state.cache, shifted),
        spans=jax.tree.map(choose, state.spans, prefilled.spans),
    )


def begin(prefilled: Prefilled, rng: Key[Array, " rows"], limit: Int[Array, " rows"]) -> SamplerState:
    """A batch in which all rows begin, those of a prompt adjacent: `seat` on free rows, without a gather.

    The sources of `seat` are dynamic, and over a mesh its gather copies all caches to every device. Here row i has
    prompt `i // group`, a repetition that each device computes from its own prompts.
    """
    rows = rng.shape[0]
    group = rows // prefilled.start.shape[0]

    def for_each_row(x: Array) -> Array:
        return jnp.repeat(x, group, axis=0)

    state = empty(jax.eval_shape(lambda: prefilled), rows)
    return state.replace(
        limit=limit,
        done=jnp.zeros_like(state.done),
        start=for_each_row(prefilled.start),
        rng=rng,
        hidden=for_each_row(prefilled.hidden),
        cache=jax.tree.map(for_each_row, prefilled.cache),
        spans=jax.tree.map(for_each_row, prefilled.spans),
    )
