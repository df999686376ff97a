"""Assembles the trajectory from the records of a rollout's segments.

Records are stored by segment and row, `[segments, rows, …]`: segment i of a row began at column P + i · buffer,
independent of when and in which cache row it ran.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from smd_jax.cache.slots import EMPTY
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.draws import STAYED, EvictionDraws, boundary_count, record_order
from smd_jax.message.masks import NEVER, KeyInterval, Segments, ShadowMask, record_evictions, windowed
from smd_jax.message.quantization import Parity, QuantizedReplay
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.attention import cost
from smd_jax.model.routing import NOT_RECORDED, expert_count
from smd_jax.sampler.config import RolloutConfig, plan, whole_segments
from smd_jax.sampler.prompt_layer import PromptRecord
from smd_jax.sampler.segment import SegmentRecord
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch


def segment_count(sampler: Sampler) -> int:
    """Segments of the longest response."""
    return whole_segments(sampler.config) // sampler.config.buffer


def no_records(sampler: Sampler, like: SegmentRecord) -> SegmentRecord:
    """Empty records of all segments, `[segments, rows, …]`; `like` has the shapes of one segment."""
    count = segment_count(sampler)
    records = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)
    if records.compressions is None:
        return records.replace(tokens=jnp.full_like(records.tokens, sampler.config.pad_token_id))
    # A segment that never runs must drop nothing, and 0 would be the key of column 0.
    compressions = tuple(
        x if x.dropped is None else x.replace(dropped=jnp.full_like(x.dropped, EMPTY)) for x in records.compressions
    )
    return records.replace(tokens=jnp.full_like(records.tokens, sampler.config.pad_token_id), compressions=compressions)


def to_trajectory(
    sampler: Sampler,
    prompts: PromptBatch,
    prompt_records: tuple[PromptRecord, ...],
    records: SegmentRecord,
    terminated: Bool[Array, " rows"],
    group_size: int,
) -> Trajectory:
    """The trajectory of rows with these prompts.

    Args:
      prompts: `[rows, …]` each row's prompt.
      prompt_records: `[rows, …]` per layer or run of layers, from the prefill.
      records: `[segments, rows, …]`.
      terminated: rows that ended before the length limit.
      group_size: consecutive rows that share a prompt, and the evictions sampled while it was read.
    """
    config = sampler.config
    response = sampler.config.max_new_tokens

    def by_row(x: Array) -> Array:
        """`[segments, rows, buffer, …]` to `[rows, R, …]`."""
        # The last segment may reach beyond R, because segments are whole.
        return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :response]

    emitted = by_row(records.emitted)
    valid = jnp.concatenate([prompts.valid, emitted], axis=1)
    segments = segments_of(sampler.policy, config, sampler.model.shape.num_layers, sampler.prompt_width)
    tokens = jnp.concatenate([prompts.tokens, by_row(records.tokens)], axis=1)
    evicted_at = _evicted_at(sampler, valid, prompt_records, records)
    if sampler.policy.spans is not None:
        # Not in a record, because the tokens determine them.
        _, span_evicted_at = sampler.policy.spans.read(tokens, valid)
        evicted_at = jnp.minimum(evicted_at, span_evicted_at[:, None, None])
    return Trajectory(
        tokens=tokens,
        valid=valid,
        logprobs=by_row(records.logprobs),
        terminated=terminated,
        mask=ShadowMask(evicted_at, segments, _replay(sampler, prompt_records, records)),
        entropy=by_row(records.entropy),
        drawable=drawable_tokens(config, None if records.drawable is None else by_row(records.drawable)),
        evictions=_evictions(sampler, valid, prompt_records, records, group_size),
        temperature=config.sampling.temperature,
        replayable=config.sampling.trainable,
        routing=_routing(valid, prompt_records, None if records.routing is None else by_row(records.routing)),
        expert_count=expert_count(sampler.model.shape),
    )


def _routing(
    valid: Bool[Array, "rows T"], prompt_records: tuple[PromptRecord, ...], response: Array | None
) -> Int[Array, "rows T mixtures per_token"] | None:
    """Experts of every token; -1 for columns without one, and for a row's last token, which was never read."""
    prompt = prompt_records[0].routing
    if prompt is None or response is None:
        return None
    routing = jnp.concatenate([prompt, response], axis=1)
    return jnp.where(valid[..., None, None], routing, NOT_RECORDED)


