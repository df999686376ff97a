"""A segment: `buffer` steps that sample and read one token per live row, and the compression after them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.compression import CompressionRecord, RowProgress
from smd_jax.cache.slots import EMPTY, LayerCache
from smd_jax.message.sampling import drawable_form, forbid, is_one_of, sample
from smd_jax.model.protocol import EncodedPositions, Params, check_logits
from smd_jax.model.routing import NOT_RECORDED, not_recorded
from smd_jax.pytrees import PyTreeNode
from smd_jax.sampler.attends import read_tokens
from smd_jax.sampler.keys import eviction_keys, token_keys
from smd_jax.sampler.seats import SamplerState
from smd_jax.sampler.static import Sampler
from smd_jax.text.stop_strings import StopTable, advance


class SegmentRecord(PyTreeNode):
    """The record of one segment.

    Attributes:
      tokens, logprobs, entropy: `[rows, buffer]`.
      emitted: `[rows, buffer]` tokens that belong to the response.
      drawable: `[rows, buffer, ...]` as `Sampled.drawable`, None without filters.
      compressions: per layer or run of layers, record of the compression at its end; None without evictions.
      routing: `[rows, buffer, mixtures, per_token]` experts of each token, -1 of ended rows; None without experts.
    """

    tokens: Int[Array, "rows buffer"]
    logprobs: Float[Array, "rows buffer"]
    entropy: Float[Array, "rows buffer"]
    emitted: Bool[Array, "rows buffer"]
    drawable: Array | None
    compressions: tuple[CompressionRecord, ...] | None
    routing: Int[Array, "rows buffer mixtures per_token"] | None = None


# Jitted only to cache the trace, which `jax.eval_shape` and the loop share. Inlined into the surrounding program.
@partial(jax.jit, static_argnames="sampler", inline=True)
def run_segment(
    sampler: Sampler, params: Params, state: SamplerState, stop: StopTable | None
) -> tuple[SamplerState, SegmentRecord]:
    """Samples and reads `buffer` tokens per row, fewer when all rows are done, and compresses every layer."""
    before = state.drawn
    state, record, segment_steps = draw_segment(sampler, params, state, stop)
    if not sampler.compresses:
        return state, record
    progress = RowProgress(
        start=state.start,
        # For a row that ended within the segment this is too large; its cache is not read again.
        newest=sampler.prompt_width + before + segment_steps - 1,
        segment_start=sampler.prompt_width + before,
        # The whole segment, even if all rows ended early: random numbers depend only on the boundary.
        step=before + sampler.config.buffer,
        rng=eviction_keys(state.rng),
    )
    # `cache_steps` counts the steps that were taken, and queries are numbered from 0.
    newest_query = sampler.prompt_width + state.cache_steps - 1
    runs = zip(sampler.runs, sampler.compressions(sampler.config.buffer), state.cache, strict=True)
    with jax.named_scope("compress"):
        compressed = [
            compression.in_place(cache, progress, newest_query, params, layers) for layers, compression, cache in runs
        ]
    cache, compressions = zip(*compressed, strict=True)
    return state.replace(cache=cache), record.replace(compressions=compressions)


def draw_segment(
    sampler: Sampler, params: Params, state: SamplerState, stop: StopTable | None
) -> tuple[SamplerState, SegmentRecord, Int[Array, ""]]:
    """`run_segment` without the compression at its end; also the number of steps."""
    # Index of each token in its response. Valid for rows that are live at a step, which sampled a token at each step
    # before it; not used for finished rows.
    index = state.drawn[:, None] + jnp.arange(sampler.config.buffer, dtype=jnp.int32)[None]
    with jax.named_scope("draw"):
        uniforms = _uniforms(state.rng, index)
    # Column minus the column of the row's first token: the position in its own sequence.
    places = sampler.model.encode_positions(sampler.prompt_width + index - state.start[:, None])
    record = no_record(sampler, len(state.drawn), sampler.config.buffer)

    def going_on(carry: tuple[SamplerState, SegmentRecord, Array]) -> Bool[Array, ""]:
        state, _, segment_step = carry
        # When all rows are done, the remaining steps would only write empty slots.
        return (segment_step < sampler.config.buffer) & ~jnp.all(state.done)

    def step(carry: tuple[SamplerState, SegmentRecord, Array]) -> tuple[SamplerState, SegmentRecord, Array]:
        state, record, segment_step = carry
        state, record, token = _draw(sampler, params, state, record, segment_step, uniforms[:, segment_step], stop)
        place = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, segment_step, 1, axis=1), places)
        state, chosen = _encode(sampler, params, state, token, place, segment_step)
        if chosen is not None:
            routing = jax.lax.dynamic_update_index_in_dim(record.routing, chosen, segment_step, axis=1)
            record = record.replace(routing=routing)
        return state, record, segment_step + 1

    begin = (state, record, jnp.zeros((), jnp.int32))
    state, record, segment_steps = jax.lax.while_loop(going_on, step, begin)
    # Added after the loop: within the segment, every step is at `cache_steps + segment_step`.
    state = state.replace(cache_steps=state.cache_steps + segment_steps)
    return state, record, segment_steps


def _uniforms(keys: Key[Array, " rows"], index: Int[Array, "rows buffer"]) -> Float[Array, "rows buffer"]:
    """One number per token, from its row's key and its index in the response; the same in any precision."""

    def draw(key: Key[Array, ""], index: Int[Array, ""]) -> Float[Array, ""]:
        # Explicit float32: with 64-bit numbers enabled, JAX's default dtype gives other numbers.
        return jax.random.uniform(jax.random.fold_in(key, index), (), jnp.float32)

    return jax.vmap(jax.vmap(draw, (None, 0)))(token_keys(keys), index)


