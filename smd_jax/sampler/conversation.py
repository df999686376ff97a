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
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.compression import RowProgress
from smd_jax.cache.slots import EMPTY
from smd_jax.devices.sharding import constrain_rows
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import Recent
from smd_jax.eviction.wrappers import OnTokens
from smd_jax.message.masks import NEVER, Segments, ShadowMask, record_evictions
from smd_jax.message.spans import SpanState
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.routing import NOT_RECORDED, expert_count
from smd_jax.pytrees import any_leaves
from smd_jax.sampler.attends import read_tokens
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.keys import eviction_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.records import drawable_tokens, pad_columns, to_evicted_at
from smd_jax.sampler.seats import SamplerState, begin, constrained
from smd_jax.sampler.segment import draw_segment, no_record
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch
from smd_jax.text.stop_strings import StopTable


@any_leaves
class Conversations(struct.PyTreeNode):
    """The conversations of a batch so far; every leaf but `rows.cache_steps` has the rows first.

    Attributes:
      rows: cache and progress. `rows.done` is true of rows that wait for an answer or have ended, and `rows.terminated`
        of those whose last turn ended by itself. `rows.drawn` counts all tokens after the prompt.
      read: `[rows]` how many of these tokens are in the cache: `drawn`, or one fewer after the end of a turn.
      tokens, logprobs, entropy, sampled: `[rows, R]` as in Trajectory.
      drawable: `[rows, R, ...]`, see `DrawableTokens.sets`; None without filters.
      evicted_at: of the shadow mask, `[rows, kv_heads, T]` per layer, `[rows, layers, kv_heads, T]` per run of layers.
      routing: `[rows, T, mixtures, per_token]` experts of read tokens, -1 of others; None without experts.
    """

    rows: SamplerState
    read: Int[Array, " rows"]
    tokens: Int[Array, "rows R"]
    logprobs: Float[Array, "rows R"]
    entropy: Float[Array, "rows R"]
    sampled: Bool[Array, "rows R"]
    drawable: Array | None
    evicted_at: tuple[Int[Array, "rows *layers kv_heads T"], ...]
    routing: Int[Array, "rows T mixtures per_token"] | None = None


def conversation_sampler(
    model: LanguageModel, policy: EvictionPolicy, config: RolloutConfig, prompt_width: int
) -> Sampler:
    """The sampler of conversations: `config.max_new_tokens` counts all tokens after the prompt, and
    `config.eos_token_id` ends a turn.

    A policy that never evicts gets a budget for every token, because rows that wait would waste the slots of a ring.

    Raises:
      ValueError: a quantised cache, a policy that draws evictions to be trained, and what Sampler raises.
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
      limit: `[rows]` tokens of the first turn at most; 0 for rows without a conversation.
    """
    prefilled = prefill(sampler, params, prompts, prompt_keys)
    count, response = keys.shape[0], sampler.config.max_new_tokens
    group = count // prompts.tokens.shape[0]
    records = [pad_columns(record.evicted_at, response) for record in prefilled.records]
    # As if all tokens after the prompt were one segment.
    nothing = no_record(sampler, jnp.zeros((count,), jnp.int32), response)
    routing = prefilled.records[0].routing
    if routing is not None and nothing.routing is not None:
        routing = jnp.concatenate([jnp.repeat(routing, group, axis=0), nothing.routing], axis=1)
    return Conversations(
        rows=begin(prefilled, keys, limit).replace(done=limit <= 0),
        read=nothing.first,
        tokens=nothing.tokens,
        logprobs=nothing.logprobs,
        entropy=nothing.entropy,
        sampled=nothing.emitted,
        drawable=nothing.drawable,
        evicted_at=tuple(jnp.repeat(x, group, axis=0) for x in records),
        routing=routing,
    )