def drawable_tokens(config: RolloutConfig, sets: Array | None) -> DrawableTokens | None:
    """The drawable tokens; None without filters and a minimum length."""
    end = config.eos_token_id
    shortest = 0 if end is None else config.min_new_tokens
    return None if sets is None and not shortest else DrawableTokens(sets, shortest, end)


def _evicted_at(
    sampler: Sampler, valid: Bool[Array, "rows T"], prompt_records: tuple[PromptRecord, ...], records: SegmentRecord
) -> Int[Array, "rows layers kv_heads T"]:
    response = sampler.config.max_new_tokens
    compressions = records.compressions or (None,) * len(prompt_records)

    def one(layers: range, prompt: PromptRecord, compression: Any) -> Int[Array, "rows layers kv_heads T"]:
        evicted_at = pad_columns(prompt.evicted_at, response)
        if compression is not None and compression.dropped is not None:
            dropped = jnp.moveaxis(compression.dropped, 0, -2)  # [rows, (layers,) kv_heads, segments, buffer]
            segments, rest = dropped.shape[-2:]
            # Segment i is compressed after its last query; the first query of segment i + 1 does not see the evicted
            # keys.
            boundary = sampler.prompt_width + (1 + jnp.arange(segments, dtype=jnp.int32)) * sampler.config.buffer
            # No query follows the last column, so evictions there are not recorded.
            dropped = jnp.where((boundary < sampler.columns)[:, None], dropped, EMPTY)
            now = jnp.repeat(boundary, rest)[None, None]
            evicted_at = record_evictions(evicted_at, dropped.reshape(*dropped.shape[:-2], -1), now)
        # Sliding windows are not in a record, because the columns determine them. The mask includes them.
        return within_window(with_layers(evicted_at), sampler.model.shape.window(layers[0]))

    runs = zip(sampler.runs, prompt_records, compressions, strict=True)
    evicted_at = jnp.concatenate([one(*run) for run in runs], axis=1)
    # After the evictions, so that columns without a token are never visible.
    evicted_at = jnp.where(valid[:, None, None], evicted_at, 0)
    return _without_last(sampler, evicted_at, valid) if sampler.policy.evicts else evicted_at


def _evictions(
    sampler: Sampler,
    valid: Bool[Array, "rows T"],
    prompt_records: tuple[PromptRecord, ...],
    records: SegmentRecord,
    group_size: int,
) -> EvictionDraws | None:
    """The sampled evictions; None without them."""
    gate = sampler.policy.gate
    if gate is None or records.compressions is None:
        return None
    first, length = sampler.prompt_width, sampler.config.buffer
    count = boundary_count(first, length, sampler.columns)
    orders, logprobs = [], []
    for prompt, compression in zip(prompt_records, records.compressions, strict=True):
        assert prompt.order is not None and prompt.logprob is not None
        assert compression.dropped is not None and compression.logprob is not None
        order = pad_columns(prompt.order, sampler.config.max_new_tokens, STAYED)
        # After the last boundary the mask has no evictions either. A key is evicted once, so each has one number.
        dropped = jnp.moveaxis(compression.dropped[: count - 1], 0, -2)
        order = record_order(order, dropped)
        logprob = jnp.concatenate([prompt.logprob[..., None], jnp.moveaxis(compression.logprob, 0, -1)], axis=-1)
        orders.append(with_layers(order))
        logprobs.append(with_layers(logprob))
    order, logprob = jnp.concatenate(orders, axis=1), jnp.concatenate(logprobs, axis=1)[..., :count]
    draws = EvictionDraws(order, logprob, gate, first, length, group_size)
    # Finished rows continued to evict.
    counted = draws.counted(valid)[:, None, None]
    return draws.replace(
        order=jnp.where(valid[:, None, None], draws.order, STAYED), logprobs=jnp.where(counted, draws.logprobs, 0.0)
    )


