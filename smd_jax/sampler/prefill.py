"""Prefill: reads prompts whole and densely, or in chunks with evictions in between.

whole       every token of the prompt sees all before it; then the cache is compressed:     evicted_at = P
in chunks   [. . a b] ─► compress ─► [c d e f] ─► compress ─► …     evicted_at = the column after a chunk
            sees the kept keys of earlier chunks and its own past; memory does not depend on the length
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.compression import Compression, RowProgress
from smd_jax.cache.slots import EMPTY, KVCache, LayerCache
from smd_jax.eviction.statistics import CacheShape
from smd_jax.message.masks import NEVER, dense_mask, positions, record_evictions
from smd_jax.message.spans import SpanState
from smd_jax.model.protocol import Params, forward
from smd_jax.model.routing import NOT_RECORDED, not_recorded, read_routing, recording_layers
from smd_jax.model.teacher_forced import layer_masks
from smd_jax.pytrees import PyTreeNode
from smd_jax.sampler.attends import layer_states, read_tokens, states_of
from smd_jax.sampler.keys import eviction_keys
from smd_jax.sampler.prompt_layer import PrefillAttend, PromptLayer, PromptRecord, PromptRun
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch


class Prefilled(PyTreeNode):
    """Prefilled prompts, each for any number of rows.

    Attributes:
      hidden: `[prompts, hidden]` of the last token.
      start: `[prompts]` column of the first token.
      cache, records: per layer or run of layers.
      spans: state of the token-triggered spans; else None.
    """

    hidden: Float[Array, "prompts hidden"]
    start: Int[Array, " prompts"]
    cache: KVCache
    records: tuple[PromptRecord, ...]
    spans: SpanState | None = None


@jax.named_scope("prefill")  # profiles and experiments/lib/hlo.py distinguish it from decoding by this name
def prefill(sampler: Sampler, params: Params, prompts: PromptBatch, rng: Key[Array, " prompts"]) -> Prefilled:
    """Reads prompts `[prompts, P or fewer]`, which end at column P, and compresses every layer to its budget."""
    if sampler.config.prefill_chunk is not None:
        return _prefill_chunks(sampler, params, prompts, rng, sampler.config.prefill_chunk)
    model = sampler.model
    width = prompts.tokens.shape[1]
    first = sampler.prompt_width - width
    columns = _columns(sampler, prompts)
    mask = dense_mask(prompts.valid)
    spans, span_evicted_at = _read_spans(sampler, prompts)
    if span_evicted_at is not None:
        # The mask counts columns of this batch.
        span_evicted_at = jnp.where(span_evicted_at < NEVER, span_evicted_at - first, NEVER)[:, first:]
        mask = mask.replace(evicted_at=jnp.minimum(mask.evicted_at, span_evicted_at[:, None, None]))
    masks = layer_masks(model.shape, prompts.tokens, mask)
    progress = _progress(sampler, _first_column(sampler, prompts), rng, jnp.int32(sampler.prompt_width))
    attend = PrefillAttend(sampler, first)

    def state(layers: range, compression: Compression) -> PromptLayer | PromptRun:
        own = compression.of_layers(params, layers)
        one = PromptLayer(masks[layers[0]], columns, progress, span_evicted_at, own, compression)
        return one if len(layers) == 1 else PromptRun(one, attend.nothing_read(one, len(layers)))

    pairs = zip(sampler.runs, sampler.compressions(sampler.row_buffer), strict=True)
    layers = layer_states(sampler.runs, [state(*pair) for pair in pairs])
    places = model.encode_positions(positions(prompts.valid))
    layers = recording_layers(model.shape, layers)
    hidden, layers = forward(model, params, prompts.tokens, places, attend, layers)
    layers, routing = read_routing(model.shape, layers)
    results = [state.result if isinstance(state, PromptRun) else state for state in states_of(layers)]
    cache, records = zip(*results, strict=True)
    return Prefilled(hidden[:, -1], progress.start, cache, _with_routing(sampler, records, routing), spans)


def _with_routing(
    sampler: Sampler, records: tuple[PromptRecord, ...], routing: Int[Array, "prompts tokens mixtures k"] | None
) -> tuple[PromptRecord, ...]:
    """Records with the routing of the last columns of the prompt, in the first layer's."""
    if routing is None:
        return records
    missing = sampler.prompt_width - routing.shape[1]
    routing = jnp.pad(routing, [(0, 0), (missing, 0), (0, 0), (0, 0)], constant_values=NOT_RECORDED)
    return records[0].replace(routing=routing), *records[1:]


