"""Attention of new tokens to a layer's cache.

The model calls this in every layer, see `smd_jax.model.protocol`; it never sees a cache, a policy or a kernel. Values
that are the same in all layers and steps are static fields; the others are in the layer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.cache import row_parts
from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import KVCache, LayerCache
from smd_jax.eviction.statistics import Observation
from smd_jax.model.attention import decode
from smd_jax.model.protocol import (
    AtLayer,
    EncodedPositions,
    LayerRun,
    LayerState,
    ModelShape,
    Params,
    check_attended,
    forward,
)
from smd_jax.model.routing import read_routing, recording_layers
from smd_jax.pytrees import PyTreeNode
from smd_jax.sampler.static import Sampler
from smd_kernels.observed import attend_and_observe


class DecodeLayer(PyTreeNode):
    """A layer's cache, and the slots of the next tokens.

    Attributes:
      cache: the layer's cache.
      slot: slot of the first token's key; the others follow.
      columns: `[batch, tokens]` ascending; -1 for missing tokens (padding, finished rows).
      start: `[batch]` column of the first token of each row.
      number: number of the first query, see `Observation.number`.
      evicted_at: `[batch, T]` first column that does not see a key, if keys are evicted between these tokens; else
        None.
      window: sliding window in columns, see `ModelShape.windows`. Static.
    """

    cache: LayerCache
    slot: Int[Array, ""]
    columns: Int[Array, "batch tokens"]
    start: Int[Array, " batch"]
    number: Int[Array, ""]
    evicted_at: Int[Array, "batch T"] | None = None
    window: int | None = struct.field(pytree_node=False, default=None)


@dataclass(frozen=True)
class DecodeAttend:
    """Attention of response tokens or of a prompt's chunk: writes the keys to their slots and attends to every live
    key, including the new ones. A layer's state is a DecodeLayer; the new state has the new cache."""

    shape: ModelShape

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: DecodeLayer | AtLayer,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], DecodeLayer]:
        check_attended(self.shape, q, k, v)
        # Keys are written before attention, because a query sees its own. Compression follows at the segment's end.
        if not isinstance(layer, AtLayer):
            cache = kv_cache.write(layer.cache, layer.slot, k, v, layer.columns)
            out, cache = self._read(q, layer, cache, sinks)
            return out, layer.replace(cache=cache)
        run: DecodeLayer = layer.state
        caches = kv_cache.write(run.cache, run.slot, k, v, run.columns, layer.index)
        out, cache = self._read(q, run, kv_cache.at_layer(caches, layer.index), sinks)
        # Attention changes only statistics.
        states = kv_cache.put_layer(caches.states, cache.states, layer.index)
        return out, run.replace(cache=caches.replace(states=states))

    def _read(self, q: Array, layer: DecodeLayer, cache: LayerCache, sinks: Array | None) -> tuple[Array, LayerCache]:
        """Attention of these queries to a layer's cache, and the cache with new statistics."""
        attention = self.shape.attention
        softcap = attention.softcap
        # For a quantised cache only statistics that need keys read these; otherwise the compiler drops them.
        keys, values = kv_cache.full_precision(cache)
        if q.shape[2] == 1:
            visible = kv_cache.visible(cache, layer.columns, layer.window, layer.evicted_at)
            codes = None if cache.quantized is None else kv_cache.codes(cache)
            out, received = decode(
                q, cache.keys, cache.values, visible[:, :, 0], attention.decode_impl, softcap, sinks, codes
            )
        else:
            # Scores and visibility of all tokens × slots exist for a few rows at a time.
            def attend(q: Array, slots: LayerCache, columns: Array, evicted_at: Array | None) -> tuple[Array, Array]:
                visible = kv_cache.visible(slots, columns, layer.window, evicted_at)
                return attend_and_observe(q, slots.keys, slots.values, visible, softcap, sinks)

            slots = LayerCache(keys, values, cache.columns)
            out, received = row_parts.apart(attend, q, slots, layer.columns, layer.evicted_at)
        seen = Observation(
            queries=q,
            query_columns=layer.columns,
            keys=keys,
            values=values,
            columns=cache.columns,
            start=layer.start,
            received=received if kv_cache.needs_attention(cache.statistics) else None,
            number=layer.number,
            slot=layer.slot,
        )
        return out, kv_cache.observe(cache, seen)


def read_tokens(
    sampler: Sampler,
    params: Params,
    tokens: Int[Array, "batch tokens"],
    positions: EncodedPositions,
    cache: KVCache,
    slots: tuple[Int[Array, ""], ...],
    columns: Int[Array, "batch tokens"],
    start: Int[Array, " batch"],
    number: Int[Array, ""],
    evicted_at: Int[Array, "batch T"] | None = None,
) -> tuple[Float[Array, "batch tokens hidden"], KVCache, Int[Array, "batch tokens mixtures per_token"] | None]:
    """The hidden states of tokens, the caches with their keys, and their experts (None of a model without). Keys that
    are evicted between these tokens are dropped after them.

    Args:
      slots: of each layer or run. The others as for DecodeLayer.
    """
    shape = sampler.model.shape
    states = [
        DecodeLayer(layer, slot, columns, start, number, evicted_at, shape.window(layers[0]))
        for layers, layer, slot in zip(sampler.runs, cache, slots, strict=True)
    ]
    layers = recording_layers(shape, layer_states(sampler.runs, states))
    hidden, layers = forward(sampler.model, params, tokens, positions, DecodeAttend(shape), layers)
    layers, experts = read_routing(shape, layers)
    cache = tuple(layer.cache for layer in states_of(layers))
    if evicted_at is not None:
        newest = columns.max(axis=1)

        def drop(layer: LayerCache) -> LayerCache:
            gone_at = kv_cache.of_columns(layer, evicted_at)
            return kv_cache.drop(layer, gone_at <= newest.reshape(-1, *(1,) * (gone_at.ndim - 1)))

        cache = tuple(map(drop, cache))
    return hidden, cache, experts


def layer_states(runs: Sequence[range], states: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """States for `LanguageModel.hidden`, those of several layers as LayerRun."""
    pairs = zip(runs, states, strict=True)
    return tuple(state if len(layers) == 1 else LayerRun(state, len(layers)) for layers, state in pairs)


def states_of(layers: Sequence[LayerState]) -> list[Any]:
    """The inverse of `layer_states`, for the states that the model returned."""
    return [layer.state if isinstance(layer, LayerRun) else layer for layer in layers]
