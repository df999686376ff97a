"""Assembles the trajectory from the records of a rollout's segments.

Records are stored by segment and row, `[segments, rows, …]`: segment i of a row began at column P + i · buffer,
independent of when and in which cache row it ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from smd_jax.cache.slots import EMPTY
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.draws import STAYED, EvictionDraws, boundary_count, record_order
from smd_jax.message.masks import NEVER, Segments, ShadowMask, record_evictions
from smd_jax.message.quantization import Parity, QuantizedReplay
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.attention import cost
from smd_jax.model.routing import NOT_RECORDED, expert_count
from smd_jax.sampler.config import RolloutConfig, plan, whole_segments
from smd_jax.sampler.prompt_layer import PromptRecord
from smd_jax.sampler.segment import SegmentRecord
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch, repeat_prompts


def segment_count(sampler: Sampler) -> int:
    """Segments of the longest response."""
    return whole_segments(sampler.config) // sampler.config.buffer


def no_records(sampler: Sampler, like: SegmentRecord) -> SegmentRecord:
    """Empty records of all segments, `[segments, rows, …]`; `like` has the shapes of one segment."""
    count = segment_count(sampler)
    records = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)
    records = records.replace(tokens=jnp.full_like(records.tokens, sampler.config.pad_token_id))
    if records.compressions is None:
        return records
    # A segment that never runs must drop nothing, and 0 would be the key of column 0.
    compressions = tuple(
        x if x.dropped is None else x.replace(dropped=jnp.full_like(x.dropped, EMPTY)) for x in records.compressions
    )
    return records.replace(compressions=compressions)


def to_trajectory(
    sampler: Sampler,
    prompts: PromptBatch,
    prompt_records: tuple[PromptRecord, ...],
    records: SegmentRecord,
    terminated: Bool[Array, " rows"],
    shared_by: int,
) -> Trajectory:
    """The trajectory of a rollout.

    Args:
      prompts: `[prompts, P]`; the rows of a prompt are adjacent.
      prompt_records: `[prompts, …]` per layer or run of layers, from the prefill.
      records: `[segments, rows, …]`.
      terminated: `[rows]` rows that ended before the length limit.
      shared_by: consecutive rows that share the evictions sampled while their prompt was read.
    """
    config = sampler.config
    group_size = len(terminated) // len(prompts.tokens)
    prompt_records = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), prompt_records)

    def by_row(x: Array) -> Array:
        """`[segments, rows, buffer, …]` to `[rows, R, …]`."""
        # The last segment may reach beyond R, because segments are whole.
        return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, : config.max_new_tokens]

    record = jax.tree.map(by_row, records.replace(compressions=None))
    recorded = _recorded_evictions(sampler, prompt_records, records)
    length = record.emitted.sum(axis=1, dtype=jnp.int32)
    # The last token never entered the cache.
    trajectory = assemble(
        sampler, prompts, prompt_records[0].routing, record, recorded, record.emitted, length - 1, terminated
    )
    segments = segments_of(sampler.policy, config, sampler.model.shape.num_layers, sampler.prompt_width)
    quantized = _replay(sampler, prompt_records, records)
    return trajectory.replace(
        mask=ShadowMask(trajectory.mask.evicted_at, segments, quantized),
        evictions=_evictions(sampler, trajectory.valid, prompt_records, records, shared_by),
    )


def assemble(
    sampler: Sampler,
    prompts: PromptBatch,
    prompt_routing: Int[Array, "rows P mixtures per_token"] | None,
    record: SegmentRecord,
    recorded: Sequence[Int[Array, "rows ... T"]],
    present: Bool[Array, "rows R"],
    read: Int[Array, " rows"],
    terminated: Bool[Array, " rows"],
) -> Trajectory:
    """The trajectory of prompts and the tokens after them. Its mask has no segments: the caller adds them.

    Args:
      prompts: `[prompts, P]`; the rows of a prompt are adjacent.
      prompt_routing: of every row, unlike `prompts`.
      record: `[rows, R, …]` of all tokens after the prompt.
      recorded: `evicted_at` of every layer or run of layers, from the records alone.
      present: columns after the prompt that hold a token.
      read: tokens after the prompt that entered the cache.
      terminated: rows that ended before the length limit.
    """
    config = sampler.config
    prompts = repeat_prompts(prompts, len(terminated) // len(prompts.tokens))
    tokens = jnp.concatenate([prompts.tokens, record.tokens], axis=1)
    valid = jnp.concatenate([prompts.valid, present], axis=1)
    routing = None
    if prompt_routing is not None and record.routing is not None:  # a token that was not read has -1 already
        routing = jnp.concatenate([prompt_routing, record.routing], axis=1)
        routing = jnp.where(valid[..., None, None], routing, NOT_RECORDED)
    end = config.eos_token_id
    shortest = 0 if end is None else config.min_new_tokens
    sets = record.drawable
    return Trajectory(
        tokens=tokens,
        valid=valid,
        logprobs=record.logprobs,
        terminated=terminated,
        mask=ShadowMask(_evicted_at(sampler, recorded, tokens, valid, sampler.prompt_width + read)),
        entropy=record.entropy,
        drawable=None if sets is None and not shortest else DrawableTokens(sets, shortest, end),
        temperature=config.sampling.temperature,
        replayable=config.sampling.trainable,
        routing=routing,
        expert_count=expert_count(sampler.model.shape),
    )


def _recorded_evictions(
    sampler: Sampler, prompt_records: tuple[PromptRecord, ...], records: SegmentRecord
) -> list[Int[Array, "rows ... T"]]:
    """`evicted_at` of every layer or run of layers, from its records alone."""
    recorded = [pad_columns(prompt.evicted_at, sampler.config.max_new_tokens) for prompt in prompt_records]
    for run, compression in enumerate(records.compressions or ()):
        if compression.dropped is None:
            continue
        dropped = jnp.moveaxis(compression.dropped, 0, -2)  # [rows, (layers,) kv_heads, segments, buffer]
        segments, rest = dropped.shape[-2:]
        # Segment i is compressed after its last query; the first query of segment i + 1 does not see the evicted keys.
        boundary = sampler.prompt_width + (1 + jnp.arange(segments, dtype=jnp.int32)) * sampler.config.buffer
        # No query follows the last column, so evictions there are not recorded.
        dropped = jnp.where((boundary < sampler.columns)[:, None], dropped, EMPTY)
        now = jnp.repeat(boundary, rest)[None, None]
        recorded[run] = record_evictions(recorded[run], dropped.reshape(*dropped.shape[:-2], -1), now)
    return recorded


def _evicted_at(
    sampler: Sampler,
    recorded: Sequence[Int[Array, "rows ... T"]],
    tokens: Int[Array, "rows T"],
    valid: Bool[Array, "rows T"],
    read: Int[Array, " rows"],
) -> Int[Array, "rows layers kv_heads T"]:
    """`evicted_at` of the shadow mask, from that of the records of every layer or run of layers.

    Args:
      read: first column whose token did not enter the cache.
    """
    column = jnp.arange(sampler.columns, dtype=jnp.int32)[None, None, None]

    def one(layers: range, evicted_at: Array) -> Array:
        # Sliding windows are not in a record, because the columns determine them: see `smd_jax.message.masks.windowed`.
        window = sampler.model.shape.window(layers[0])
        evicted_at = with_layers(evicted_at)
        return evicted_at if window is None else jnp.minimum(evicted_at, column + window)

    evicted_at = jnp.concatenate([one(*run) for run in zip(sampler.runs, recorded, strict=True)], axis=1)
    # After the evictions, so that columns without a token are never visible.
    evicted_at = jnp.where(valid[:, None, None], evicted_at, 0)
    if (spans := sampler.policy.spans) is not None:
        # Not in a record, because the tokens determine them.
        columns = jnp.where(valid, column[0, 0], EMPTY)
        _, span_evicted_at = spans.read(spans.begin(len(tokens)), tokens, columns, sampler.columns)
        evicted_at = jnp.minimum(evicted_at, span_evicted_at[:, None, None])
    if not sampler.policy.evicts:
        return evicted_at
    # A token that was sampled but never entered the cache is visible only to itself.
    unread = valid[:, None, None] & (column >= read[:, None, None, None]) & (column + 1 < sampler.columns)
    return jnp.where(unread, column + 1, evicted_at)


def _evictions(
    sampler: Sampler,
    valid: Bool[Array, "rows T"],
    prompt_records: tuple[PromptRecord, ...],
    records: SegmentRecord,
    shared_by: int,
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
    draws = EvictionDraws(order, logprob, gate, first, length, shared_by)
    # Finished rows continued to evict.
    counted = draws.counted(valid)[:, None, None]
    return draws.replace(
        order=jnp.where(valid[:, None, None], draws.order, STAYED), logprobs=jnp.where(counted, draws.logprobs, 0.0)
    )


def with_layers(x: Array) -> Array:
    """`[rows, layers, kv_heads, n]` of a run; of a layer `[rows, kv_heads, n]` with an axis for it."""
    return x if x.ndim == 4 else x[:, None]


def pad_columns(x: Array, count: int, fill: int = NEVER) -> Array:
    """Adds columns at the end, `[..., n]` to `[..., n + count]`."""
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, count)], constant_values=fill)


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
    columns = prompt_width + config.max_new_tokens
    buffer, chunk = config.buffer, config.prefill_chunk
    descriptions = [(prompt_width, buffer)]  # first column and length of the segments
    if chunk is not None and (chunk % buffer == 0 or buffer % chunk == 0):
        length = max(chunk, buffer)
        # Boundaries are at P, P - length, P - 2 length, …, because chunks end with the prompt. The first segment begins
        # at the smallest positive boundary; the shorter chunk before it has dense attention.
        descriptions.append(((prompt_width - 1) % length + 1, length))
    budgets, _ = plan(policy, config, num_layers, prompt_width)
    possible = [[Segments(first, length, budget) for first, length in descriptions] for budget in budgets]
    return tuple(min(segments, key=lambda segments: cost(segments, columns)) for segments in possible)


def _replay(
    sampler: Sampler, prompt_records: tuple[PromptRecord, ...], records: SegmentRecord
) -> QuantizedReplay | None:
    """The record of the cache's quantisation."""
    config = sampler.config
    if config.quant is None or records.compressions is None:
        return None

    def join(prompt: Array, segments: Array) -> Array:
        """`[rows, (layers,) kv_heads, P, bytes]` and `[segments, rows, (layers,) kv_heads, buffer, bytes]` to
        `[rows, layers, kv_heads, T, bytes]`."""
        response = jnp.moveaxis(segments, 0, -3)
        response = response.reshape(*response.shape[:-3], -1, response.shape[-1])
        joined = jnp.concatenate([prompt, response], axis=-2)[..., : sampler.columns, :]
        return joined if joined.ndim == 5 else joined[:, None]

    runs = [
        jax.tree.map(join, prompt.parity, compression.parity)
        for prompt, compression in zip(prompt_records, records.compressions, strict=True)
    ]
    parity: Parity = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *runs)
    return QuantizedReplay(parity, config.quant, sampler.prompt_width, config.buffer)