def within_window(
    evicted_at: Int[Array, "rows layers kv_heads T"], window: int | None
) -> Int[Array, "rows layers kv_heads T"]:
    """`evicted_at` of layers with this sliding window."""
    heads_together = evicted_at.reshape(evicted_at.shape[0], -1, evicted_at.shape[-1])
    mask = windowed(KeyInterval(heads_together), window)
    assert isinstance(mask, KeyInterval)
    return mask.evicted_at.reshape(evicted_at.shape)


def with_layers(x: Array) -> Array:
    """`[rows, layers, kv_heads, n]` of a run; of a layer `[rows, kv_heads, n]` with an axis for it."""
    return x if x.ndim == 4 else x[:, None]


def pad_columns(x: Array, count: int, fill: int = NEVER) -> Array:
    """Adds columns at the end, `[..., n]` to `[..., n + count]`."""
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, count)], constant_values=fill)


def _without_last(sampler: Sampler, evicted_at: Array, valid: Bool[Array, "rows T"]) -> Array:
    """Hides a row's last token from all other queries: it was sampled but never entered the cache."""
    column = jnp.arange(sampler.columns, dtype=jnp.int32)[None]
    width = sampler.prompt_width
    # A response has no gaps, so its number of tokens gives its end.
    after = width + valid[:, width:].sum(axis=1, keepdims=True, dtype=jnp.int32)
    last = (column == after - 1) & (after < sampler.columns)
    return jnp.where(last[:, None, None], after[:, None, None], evicted_at)


def segments_of(
    policy: EvictionPolicy, config: RolloutConfig, num_layers: int, prompt_width: int
) -> tuple[Segments, ...]:
    """Compressions of every layer's cache, for the learner's attention; empty without compressions.

    Each layer takes the cheaper of two valid descriptions of the mask:

        response    columns of the prompt attend densely; then segments of `buffer`
        merged      chunks of the prompt are segments as well, all of the longer length of chunk and buffer

    Merging needs every boundary of the longer length to be a boundary of the shorter. It is cheaper for long prompts,
    but every query of the response then reads a whole chunk.
    """
    if not policy.evicts:
        return ()
    budgets, _ = plan(policy, config, num_layers, prompt_width)
    columns = prompt_width + config.max_new_tokens
    return tuple(
        min(_descriptions(config, prompt_width, budget), key=lambda segments: cost(segments, columns))
        for budget in budgets
    )


def _descriptions(config: RolloutConfig, prompt_width: int, budget: int) -> list[Segments]:
    """The possible descriptions of one layer's segments."""
    buffer = config.buffer
    chunk = config.prefill_chunk
    found = [Segments(prompt_width, buffer, budget)]
    if chunk is not None and (chunk % buffer == 0 or buffer % chunk == 0):
        length = max(chunk, buffer)
        # Boundaries are at P, P - length, P - 2 length, …, because chunks end with the prompt. The first segment begins
        # at the smallest positive boundary; the shorter chunk before it has dense attention.
        first = (prompt_width - 1) % length + 1
        found.append(Segments(first, length, budget))
    return found


def _replay(
    sampler: Sampler, prompt_records: tuple[PromptRecord, ...], records: SegmentRecord
) -> QuantizedReplay | None:
    """The record of the cache's quantisation."""
    config = sampler.config
    if config.quant is None or records.compressions is None:
        return None
    runs = [
        jax.tree.map(lambda x, y: _join(sampler, x, y), prompt.parity, compression.parity)
        for prompt, compression in zip(prompt_records, records.compressions, strict=True)
    ]
    parity: Parity = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *runs)
    return QuantizedReplay(parity, config.quant, sampler.prompt_width, config.buffer)


def _join(sampler: Sampler, prompt: Array, segments: Array) -> Array:
    """`[rows, (layers,) kv_heads, P, bytes]` and `[segments, rows, (layers,) kv_heads, buffer, bytes]` to
    `[rows, layers, kv_heads, T, bytes]`."""
    response = jnp.moveaxis(segments, 0, -3)
    response = response.reshape(*response.shape[:-3], -1, response.shape[-1])
    joined = jnp.concatenate([prompt, response], axis=-2)[..., : sampler.columns, :]
    return joined if joined.ndim == 5 else joined[:, None]
