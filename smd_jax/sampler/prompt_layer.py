"""Attention of a whole prompt in one layer: attends densely, fills a cache and compresses it.

The next layer begins after that, so only one layer's uncompressed cache exists at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.cache import row_parts
from smd_jax.cache import slots as kv_cache
from smd_jax.cache.compression import Compression, PolicyLayer, RowProgress
from smd_jax.cache.quantized import no_slots
from smd_jax.cache.slots import LayerCache
from smd_jax.eviction.statistics import CacheShape, Observation, observed
from smd_jax.message.draws import STAYED, record_order
from smd_jax.message.masks import NEVER, LayerMask, record_evictions, to_visible
from smd_jax.message.quantization import Parity
from smd_jax.model.protocol import AtLayer, check_attended
from smd_jax.pytrees import PyTreeNode
from smd_jax.sampler.config import whole_segments
from smd_jax.sampler.static import Sampler
from smd_kernels.observed import attend_and_observe


class PromptRecord(PyTreeNode):
    """The learner's record of one layer's prefill; of a run, with the layers as second axis.

    Attributes:
      evicted_at: `[prompts, kv_heads, P]` of the shadow mask.
      parity: parity of a quantised cache, `[prompts, kv_heads, P, bytes]`; else None.
      order, logprob: `[prompts, kv_heads, P]` and `[prompts, kv_heads]` of sampled evictions, see
        `smd_jax.message.draws`; else None.
      routing: `[prompts, P, mixtures, per_token]` of all layers, in the first record; None without experts.
    """

    evicted_at: Int[Array, "prompts *layers kv_heads P"]
    parity: Parity | None
    order: Int[Array, "prompts *layers kv_heads P"] | None = None
    logprob: Float[Array, "prompts *layers kv_heads"] | None = None
    routing: Int[Array, "prompts P mixtures per_token"] | None = None


# A layer's state after its prompt: compressed cache and record. Of a run, the layers are the second axis.
PromptResult = tuple[LayerCache, PromptRecord]


class PromptLayer(PyTreeNode):
    """A prompt in one layer: its mask, columns and compression.

    Attributes:
      mask: of the layer.
      columns: `[prompts, tokens]` ascending; -1 for padding.
      progress: of the rows at the prompt's end.
      span_evicted_at: `[prompts, tokens]` of token-triggered spans, see `TokenSpans.read`; None without any.
      own: the policy's inputs for this layer.
      compression: static.
    """

    mask: LayerMask
    columns: Int[Array, "prompts tokens"]
    progress: RowProgress
    span_evicted_at: Int[Array, "prompts tokens"] | None
    own: PolicyLayer
    compression: Compression = struct.field(pytree_node=False)


class PromptRun(PyTreeNode):
    """A run of layers.

    Attributes:
      prompt: as of one layer, but `own` has all layers, on a new first axis.
      result: of the layers so far.
    """

    prompt: PromptLayer
    result: PromptResult


def _of_layer(prompt: PromptLayer, index: Int[Array, ""] | int) -> PromptLayer:
    """The inputs of one layer of a run."""
    return prompt.replace(own=jax.tree.map(lambda x: x[index], prompt.own))


@dataclass(frozen=True)
class PrefillAttend:
    """The attention of a whole prompt. A layer's state is a PromptLayer, and becomes a PromptResult. A run's state is a
    PromptRun.

    Attributes:
      first: column of the first token, padding or not.
    """

    sampler: Sampler
    first: int

    def __call__(
        self,
        q: Float[Array, "prompts heads tokens head_dim"],
        k: Float[Array, "prompts kv_heads tokens head_dim"],
        v: Float[Array, "prompts kv_heads tokens head_dim"],
        layer: PromptLayer | AtLayer,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "prompts heads tokens head_dim"], PromptResult | PromptRun]:
        if not isinstance(layer, AtLayer):
            return self._read(q, k, v, layer, sinks)
        run: PromptRun = layer.state
        out, result = self._read(q, k, v, _of_layer(run.prompt, layer.index), sinks)
        return out, run.replace(result=kv_cache.put_layer(run.result, result, layer.index))

    def nothing_read(self, prompt: PromptLayer, layers: int) -> PromptResult:
        """Zeros for the results of a run of layers, see PromptRun."""
        shape = self.sampler.model.shape
        rows, tokens = prompt.columns.shape
        q, k = (
            jax.ShapeDtypeStruct((rows, heads, tokens, shape.head_dim), jnp.dtype(shape.dtype))
            for heads in (shape.num_heads, shape.num_kv_heads)
        )
        _, like = jax.eval_shape(partial(self._read, sinks=None), q, k, k, _of_layer(prompt, 0))
        return jax.tree.map(lambda x: jnp.zeros((x.shape[0], layers, *x.shape[1:]), x.dtype), like)

    def _read(
        self, q: Array, k: Array, v: Array, layer: PromptLayer, sinks: Array | None
    ) -> tuple[Array, PromptResult]:
        check_attended(self.sampler.model.shape, q, k, v)
        statistics, quant = self.sampler.policy.statistics, self.sampler.config.quant
        places = layer.columns, layer.progress.start
        if kv_cache.needs_attention(statistics):  # tokens × tokens weights exist, of a few rows at a time
            out, states = row_parts.apart(partial(self._observed, sinks), q, k, v, layer.mask, places)
        else:
            out = self.sampler.model.shape.attention.attend(q, k, v, layer.mask, sinks)
            states = self._states(q, k, v, places, None)
        columns = jnp.broadcast_to(layer.columns[:, None], k.shape[:3])
        cache = LayerCache(k, v, columns, states=states, statistics=statistics)
        if layer.span_evicted_at is not None:
            cache = kv_cache.drop(cache, (layer.span_evicted_at < NEVER)[:, None] & cache.valid)
        if quant is not None:
            cache = kv_cache.pad(cache, self.first, 0)  # groups of columns are counted from the prompt's end
            slots = no_slots(cache.keys, self.sampler.prompt_width, whole_segments(self.sampler.config), quant)
            cache = cache.replace(quantized=slots)
        return out, self._compress(cache, layer)

    def _observed(
        self, sinks: Array | None, q: Array, k: Array, v: Array, mask: LayerMask, places: tuple[Array, Array]
    ) -> tuple[Array, tuple[Any, ...]]:
        softcap = self.sampler.model.shape.attention.softcap
        out, received = attend_and_observe(q, k, v, to_visible(mask), softcap, sinks)
        return out, self._states(q, k, v, places, received)

    def _states(
        self, q: Array, k: Array, v: Array, places: tuple[Array, Array], received: Array | None
    ) -> tuple[Any, ...]:
        """The statistics after a prompt."""
        rows, heads, tokens, head_dim = q.shape
        columns, start = places
        shape = CacheShape(rows, heads, k.shape[1], tokens, head_dim, k.dtype)
        seen = Observation(
            queries=q,
            query_columns=columns,
            keys=k,
            values=v,
            columns=jnp.broadcast_to(columns[:, None], k.shape[:3]),
            start=start,
            received=received,
            # A prompt's queries are numbered by their columns, and its keys are in slots from 0 on.
            number=jnp.int32(self.first),
            slot=jnp.int32(0),
        )
        statistics = self.sampler.policy.statistics
        return observed(statistics, [each.init(shape) for each in statistics], seen)

    def _compress(self, cache: LayerCache, layer: PromptLayer) -> PromptResult:
        width = self.sampler.prompt_width
        # Padding is also NEVER here; `smd_jax.sampler.records` sets it to 0.
        evicted_at = jnp.full((*cache.columns.shape[:2], width), NEVER, jnp.int32)
        cache, record = layer.compression(cache, layer.progress, jnp.int32(width - 1), layer.own)
        order = logprob = None
        if self.sampler.policy.gate is not None:
            # Also if all keys fit, so that batches of narrower prompts have the same records.
            order = jnp.full_like(evicted_at, STAYED)
            logprob = jnp.zeros(evicted_at.shape[:2], jnp.promote_types(self.sampler.model.shape.dtype, jnp.float32))
        if record.dropped is not None:
            if order is not None:
                order, logprob = record_order(order, record.dropped[:, :, None]), record.logprob
            # Queries of the prompt see these keys, queries of the response do not.
            evicted_at = record_evictions(evicted_at, record.dropped, jnp.full((1, 1, 1), width, jnp.int32))
        return cache, PromptRecord(evicted_at, record.parity, order, logprob)