@dataclass(frozen=True)
class _Chunks:
    """Prompts in chunks of columns, counted from the prompts' end, so that only the first chunk holds padding.

    P 37, chunks of 8, `-3` because the first begins three columns before the prompt does:

        column   -3 …… 4 | 5 …… 12 | 13 …… 20 | 21 …… 28 | 29 …… 36 | response

    Attributes:
      prompts: padded to whole chunks.
      start: `[prompts]` column of the first token.
      span_evicted_at: `[prompts, P]` of token-triggered spans; None without any.
      length: columns of a chunk.
      count: number of chunks.
      first: first column of the first chunk, negative if whole chunks hold more columns than the prompt.
    """

    prompts: PromptBatch
    start: Int[Array, " prompts"]
    span_evicted_at: Int[Array, "prompts P"] | None
    length: int
    count: int
    first: int

    def columns(self, index: Array) -> Int[Array, " length"]:
        """Columns of a chunk's tokens; negative before the prompt."""
        return self.first + index * self.length + jnp.arange(self.length, dtype=jnp.int32)


class _Reading(NamedTuple):
    """Carry of the loop over chunks.

    Attributes:
      cache: per layer or run of layers.
      evicted_at: likewise, as in PromptRecord.
      hidden: `[prompts, hidden]` of the newest token.
      routing: of the columns of all chunks; None without experts.
    """

    cache: KVCache
    evicted_at: tuple[Int[Array, "prompts kv_heads P"], ...]
    hidden: Float[Array, "prompts hidden"]
    routing: Int[Array, "prompts tokens mixtures per_token"] | None


