"""What a layer does with its q, k and v when it reads a prompt, and when it reads a token against its cache.

The model calls these in every layer, see `smd_jax.model.protocol`; it never sees a cache, a policy or a kernel. What is
the same in all layers and all steps is a static field; what changes is in the layer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.cache import row_parts
from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import KVCache, LayerCache
from smd_jax.eviction.statistics import CacheShape, Observation, Statistic
from smd_jax.message.masks import LayerMask, to_visible
from smd_jax.model.attention import AttentionConfig, decode, decode_codes
from smd_jax.model.protocol import ModelShape
from smd_jax.pytrees import any_leaves
from smd_kernels.observed import attend_and_observe


@any_leaves
class PromptLayer(struct.PyTreeNode):
    """What the queries of a prompt see in one layer, and where its tokens are.

    Attributes:
      mask: of the layer.
      columns: `[batch, tokens]` ascending; -1 for padding.
      start: `[batch]` column of the first token.
    """

    mask: LayerMask
    columns: Int[Array, "batch tokens"]
    start: Int[Array, " batch"]


@dataclass(frozen=True)
class PrefillAttend:
    """The attention of a whole prompt. A layer's state is a PromptLayer, and becomes a LayerCache with a slot for
    every column.

    Attributes:
      statistics: those of the eviction policy. first: column of the first token, padding or not.
    """

    attention: AttentionConfig
    statistics: tuple[Statistic[Any], ...]
    first: int

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: PromptLayer,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], LayerCache]:
        if kv_cache.needs_attention(self.statistics):  # tokens × tokens weights exist, of a few rows at a time
            out, states = row_parts.apart(partial(self._observed, sinks), q, k, v, layer)
        else:
            out = self.attention.attend(q, k, v, layer.mask, sinks)
            states = self._states(q, k, v, layer, None)
        columns = jnp.broadcast_to(layer.columns[:, None], k.shape[:3])
        return out, LayerCache(k, v, columns, states=states, statistics=self.statistics)

    def _observed(
        self, sinks: Array | None, q: Array, k: Array, v: Array, layer: PromptLayer
    ) -> tuple[Array, tuple[Any, ...]]:
        out, received = attend_and_observe(q, k, v, to_visible(layer.mask), self.attention.softcap, sinks)
        return out, self._states(q, k, v, layer, received)

    def _states(self, q: Array, k: Array, v: Array, layer: PromptLayer, received: Array | None) -> tuple[Any, ...]:
        rows, heads, tokens, head_dim = q.shape
        shape = CacheShape(rows, heads, k.shape[1], tokens, head_dim, k.dtype)
        cache = kv_cache.no_keys(self.statistics, shape)
        seen = Observation(
            queries=q,
            query_columns=layer.columns,
            keys=k,
            values=v,
            columns=jnp.broadcast_to(layer.columns[:, None], k.shape[:3]),
            start=layer.start,
            received=received,
            # A prompt's queries are numbered by their columns, and its keys lie in slots of their own from 0 on.
            number=jnp.int32(self.first),
            slot=jnp.int32(0),
        )
        return kv_cache.observe(cache, seen).states


@any_leaves
class DecodeLayer(struct.PyTreeNode):
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
    key, including the new ones. A layer's state is a DecodeLayer; the new state is its LayerCache."""

    attention: AttentionConfig

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: DecodeLayer,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], LayerCache]:
        # Before attention, because a query sees its own key. Compression follows at the segment's end.
        softcap = self.attention.softcap
        cache = kv_cache.write(layer.cache, layer.slot, k, v, layer.columns)
        # For a quantised cache only statistics that need keys read these; otherwise the compiler drops them.
        keys, values = kv_cache.full_precision(cache)
        if q.shape[2] == 1:
            # No key is newer than the query, so no causal mask is needed. A missing token sees nothing, so that the
            # keys of a waiting row receive no attention from it.
            valid = cache.valid & (layer.columns[:, None] != kv_cache.EMPTY)
            if layer.window is not None:
                # A window counts the query's own column, as in `smd_jax.message.masks.windowed`.
                valid = valid & (layer.columns[:, None] < cache.columns + layer.window)
            if cache.quantized is None:
                out, received = decode(q, keys, values, valid, self.attention.decode_impl, softcap, sinks)
            else:
                codes = kv_cache.codes(cache)
                precise = cache.keys, cache.values
                out, received = decode_codes(q, codes, *precise, valid, self.attention.decode_impl, softcap, sinks)
        else:
            visible = kv_cache.visible(cache, layer.columns, layer.window, layer.evicted_at)
            out, received = attend_and_observe(q, keys, values, visible, softcap, sinks)
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


def decode_layers(
    shape: ModelShape,
    cache: KVCache,
    slots: tuple[Int[Array, ""], ...],
    columns: Int[Array, "batch tokens"],
    start: Int[Array, " batch"],
    number: Int[Array, ""],
    evicted_at: Int[Array, "batch T"] | None = None,
) -> tuple[DecodeLayer, ...]:
    """The state of every layer; arguments as for DecodeLayer, with one of `slots` per layer."""
    layers = zip(cache, slots, strict=True)
    return tuple(
        DecodeLayer(*layer, columns, start, number, evicted_at, shape.window(index))
        for index, layer in enumerate(layers)
    )
