"""What a layer does with its q, k and v when it reads a prompt, and when it reads a token against its cache.

The model calls these in every layer, see `smd_jax.model.protocol`; it never sees a cache, a policy or a kernel. What is
the same in all layers and all steps is a static field; what changes is in the layer's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import LayerCache
from smd_jax.masks import LayerMask, to_visible
from smd_jax.model.attention import AttentionConfig, attend, decode
from smd_jax.pytrees import any_leaves
from smd_kernels.observed import attend_and_observe


@any_leaves
class PrefillLayer(struct.PyTreeNode):
    """What one layer hands over after reading the prompt.

    Attributes:
      keys, values: `[batch, kv_heads, tokens, head_dim]`.
      received: `[batch, kv_heads, tokens]` attention that each key received, or None if not asked for.
      queries: `[batch, heads, window, head_dim]` the newest queries as in `LayerCache.queries`, or None.
    """

    keys: Float[Array, "batch kv_heads tokens head_dim"]
    values: Float[Array, "batch kv_heads tokens head_dim"]
    received: Float[Array, "batch kv_heads tokens"] | None
    queries: Float[Array, "batch heads window head_dim"] | None


@dataclass(frozen=True)
class PrefillAttend:
    """Of a whole prompt; a layer's state is its mask, and becomes a PrefillLayer.

    Attributes:
      query_window: newest queries that are kept. observe: whether the attention that each key received is.
    """

    attention: AttentionConfig
    query_window: int
    observe: bool

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: LayerMask,
        /,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], PrefillLayer]:
        if self.observe:
            out, received = attend_and_observe(q, k, v, to_visible(layer))
        else:
            out, received = attend(q, k, v, layer, self.attention.impl, self.attention.sizes), None
        queries = None
        if self.query_window:
            newest = kv_cache.newest_columns(q.shape[2] - 1, self.query_window)
            # Windows longer than the prompt hold queries that do not exist; their positions say so.
            queries = q[:, :, jnp.maximum(newest, 0)]
        return out, PrefillLayer(k, v, received, queries)


@any_leaves
class DecodeLayer(struct.PyTreeNode):
    """A layer's cache, and where in it the next tokens go.

    Attributes:
      cache: of the layer.
      slot: of the first token's key; the others' follow.
      columns: `[batch, tokens]` ascending; -1 for tokens that are not there (padding, rows that have ended).
      number: of the first query, see `LayerCache.queries`.
    """

    cache: LayerCache
    slot: Int[Array, ""]
    columns: Int[Array, "batch tokens"]
    number: Int[Array, ""]


@dataclass(frozen=True)
class DecodeAttend:
    """Of a token of a response or a chunk of a prompt: writes the keys to their slots, and attends to every live key,
    those included. A layer's state is a DecodeLayer, and becomes its LayerCache."""

    attention: AttentionConfig

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: DecodeLayer,
        /,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], LayerCache]:
        cache = kv_cache.write(layer.cache, layer.slot, k, v, layer.columns)
        keys, values = kv_cache.full_precision(cache)
        if q.shape[2] == 1:
            out, received = decode(q, keys, values, cache.valid, self.attention.decode_impl)
        else:
            out, received = attend_and_observe(q, keys, values, kv_cache.visible(cache, layer.columns))
        return out, kv_cache.observe(cache, received, q, layer.number)