def _prefill_chunks(
    sampler: Sampler, params: Params, prompts: PromptBatch, rng: Key[Array, " prompts"], chunk: int
) -> Prefilled:
    """Reads prompts `chunk` columns at a time, and compresses the cache after each chunk."""
    width = prompts.tokens.shape[1]
    length = min(chunk, width)  # of a chunk
    count = -(-width // length)
    missing = count * length - width
    padded = PromptBatch(*(jnp.pad(x, [(0, 0), (missing, 0)]) for x in (prompts.tokens, prompts.valid)))
    start = _first_column(sampler, prompts)
    spans, span_evicted_at = _read_spans(sampler, prompts)
    chunks = _Chunks(padded, start, span_evicted_at, length, count, sampler.prompt_width - count * length)

    def one(index: Array, reading: _Reading) -> _Reading:
        reading = _read_chunk(sampler, params, chunks, index, reading)
        if not sampler.policy.evicts:
            return reading
        # The first column whose query does not see the keys evicted here; the chunk's last query still does.
        boundary = chunks.columns(index)[-1] + 1
        progress = _progress(sampler, start, rng, boundary)
        caches, noted = [], []
        runs = zip(sampler.runs, sampler.compressions(length), reading.cache, reading.evicted_at, strict=True)
        for layers, compression, cache, evicted_at in runs:
            cache, record = compression.in_place(cache, progress, boundary - 1, params, layers)
            assert record.dropped is not None, "the buffer is emptied"
            caches.append(cache)
            noted.append(record_evictions(evicted_at, record.dropped, boundary[None, None, None]))
        return reading._replace(cache=tuple(caches), evicted_at=tuple(noted))

    # Skips chunks in which every row is padding.
    first_chunk = (jnp.min(start) - chunks.first) // length
    reading = jax.lax.fori_loop(first_chunk, count, one, _nothing_read(sampler, chunks))
    routing = None if reading.routing is None else reading.routing[:, -width:]
    records = _with_routing(sampler, tuple(PromptRecord(x, None) for x in reading.evicted_at), routing)
    layers = zip(reading.cache, sampler.budgets, strict=True)
    cache = tuple(kv_cache.each_layer(partial(_to_rows, sampler, budget), layer) for layer, budget in layers)
    return Prefilled(reading.hidden, start, cache, records, spans)


def _nothing_read(sampler: Sampler, chunks: _Chunks) -> _Reading:
    """The initial carry: empty caches with slots for the budget and a chunk, or for all columns without evictions."""
    shape = sampler.model.shape
    rows, whole = chunks.prompts.tokens.shape
    # Without evictions a row has `budget` slots for the prompt. A narrow batch needs fewer for its chunks, but
    # `_to_rows` takes that many from the right.
    slots = [budget + chunks.length if sampler.policy.evicts else max(whole, budget) for budget in sampler.budgets]
    never = jnp.full((rows, shape.num_kv_heads, sampler.prompt_width), NEVER, jnp.int32)

    def empty(layers: range, slots: int) -> tuple[LayerCache, Array]:
        sizes = CacheShape(rows, shape.num_heads, shape.num_kv_heads, slots, shape.head_dim, shape.dtype)
        one = kv_cache.no_keys(sampler.policy.statistics, sizes), never
        if len(layers) == 1:
            return one
        return jax.tree.map(lambda x: jnp.repeat(x[:, None], len(layers), axis=1), one)

    cache, evicted_at = zip(*map(empty, sampler.runs, slots), strict=True)
    hidden = jnp.zeros((rows, shape.hidden_size), shape.dtype)
    return _Reading(cache, evicted_at, hidden, not_recorded(shape, rows, whole))


def _read_chunk(sampler: Sampler, params: Params, chunks: _Chunks, index: Array, reading: _Reading) -> _Reading:
    """Reads chunk number `index`; its keys go after the kept ones."""
    start = chunks.start
    tokens, there = (
        jax.lax.dynamic_slice_in_dim(x, index * chunks.length, chunks.length, axis=1)
        for x in (chunks.prompts.tokens, chunks.prompts.valid)
    )
    column = chunks.columns(index)[None]
    # Padding before a row's start gets position 0, because a model may not support negative positions.
    places = sampler.model.encode_positions(jnp.maximum(column - start[:, None], 0))
    columns = jnp.where(there, column, EMPTY)
    if sampler.policy.evicts:
        # After the kept keys, in the slots that every compression leaves empty.
        slots = tuple(jnp.int32(budget) for budget in sampler.budgets)
    else:  # the last token of the last chunk goes into the last slot
        left = (chunks.count - index) * chunks.length
        slots = tuple(cache.slots - left for cache in reading.cache)
    hidden, cache, chosen = read_tokens(
        sampler, params, tokens, places, reading.cache, slots, columns, start, column[0, 0], chunks.span_evicted_at
    )
    routing = reading.routing
    if routing is not None and chosen is not None:
        routing = jax.lax.dynamic_update_slice_in_dim(routing, chosen, index * chunks.length, axis=1)
    return reading._replace(cache=cache, hidden=hidden[:, -1], routing=routing)


def _columns(sampler: Sampler, prompts: PromptBatch) -> Int[Array, "prompts tokens"]:
    """Columns of the tokens, counted as in the widest prompt; -1 for padding."""
    width = prompts.tokens.shape[1]
    return jnp.where(prompts.valid, sampler.prompt_width - width + jnp.arange(width, dtype=jnp.int32), EMPTY)


def _read_spans(sampler: Sampler, prompts: PromptBatch) -> tuple[SpanState | None, Int[Array, "prompts P"] | None]:
    """The state of the spans after the prompts, and `evicted_at` of the keys that they evict."""
    spans = sampler.policy.spans
    if spans is None:
        return None, None
    begun = spans.begin(len(prompts.tokens))
    return spans.read(begun, prompts.tokens, _columns(sampler, prompts), sampler.prompt_width)


def _first_column(sampler: Sampler, prompts: PromptBatch) -> Int[Array, " prompts"]:
    # Columns are those of the widest prompt, also for a narrower batch.
    missing = sampler.prompt_width - prompts.valid.shape[1]
    return missing + jnp.argmax(prompts.valid, axis=1).astype(jnp.int32)


def _progress(
    sampler: Sampler, start: Int[Array, " prompts"], rng: Key[Array, " prompts"], boundary: Int[Array, ""]
) -> RowProgress:
    """Progress of all rows at a compression within or at the end of the prompt; `boundary` is the column after it."""
    everywhere = jnp.broadcast_to(boundary, start.shape)
    step = everywhere - sampler.prompt_width
    # All rows are at the same column; the prompt counts as one segment from column 0 on.
    return RowProgress(start, everywhere - 1, jnp.zeros_like(start), step, eviction_keys(rng))


def _to_rows(sampler: Sampler, budget: int, cache: LayerCache) -> LayerCache:
    """Moves the kept keys after chunked prefill to the slots of a row's cache."""
    # A compression leaves the kept keys at the left; without compression the newest are at the right.
    first = 0 if sampler.policy.evicts else cache.columns.shape[2] - budget
    kept = jnp.broadcast_to(jnp.arange(first, first + budget), (*cache.columns.shape[:2], budget))
    return kv_cache.gather(cache, kept, sampler.row_buffer)
