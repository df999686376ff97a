"""Compression of a cache between two segments: the policy scores the keys, the best stay, evictions are recorded.

    [ 3 7 8 9 | 10 11 12 ]   ── score, keep 4 ──►   [ 3 8 10 12 | . . . ]      record: 7, 9 and 11 are evicted

Rows are independent, so a cache is compressed in place, a few rows of each device at a time. So there is never a second
cache or a policy's scratch memory for all rows, except on a mesh with a tensor axis (`smd_jax.cache.row_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from smd_jax.cache import row_parts
from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import EMPTY, LayerCache
from smd_jax.eviction.base import CacheView, EvictionPolicy, scores_of
from smd_jax.eviction.policies import gate_logits
from smd_jax.message.draws import STAYED, ordered_logprob
from smd_jax.message.quantization import Parity
from smd_jax.pytrees import PyTreeNode, any_leaves, stack


class RowProgress(PyTreeNode):
    """Progress of every row at a compression. Columns: prompt 0 … P-1, response from P on.

    Attributes:
      start: `[rows]` column of the first token.
      newest: `[rows]` column of the newest query.
      segment_start: `[rows]` first column of the segment that ends now; columns from here are in full precision.
      step: `[rows]` response tokens before the next segment; 0 at a prompt's end, negative within a prompt.
      rng: `[rows]` PRNG keys for random policies, consumed.
    """

    start: Int[Array, " rows"]
    newest: Int[Array, " rows"]
    segment_start: Int[Array, " rows"]
    step: Int[Array, " rows"]
    rng: Key[Array, " rows"]


class CompressionRecord(PyTreeNode):
    """The learner's record of one compression.

    Attributes:
      dropped: `[rows, kv_heads, slots - budget]` columns of the evicted keys, -1 for empty slots; None if all fit.
        Sampled evictions are in sampling order.
      logprob: `[rows, kv_heads]` log-probability of sampled evictions, see `smd_jax.message.draws`; else None.
      parity: parity of a quantised cache's new codes, `[rows, kv_heads, columns, bytes]`; else None.
    """

    dropped: Int[Array, "rows kv_heads rest"] | None
    parity: Parity | None
    logprob: Float[Array, "rows kv_heads"] | None = None


@any_leaves
class PolicyLayer(NamedTuple):
    """Inputs of a policy that differ between layers.

    Attributes:
      parameters: see `EvictionPolicy.parameters`.
      index: of the layer in the model.
    """

    parameters: Any
    index: Int[Array, ""]


@dataclass(frozen=True)
class Compression:
    """The compression of a layer, or of each layer of a run. Static.

    Attributes:
      policy: scores the keys.
      budget: number of kept keys.
      buffer: empty slots to append at the right.
      window: sliding window of this layer, in columns; None: no window.
    """

    policy: EvictionPolicy
    budget: int
    buffer: int
    window: int | None = None

    def of_layers(self, params: Any, layers: range) -> PolicyLayer:
        """The policy's inputs for a layer; for several layers, stacked on a new first axis.

        Args:
          params: the sampler's parameters, for policies with parameters.
        """
        each = [PolicyLayer(self.policy.parameters(params, layer), jnp.int32(layer)) for layer in layers]
        return each[0] if len(each) == 1 else stack(each)

    def __call__(
        self, cache: LayerCache, progress: RowProgress, number: Int[Array, ""], own: PolicyLayer
    ) -> tuple[LayerCache, CompressionRecord]:
        """Compresses one layer to `budget + buffer` slots, a few rows at a time.

        Args:
          number: number of the newest query, see `Observation.number`.
          own: the policy's inputs for this layer.
        """
        return row_parts.apart(lambda cache, progress: self._compress(cache, progress, number, own), cache, progress)

    def in_place(
        self, cache: LayerCache, progress: RowProgress, number: Int[Array, ""], params: Any, layers: range
    ) -> tuple[LayerCache, CompressionRecord]:
        """Compresses a cache that already has `budget + buffer` slots: of one layer, or of a run of stacked layers.

        Args:
          params: the sampler's parameters, for policies with parameters.
          layers: the layers of this cache.

        Returns:
          The cache and the record; for a run, their second axis is the layer.
        """
        own = self.of_layers(params, layers)
        if not kv_cache.of_run(cache):
            return self._in_place(cache, progress, number, own)

        def step(run: LayerCache, own: PolicyLayer) -> tuple[LayerCache, CompressionRecord]:
            index = own.index - layers[0]
            layer, record = self._in_place(kv_cache.at_layer(run, index), progress, number, own)
            return kv_cache.put_layer(run, layer, index), record

        cache, records = jax.lax.scan(step, cache, own)
        return cache, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), records)

    def _in_place(
        self, cache: LayerCache, progress: RowProgress, number: Int[Array, ""], own: PolicyLayer
    ) -> tuple[LayerCache, CompressionRecord]:
        def only(states: tuple[Any, ...], per_slot: bool) -> tuple[Any, ...]:
            pairs = zip(cache.statistics, states, strict=True)
            return tuple(state if statistic.per_slot == per_slot else None for statistic, state in pairs)

        def together(moved: tuple[Any, ...], fixed: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(row if slots is None else slots for slots, row in zip(moved, fixed, strict=True))

        def compress(
            slots: LayerCache, read: tuple[tuple[Any, ...], RowProgress]
        ) -> tuple[LayerCache, CompressionRecord]:
            fixed, progress = read
            slots = slots.replace(states=together(slots.states, fixed))
            new, record = self._compress(slots, progress, number, own)
            return new.replace(states=only(new.states, True)), record

        # Per-row statistics do not change; as written arrays they would be copied for every part.
        moved, fixed = only(cache.states, True), only(cache.states, False)
        new, record = row_parts.in_place(compress, cache.replace(states=moved), (fixed, progress))
        return new.replace(states=together(new.states, fixed)), record

    def _compress(
        self, cache: LayerCache, progress: RowProgress, number: Int[Array, ""], own: PolicyLayer
    ) -> tuple[LayerCache, CompressionRecord]:
        if self.policy.evicts and self.policy.spans is not None:
            cache = kv_cache.empty_first(cache)  # spans leave gaps, which policies do not expect
        # Number of slots to evict. A short prompt may have fewer than the budget.
        rest = cache.columns.shape[2] - self.budget
        if rest <= 0:
            cache, parity = kv_cache.quantize(cache, progress.segment_start)
            # Empty slots go to the left, so that the newest key stays the last of the kept ones.
            return kv_cache.pad(cache, -rest, self.buffer), CompressionRecord(None, parity)
        logprob = None
        if self.policy.evicts:
            seen = self._within_window(cache, progress)
            view = self._view(seen, progress, number, own)
            scores = scores_of(self.policy, view)
            kept, evicted = kv_cache.select(scores, seen.valid, self.budget)
            if (gate := self.policy.gate) is not None:
                # In sampling order. Empty slots, which are not sampled, come first.
                evicted_scores = jnp.take_along_axis(jnp.where(seen.valid, scores, -jnp.inf), evicted, axis=2)
                evicted = jnp.take_along_axis(evicted, jnp.argsort(evicted_scores, axis=2), axis=2)
                numbers = jnp.broadcast_to(jnp.arange(rest, dtype=jnp.int32), evicted.shape)
                nowhere = jnp.full(seen.valid.shape, STAYED, jnp.int32)
                order = jnp.put_along_axis(nowhere, evicted, numbers, axis=-1, inplace=False)
                logprob = ordered_logprob(gate_logits(gate, view), order, seen.valid, seen.valid & (order != STAYED))
            dropped = jnp.take_along_axis(seen.columns, evicted, axis=2)
        else:  # a quantised cache that never evicts holds all keys: its oldest slots are empty
            kept = jnp.broadcast_to(jnp.arange(rest, rest + self.budget), (*cache.columns.shape[:2], self.budget))
            dropped = None
        # Before eviction: a group's range covers all its columns, evicted or not, as in the learner.
        cache, parity = kv_cache.quantize(cache, progress.segment_start)
        return kv_cache.gather(cache, kept, self.buffer), CompressionRecord(dropped, parity, logprob)

    def _within_window(self, cache: LayerCache, progress: RowProgress) -> LayerCache:
        """Marks slots outside the sliding window as empty, so that they are dropped first. They need no record: see
        `smd_jax.message.masks.windowed`."""
        if self.window is None:
            return cache
        # The newest query has attended already, so only its successor's window matters.
        next_query = (progress.newest + 1)[:, None, None]
        return cache.replace(columns=jnp.where(next_query < cache.columns + self.window, cache.columns, EMPTY))

    def _view(self, cache: LayerCache, progress: RowProgress, number: Int[Array, ""], own: PolicyLayer) -> CacheView:
        # One PRNG key per row, compression and layer.
        rng = jax.vmap(lambda key, step: jax.random.fold_in(jax.random.fold_in(key, step), own.index))
        keys, values = kv_cache.full_precision(cache)
        return CacheView(
            keys=keys,
            values=values,
            valid=cache.valid,
            positions=jnp.where(cache.valid, cache.columns - progress.start[:, None, None], EMPTY),
            newest=progress.newest - progress.start,
            number=number,
            states=cache.states,
            # Steps within a prompt are negative and wrap to large numbers that no response reaches.
            rng=rng(progress.rng, progress.step.astype(jnp.uint32)),
            budget=self.budget,
            declared=cache.statistics,
            parameters=own.parameters,
        )
