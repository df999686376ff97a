"""Conversations: the policy samples a turn, an environment answers, the answer is read into the same cache, and so on.

    prompt ─► turn 1 ─► answer ─► turn 2 ─► answer ─► turn 3        one row of the trajectory
              sampled   read      sampled   read      sampled       `Trajectory.sampled` is true of the turns

Three jitted functions of one state, which the last two donate: otherwise old and new caches would exist side by side.

    begin_conversations   prompts ─► Conversations
    sample_segment        rows that sample draw and read up to `buffer` tokens
    read_chunk            rows that were answered read up to `buffer` tokens of the answer

Both then compress every layer to its budget. Rows may be at different turns: the call leaves rows of the other kind and
waiting rows unchanged. Columns count a row's tokens without padding between turns, so a row's evictions depend only on
its tokens: a key evicted after n tokens is invisible to the queries of later columns.

The token that ends a turn is sampled but not read in that turn. It is the first token of the answer's chunk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from smd_jax.cache import row_parts
from smd_jax.cache import slots as kv_cache
from smd_jax.cache.compression import RowProgress
from smd_jax.cache.slots import EMPTY, LayerCache
from smd_jax.devices.sharding import constrain_rows
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import Recent
from smd_jax.eviction.wrappers import OnTokens
from smd_jax.message.masks import Segments, record_evictions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import PyTreeNode
from smd_jax.sampler.attends import read_tokens
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.keys import eviction_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.records import assemble, pad_columns
from smd_jax.sampler.seats import SamplerState, begin, constrained
from smd_jax.sampler.segment import SegmentRecord, draw_segment, no_record
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch
from smd_jax.text.stop_strings import StopTable


class Conversations(PyTreeNode):
    """The conversations of a batch so far; every leaf but `rows.cache_steps` has the rows first.

    Attributes:
      rows: cache and progress. `rows.done` is true of rows that wait for an answer or have ended, and `rows.terminated`
        of those whose last turn ended by itself. `rows.drawn` counts all tokens after the prompt.
      read: `[rows]` how many of these tokens are in the cache: `drawn`, or one fewer after the end of a turn.
      record: `[rows, R, ...]` of all tokens after the prompt, as one segment; the sampled ones are `emitted`.
      evicted_at: of the shadow mask, `[rows, kv_heads, T]` per layer, `[rows, layers, kv_heads, T]` per run of layers.
      prompt_routing: `[rows, P, mixtures, per_token]` experts of the prompt's tokens; None without experts.
    """

    rows: SamplerState
    read: Int[Array, " rows"]
    record: SegmentRecord
    evicted_at: tuple[Int[Array, "rows *layers kv_heads T"], ...]
    prompt_routing: Int[Array, "rows P mixtures per_token"] | None = None


def conversation_sampler(
    model: LanguageModel, policy: EvictionPolicy, config: RolloutConfig, prompt_width: int
) -> Sampler:
    """The sampler of conversations: `config.max_new_tokens` counts all tokens after the prompt, and
    `config.eos_token_id` ends a turn.

    A policy that never evicts gets a budget for every token, because rows that wait would waste the slots of a ring.

    Raises:
      ValueError: a quantised cache, a policy that draws evictions to be trained, and the errors of Sampler.
    """
    if policy.gate is not None:
        raise ValueError(
            f"expected a policy whose draws are not trained, such as LearnedGate(greedy=True), in a conversation, "
            f"which records no draws; got {policy}"
        )
    if config.quant is not None:
        raise ValueError(f"expected quant None in a conversation, whose segments differ in length; got {config.quant}")
    if not policy.evicts:
        everything = Recent() if policy.spans is None else OnTokens(policy.spans, inner=Recent())
        policy, config = everything, replace(config, budget=prompt_width + config.max_new_tokens)
    return Sampler(model, policy, config, prompt_width)


@partial(jax.jit, static_argnames="sampler")
def begin_conversations(
    sampler: Sampler,
    params: Params,
    prompts: PromptBatch,
    keys: Key[Array, " rows"],
    prompt_keys: Key[Array, " prompts"],
    limit: Int[Array, " rows"],
) -> Conversations:
    """Reads the prompts and begins the first turn of each row.

    Args:
      prompts: `[prompts, P]`; the rows of a prompt are contiguous.
      keys: of the rows. prompt_keys: for random policies while prompts are read.
      limit: `[rows]` maximum tokens of the first turn; 0 for rows without a conversation.
    """
    prefilled = prefill(sampler, params, prompts, prompt_keys)
    count, response = keys.shape[0], sampler.config.max_new_tokens
    group = count // prompts.tokens.shape[0]
    records = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), prefilled.records)
    return Conversations(
        rows=begin(prefilled, keys, limit).replace(done=limit <= 0),
        read=jnp.zeros((count,), jnp.int32),
        record=no_record(sampler, count, response),
        evicted_at=tuple(pad_columns(record.evicted_at, response) for record in records),
        prompt_routing=records[0].routing,
    )


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def sample_segment(sampler: Sampler, params: Params, state: Conversations, stop: StopTable | None) -> Conversations:
    """Rows that are not done draw and read up to `buffer` tokens; then every layer is compressed."""
    live = ~state.rows.done
    rows, record, _ = draw_segment(sampler, params, state.rows, stop)
    # The token that ends a turn has no experts yet: it is read with the answer.
    put = partial(_put, state.rows.drawn, record.emitted)
    state = state.replace(record=jax.tree.map(put, state.record, record))
    # The newest token of a row that is done was drawn and not read.
    read = jnp.where(live, rows.drawn - rows.done, state.read)
    return _compressed(sampler, params, state, rows, read)


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def read_chunk(
    sampler: Sampler,
    params: Params,
    state: Conversations,
    tokens: Int[Array, "rows buffer"],
    lengths: Int[Array, " rows"],
    limit: Int[Array, " rows"],
) -> Conversations:
    """Rows read the first `lengths` of these tokens, all at once; then every layer is compressed.

    Args:
      tokens: continue after the tokens that were read. The first chunk of an answer begins with the last token of the
        turn before it.
      lengths: 0 for rows that read nothing.
      limit: maximum tokens after the prompt, for rows that sample a new turn after this chunk; 0 for all others.
    """
    rows, place = state.rows, jnp.arange(sampler.config.buffer, dtype=jnp.int32)[None]
    there = place < lengths[:, None]
    column = sampler.prompt_width + state.read[:, None] + place
    columns = jnp.where(there, column, EMPTY)
    places = sampler.model.encode_positions(column - rows.start[:, None])
    # After the kept keys, like the tokens of a segment.
    slots = tuple(jnp.int32(budget) for budget in sampler.budgets)
    number = jnp.int32(sampler.prompt_width)
    spans, span_evicted_at = rows.spans, None
    if sampler.policy.spans is not None:
        assert spans is not None, "prefill made it"
        spans, span_evicted_at = sampler.policy.spans.read(spans, tokens, columns, sampler.columns)
    hidden, cache, experts = read_tokens(
        sampler, params, tokens, places, rows.cache, slots, columns, rows.start, number, span_evicted_at
    )
    newest = jnp.maximum(lengths - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
    put = partial(_put, state.read, there)
    read = state.read + lengths
    goes_on = limit > 0
    rows = rows.replace(
        cache=cache,
        hidden=jnp.where(lengths[:, None] > 0, last, rows.hidden),
        drawn=jnp.maximum(rows.drawn, read),
        done=rows.done & ~goes_on,
        terminated=rows.terminated & ~goes_on,
        limit=jnp.where(goes_on, limit, rows.limit),
        stop=jnp.where(goes_on, 0, rows.stop),
        spans=spans,
    )
    record = state.record.replace(
        tokens=put(state.record.tokens, tokens), routing=jax.tree.map(put, state.record.routing, experts)
    )
    state = state.replace(record=record)
    return _compressed(sampler, params, state, rows, read)


def _put(first: Int[Array, " rows"], there: Bool[Array, "rows buffer"], old: Array, new: Array) -> Array:
    """Writes the new entries `[rows, buffer, …]` where `there` into `[rows, R, …]`, from `first` of each row on."""
    rows, buffer = there.shape
    # Numbers that are scattered after the last column are dropped.
    column = jnp.where(there, first[:, None] + jnp.arange(buffer, dtype=jnp.int32)[None], old.shape[1])
    return old.at[jnp.arange(rows)[:, None], column].set(new, mode="drop")


def _compressed(
    sampler: Sampler, params: Params, state: Conversations, rows: SamplerState, read: Int[Array, " rows"]
) -> Conversations:
    """Compresses every row, after its tokens from `state.read` to `read` were written to the buffer."""
    written = read - state.read
    boundary = sampler.prompt_width + read  # the first column whose query does not see the keys evicted here
    progress = RowProgress(
        start=rows.start,
        newest=boundary - 1,
        segment_start=boundary - written,
        step=read,
        rng=eviction_keys(rows.rng),
    )
    # Every row counts its queries as if everything it has read were its prompt: see `kv_cache.settle`.
    newest = jnp.int32(sampler.prompt_width - 1)
    cache, evicted_at = [], []

    def settle(layer: LayerCache, written: Array) -> tuple[LayerCache, tuple[()]]:
        return kv_cache.each_layer(partial(kv_cache.settle, buffer=sampler.config.buffer), layer, written), ()

    compressions = sampler.compressions(sampler.config.buffer)
    runs = zip(sampler.runs, compressions, rows.cache, state.evicted_at, strict=True)
    for layers, compression, layer, record in runs:
        layer, _ = row_parts.in_place(settle, layer, written)  # all rows at once would need a second cache
        layer, evicted = compression.in_place(layer, progress, newest, params, layers)
        assert evicted.dropped is not None, "the buffer is emptied"
        cache.append(layer)
        evicted_at.append(record_evictions(record, evicted.dropped, boundary[:, None, None]))
    rows = rows.replace(cache=tuple(cache), cache_steps=jnp.zeros_like(rows.cache_steps))
    records = tuple(constrain_rows(record, record.ndim - 2) for record in evicted_at)
    others = constrain_rows(state.replace(rows=(), read=read, evicted_at=()))
    return others.replace(rows=constrained(rows), evicted_at=records)


@partial(jax.jit, static_argnames="sampler")
def to_trajectory(
    sampler: Sampler, prompts: PromptBatch, state: Conversations, terminated: Bool[Array, " rows"]
) -> Trajectory:
    """The trajectory of these conversations.

    Args:
      prompts: `[prompts, P]`; the rows of a prompt are adjacent.
      terminated: `[rows]` conversations that their environment ended.
    """
    config = sampler.config
    present = jnp.arange(config.max_new_tokens, dtype=jnp.int32)[None] < state.rows.drawn[:, None]
    record = state.record
    trajectory = assemble(
        sampler, prompts, state.prompt_routing, record, state.evicted_at, present, state.read, terminated
    )
    # Rows are compressed after different columns. Wherever a segment of the learner begins, its first query sees
    # no more earlier keys than the cache has slots for.
    sizes = [budget + config.buffer - 1 for budget in sampler.layer_budgets]
    segments = [Segments(sampler.prompt_width, config.buffer, max(size, 1)) for size in sizes]
    mask = trajectory.mask.replace(segments=() if max(sizes) >= sampler.columns else tuple(segments))
    return trajectory.replace(mask=mask, sampled=record.emitted)