def no_record(sampler: Sampler, rows: int, tokens: int) -> SegmentRecord:
    """The record of `tokens` columns before any token is sampled."""
    shape = (rows, tokens)
    numbers = jnp.zeros(shape, jnp.promote_types(sampler.model.shape.dtype, jnp.float32))
    form = drawable_form(sampler.config.sampling, sampler.model.shape.vocab_size)
    return SegmentRecord(
        tokens=jnp.full(shape, sampler.config.pad_token_id, jnp.int32),
        logprobs=numbers,
        entropy=numbers,
        emitted=jnp.zeros(shape, bool),
        drawable=None if form is None else jnp.zeros((*shape, *form.shape), form.dtype),
        compressions=None,
        routing=not_recorded(sampler.model.shape, *shape),
    )


@jax.named_scope("draw")
def _draw(
    sampler: Sampler,
    params: Params,
    state: SamplerState,
    record: SegmentRecord,
    segment_step: Int[Array, ""],
    uniforms: Float[Array, " rows"],
    stop: StopTable | None,
) -> tuple[SamplerState, SegmentRecord, Int[Array, " rows"]]:
    """Samples the next token of unfinished rows, and records it at `segment_step`."""
    config = sampler.config
    live = ~state.done
    logits = sampler.model.logits(params, state.hidden[:, None])[:, 0]
    check_logits(sampler.model.shape, logits)
    # Counted before this draw: the end token is not among the `min_new_tokens`.
    may_end = state.drawn >= config.min_new_tokens
    if config.eos_token_id is not None and config.min_new_tokens:
        logits = forbid(logits, config.eos_token_id, ~may_end)
    sampled = sample(logits, uniforms, config.sampling)
    token = jnp.where(live, sampled.tokens, config.pad_token_id)
    ended = jnp.zeros_like(live) if config.eos_token_id is None else is_one_of(token, config.eos_token_id)
    if stop is not None:
        found, stopped = advance(stop, state.stop, token)
        # Reset until then, so that no stop string begins within the minimum length.
        state = state.replace(stop=jnp.where(may_end, found, 0))
        ended = ended | (stopped & may_end)

    def put(x: Array, new: Array) -> Array:
        # Zeros for finished rows, whose logits are of padding and arbitrary.
        new = jnp.where(live.reshape(-1, *(1,) * (new.ndim - 1)), new, 0).astype(x.dtype)
        return jax.lax.dynamic_update_index_in_dim(x, new, segment_step, axis=1)

    record = record.replace(
        tokens=jax.lax.dynamic_update_index_in_dim(record.tokens, token, segment_step, axis=1),
        logprobs=put(record.logprobs, sampled.logprobs),
        entropy=put(record.entropy, sampled.entropy),
        emitted=put(record.emitted, live),
        drawable=jax.tree.map(put, record.drawable, sampled.drawable),
    )
    drawn = state.drawn + live
    state = state.replace(
        drawn=drawn,
        # `ended` may be true for a row that was done before, because its padding may be the end token.
        terminated=state.terminated | (live & ended),
        done=state.done | ended | (drawn >= state.limit),
    )
    return state, record, token


def _encode(
    sampler: Sampler,
    params: Params,
    state: SamplerState,
    token: Int[Array, " rows"],
    place: EncodedPositions,
    segment_step: Int[Array, ""],
) -> tuple[SamplerState, Int[Array, "rows mixtures per_token"] | None]:
    """Writes the newest token of unfinished rows to the cache, and its hidden state to the state. Also the token's
    experts; None without any."""
    query_number = sampler.prompt_width + state.cache_steps + segment_step
    if sampler.compresses:
        # Every segment refills the buffer, which begins after the kept keys.
        slots = tuple(budget + segment_step for budget in sampler.budgets)
    else:
        # A ring, because a row may begin at any step. It has slots for a whole prompt and response, so a row never
        # overwrites its own first key, only those of the previous row, which `seat` has replaced.
        slots = tuple(query_number % layer.slots for layer in state.cache)
    column = sampler.prompt_width + state.drawn - 1  # column of the token that `_draw` has just counted
    columns = jnp.where(state.done, EMPTY, column)[:, None]
    if sampler.policy.spans is not None:
        assert state.spans is not None, "prefill made it"
        spans, first, end = sampler.policy.spans.advance(state.spans, token, columns[:, 0])

        def drop(layer: LayerCache) -> LayerCache:
            """Empties the slots of spans that this token evicts, before its query."""
            low, high = (x.reshape(-1, *(1,) * (layer.columns.ndim - 1)) for x in (first, end))
            return kv_cache.drop(layer, (low <= layer.columns) & (layer.columns < high))

        state = state.replace(spans=spans, cache=tuple(drop(layer) for layer in state.cache))
    hidden, cache, chosen = read_tokens(
        sampler, params, token[:, None], place, state.cache, slots, columns, state.start, query_number
    )
    if chosen is not None:
        # A row that has ended reads padding.
        chosen = jnp.where(state.done[:, None, None], NOT_RECORDED, chosen[:, 0])
    return state.replace(hidden=hidden[:, 0], cache=cache), chosen