@partial(jax.jit, static_argnames="sampler", donate_argnames="state")
def sample_segment(sampler: Sampler, params: Params, state: Conversations, stop: StopTable | None) -> Conversations:
    """Rows that are not done draw and read up to `buffer` tokens; then every layer is compressed."""
    live = ~state.rows.done
    rows, record, _ = draw_segment(sampler, params, state.rows, stop)
    response = sampler.config.max_new_tokens
    column = record.first[:, None] + jnp.arange(sampler.config.buffer, dtype=jnp.int32)[None]
    # After the last column, where scattered numbers are dropped.
    column = jnp.where(record.emitted, column, response)

    def put(old: Array, new: Array) -> Array:
        return old.at[jnp.arange(old.shape[0])[:, None], column].set(new, mode="drop")

    state = state.replace(
        tokens=put(state.tokens, record.tokens),
        logprobs=put(state.logprobs, record.logprobs),
        entropy=put(state.entropy, record.entropy),
        sampled=put(state.sampled, record.emitted),
        drawable=jax.tree.map(put, state.drawable, record.drawable),
        # The token that ends a turn has no experts yet: it is read with the answer.
        routing=_with_experts(state.routing, sampler.prompt_width + column, record.routing),
    )
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
      limit: tokens after the prompt at most, for rows that sample a new turn after this chunk; 0 for all others.
    """
    rows, buffer, response = state.rows, sampler.config.buffer, sampler.config.max_new_tokens
    place = jnp.arange(buffer, dtype=jnp.int32)[None]
    there = place < lengths[:, None]
    after_prompt = state.read[:, None] + place
    column = sampler.prompt_width + after_prompt
    columns = jnp.where(there, column, EMPTY)
    places = sampler.model.encode_positions(column - rows.start[:, None])
    # After the kept keys, like the tokens of a segment.
    slots = tuple(jnp.int32(budget) for budget in sampler.budgets)
    number = jnp.int32(sampler.prompt_width)
    spans, span_evicted_at = _read_spans(sampler, rows, tokens, columns)
    hidden, cache, experts = read_tokens(
        sampler, params, tokens, places, rows.cache, slots, columns, rows.start, number, span_evicted_at
    )
    if span_evicted_at is not None:
        cache = tuple(kv_cache.drop(layer, kv_cache.of_columns(layer, span_evicted_at) < NEVER) for layer in cache)
    newest = jnp.maximum(lengths - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
    written = jnp.where(there, after_prompt, response)
    of_row = jnp.arange(tokens.shape[0])[:, None]
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
    state = state.replace(
        tokens=state.tokens.at[of_row, written].set(tokens, mode="drop"),
        routing=_with_experts(state.routing, sampler.prompt_width + written, experts),
    )
    return _compressed(sampler, params, state, rows, read)


def _with_experts(
    routing: Int[Array, "rows T mixtures per_token"] | None,
    column: Int[Array, "rows buffer"],
    experts: Int[Array, "rows buffer mixtures per_token"] | None,
) -> Int[Array, "rows T mixtures per_token"] | None:
    """The routing with the experts of the tokens at these columns; columns after the last are dropped."""
    if routing is None or experts is None:
        return None
    return routing.at[jnp.arange(routing.shape[0])[:, None], column].set(experts, mode="drop")


def _read_spans(
    sampler: Sampler, rows: SamplerState, tokens: Int[Array, "rows buffer"], columns: Int[Array, "rows buffer"]
) -> tuple[SpanState | None, Int[Array, "rows T"] | None]:
    """The state of the spans after these tokens, and for each key that they evict the first column whose query does not
    see it; `NEVER` for all others."""
    token_spans = sampler.policy.spans
    if token_spans is None:
        return None, None
    key = jnp.arange(sampler.columns, dtype=jnp.int32)[None]

    def one(carry: tuple[SpanState, Array], token: tuple[Array, Array]) -> tuple[tuple[SpanState, Array], None]:
        spans, span_evicted_at = carry
        spans, first, end = token_spans.advance(spans, *token)
        inside = (first[:, None] <= key) & (key < end[:, None])
        return (spans, jnp.where(inside, token[1][:, None], span_evicted_at)), None

    assert rows.spans is not None, "prefill made it"
    never = jnp.full((tokens.shape[0], sampler.columns), NEVER, jnp.int32)
    return jax.lax.scan(one, (rows.spans, never), (tokens.T, columns.T))[0]


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
    # Every row counts its queries as if all that it read were its prompt: see `kv_cache.settle`.
    newest = jnp.int32(sampler.prompt_width - 1)
    cache, evicted_at = [], []
    settle = partial(kv_cache.settle, written=written, buffer=sampler.config.buffer)
    compressions = sampler.compressions(sampler.config.buffer)
    runs = zip(sampler.runs, compressions, rows.cache, state.evicted_at, strict=True)
    for layers, compression, layer, record in runs:
        layer = kv_cache.each_layer(settle, layer)
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
      prompts: `[rows, P]`, each row's own. terminated: conversations that their environment ended.
    """
    config = sampler.config
    emitted = jnp.arange(config.max_new_tokens, dtype=jnp.int32)[None] < state.rows.drawn[:, None]
    valid = jnp.concatenate([prompts.valid, emitted], axis=1)
    tokens = jnp.concatenate([prompts.tokens, state.tokens], axis=1)
    evicted_at = to_evicted_at(sampler, state.evicted_at, tokens, valid, sampler.prompt_width + state.read)
    # Rows are compressed after different columns. Wherever a segment of the learner begins, its first query sees
    # no more earlier keys than the cache has slots for.
    sizes = [budget + config.buffer - 1 for budget in sampler.layer_budgets]
    segments = [Segments(sampler.prompt_width, config.buffer, max(size, 1)) for size in sizes]
    return Trajectory(
        tokens=tokens,
        valid=valid,
        logprobs=state.logprobs,
        terminated=terminated,
        mask=ShadowMask(evicted_at, () if max(sizes) >= sampler.columns else tuple(segments)),
        temperature=config.sampling.temperature,
        replayable=config.sampling.trainable,
        entropy=state.entropy,
        drawable=drawable_tokens(config, state.drawable),
        sampled=state.sampled,
        routing=None if state.routing is None else jnp.where(valid[..., None, None], state.routing, NOT_RECORDED),
        expert_count=expert_count(sampler.model.shape),
    )
