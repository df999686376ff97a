"""Packed rows of the update: the same loss, gradients and metrics, with little padding.

once per step:        weights and corrections of the whole batch, one sequence a row         `prepare`
on the host:          which sequences share a row                                            `packs_of`
for every microbatch: its tokens, consecutive ─► loss ─► gradients, added up               `packed_part`
                      terms of every token ─► back into their place in the batch             `accumulate_packed`
once per step:        optimizer, metrics

The model can read equal beginnings once, such as the completions of a prompt or the branches of a tree. The loss is
prepared, and its terms come back, with one sequence per row, so it equals that of separate rows.

The number of microbatches depends on the lengths, so the program has room for the most, and loops over those with
tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.devices.processes import on_host
from smd_jax.devices.sharding import constrain
from smd_jax.learner.accumulation import Objective
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import check_replayable
from smd_jax.learner.objective import Prepared
from smd_jax.learner.packs import ABSENT, Packs, PackSizes, Sequences, chains, pack, with_distinct
from smd_jax.learner.state import Metrics
from smd_jax.message.masks import EVICTED_AT, Segments, ShadowMask
from smd_jax.message.packing import Packing
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import ModelShape, Params
from smd_jax.model.routing import NOT_RECORDED
from smd_jax.shapes import check_shape


def accumulate_packed(
    objective: Objective, params: Params, prepared: Prepared, packs: Packs
) -> tuple[Float[Array, ""], Params, Any, Any]:
    """`smd_jax.learner.accumulation.accumulate` over packed microbatches; terms are `[batch, R]`, without packing."""
    first = jax.tree.map(lambda x: x[0], packs)
    loss, (sums, terms) = jax.eval_shape(lambda: objective(params, packed_part(prepared, first)))

    def add(index: Int[Array, ""], so_far: Any) -> Any:
        places = jax.tree.map(lambda x: x[index], packs)
        part = packed_part(prepared, places)
        # Otherwise the compiler gathers sharded weights once before the loop, and they take memory until its end.
        own, _ = jax.lax.optimization_barrier((params, index))
        (loss, (sums, terms)), grads = jax.value_and_grad(objective, has_aux=True)(own, part)
        numbers, all_terms = so_far
        return (
            jax.tree.map(jnp.add, numbers, (loss, grads, sums)),
            jax.tree.map(lambda whole, x: _put_back(whole, x, places), all_terms, terms),
        )

    # In 16 bits, sums would lose small addends.
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (loss, params, sums))
    whole = jax.tree.map(lambda x: jnp.zeros(prepared.mask.shape, x.dtype), terms)
    numbers, terms = jax.lax.fori_loop(0, _used_parts(packs), add, (wide, whole))
    return *numbers, terms


def packing_metrics(trajectory: Trajectory, packs: Packs, config: UpdateConfig) -> Metrics:
    """`update/padding`, the share of columns without a token; with shared beginnings `update/shared`, the share of the
    batch's tokens that were not read again."""
    tokens = (packs.tokens != ABSENT).sum()
    metrics = {"update/padding": 1 - tokens / _used_parts(packs) / packs.tokens[0].size}
    return metrics | ({"update/shared": 1 - tokens / trajectory.valid.sum()} if config.rows_per_prompt > 1 else {})


def _used_parts(packs: Packs) -> Int[Array, ""]:
    return (packs.tokens != ABSENT).any((1, 2)).sum()


def packs_of(trajectory: Trajectory, config: UpdateConfig) -> Packs:
    """Packs a trajectory. Reads its lengths, and tokens and masks to share beginnings, so it cannot run under jit; all
    processes must call it."""
    assert config.pack_columns is not None and config.microbatch_size is not None
    valid = on_host(trajectory.valid)
    prompt, response = trajectory.prompt_width, trajectory.logprobs.shape[1]
    counted = on_host(trajectory.response_mask)
    sequences = Sequences(valid[:, :prompt].sum(1), valid[:, prompt:], counted, prompt)
    if config.rows_per_prompt > 1:
        # A shared token has an entry per branch, so a row may have more entries than columns.
        # All of the batch's tokens, a limit that does not depend on the data, so that programs are found again.
        sizes = PackSizes(config.microbatch_size, config.pack_columns, counted.size)
        tokens, evicted_at = on_host(trajectory.tokens), on_host(trajectory.mask.evicted_at)
        routing = None if trajectory.routing is None else on_host(trajectory.routing)
        packs = pack(sequences, sizes, chains(sequences, tokens, evicted_at, sizes, routing))
        # With filters, branches may have different drawable tokens.
        return packs if trajectory.drawable is not None else with_distinct(packs)
    # Three quarters are enough if responses are as long as three prompts; with longer ones some columns stay empty.
    room = max(response, -(-3 * config.pack_columns // 4))
    return pack(sequences, PackSizes(config.microbatch_size, config.pack_columns, min(room, config.pack_columns)))


def check_windows(shape: ModelShape, config: UpdateConfig) -> None:
    """Raises ValueError if a window could hide a shared beginning of packed rows.

    A key leaves the window of one branch, and is in that of the next one again. That is no interval of columns.
    """
    if config.pack_columns is None or config.rows_per_prompt == 1:
        return
    windows = [shape.window(layer) for layer in range(shape.num_layers)]
    short = [window for window in windows if window is not None and window < config.pack_columns]
    if short:
        raise ValueError(
            f"expected sliding windows of at least pack_columns {config.pack_columns} for sequences that share their "
            "beginnings, because a key that left the window of one branch would come back in the next; got a model "
            f"with a window of {min(short)}"
        )


def check_packable(trajectory: Trajectory) -> None:
    """Raises ValueError for a rollout that cannot be replayed, or whose mask or sampled evictions cannot be packed."""
    check_replayable(trajectory)
    if not isinstance(trajectory.mask, ShadowMask):
        raise ValueError(
            "expected a mask in interval form (ShadowMask.from_boolean) in a rollout to be packed; got booleans"
        )
    # Tokens are taken by their row: one mask for all rows would be read beyond its end.
    check_shape("the mask's evicted_at", trajectory.mask.evicted_at, (len(trajectory.tokens), *EVICTED_AT[1:]))
    if trajectory.mask.quantized is not None:
        raise ValueError("expected a cache that is not quantised in a rollout to be packed; got a quantised one")
    if trajectory.evictions is not None:
        raise ValueError("expected no recorded draws of evictions in a rollout to be packed; got some")
    if trajectory.drawable is not None and trajectory.drawable.min_new_tokens:
        least = trajectory.drawable.min_new_tokens
        raise ValueError(f"expected no minimum length in a rollout to be packed; got {least} tokens")


def packed_part(prepared: Prepared, places: Packs) -> Prepared:
    """Packs one microbatch; every array `[batch, R]` becomes `[rows, K]`.

    Raises:
      ValueError: if a term prepared an array of another shape.
    """

    def take(x: Any) -> Any:
        if x.shape[:2] != prepared.mask.shape:
            raise ValueError(
                f"expected terms that prepare arrays {prepared.mask.shape}, one number a token, with pack_columns; got "
                f"{x.shape}"
            )
        return _take(x, places.responses)

    batch = prepared.batch
    advantages = batch.advantages
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], prepared.mask.shape)
    # Left-out rows have no counted tokens.
    of_tokens = batch.replace(trajectory=(), advantages=advantages, counted_rows=None)
    packed = jax.tree.map(take, of_tokens).replace(trajectory=packed_trajectory(batch.trajectory, places))
    return Prepared(packed, take(prepared.mask), jax.tree.map(take, prepared.terms))


def packed_trajectory(trajectory: Trajectory, places: Packs) -> Trajectory:
    """Packs the tokens of sequences, each under its own mask."""
    at: Any = jax.tree.map(jnp.asarray, places)
    there = at.tokens != ABSENT
    drawable = trajectory.drawable
    if drawable is not None and drawable.sets is not None:
        drawable = drawable.replace(sets=_take(drawable.sets, places.responses))
    longest = trajectory.tokens.shape[1] if trajectory.longest is None else trajectory.longest
    packing = Packing(
        at.positions, at.ends, at.columns, at.sources, at.responses != ABSENT, at.distinct, at.same, longest
    )
    return Trajectory(
        tokens=_take(trajectory.tokens, places.tokens),
        valid=constrain(there),
        logprobs=_take(trajectory.logprobs, places.responses),
        terminated=constrain(jnp.zeros(there.shape[0], bool)),
        mask=packed_mask(trajectory.mask, trajectory.prompt_width, places),
        temperature=trajectory.temperature,
        entropy=None if trajectory.entropy is None else _take(trajectory.entropy, places.responses),
        drawable=drawable,
        packing=packing,
        routing=None if trajectory.routing is None else _take(trajectory.routing, places.tokens, NOT_RECORDED),
        expert_count=trajectory.expert_count,
    )


def packed_mask(mask: ShadowMask, prompt_width: int, places: Packs) -> ShadowMask:
    """Moves the tokens' intervals; each ends at the latest with its sequence or subtree."""
    width = mask.evicted_at.shape[-1]
    columns = places.tokens.shape[1]
    moved = jnp.arange(columns)[None] - places.tokens % width
    by_token = jnp.moveaxis(mask.evicted_at, -1, 1)  # [batch, T, layers, kv_heads]
    # NEVER is the largest int32, so nothing may be added to it.
    evicted_at = jnp.minimum(_take(by_token, places.tokens), width) + moved[..., None, None]
    # A key that was never evicted stays for all sequences that share it.
    stops, ends = places.stops[..., None, None], places.ends[..., None, None]
    evicted_at = jnp.where(evicted_at >= stops, ends, evicted_at)
    evicted_at = jnp.where((places.tokens != ABSENT)[..., None, None], evicted_at, 0)
    segments = [packed_segments(one, prompt_width, columns) for one in mask.segments]
    known = tuple(one for one in segments if one is not None)
    # One entry per layer, or none: unless it saves work in every layer, all keys are read.
    return ShadowMask(jnp.moveaxis(evicted_at, 1, -1), known if len(known) == len(segments) else ())


def packed_segments(segments: Segments, prompt_width: int, columns: int) -> Segments | None:
    """Boundaries at every `length` columns, independent of where sequences begin; None if that saves nothing.

    Between two compressions a query sees up to `budget + length` keys, within its prompt the whole prompt.
    """
    budget = max(segments.budget + segments.length, prompt_width)
    if 2 * (budget + segments.length) > columns:
        return None
    return Segments(segments.length, segments.length, budget)


def _take(x: Array, places: Int[Array, "rows columns"] | Int[np.ndarray, "rows columns"], absent: int = 0) -> Array:
    """`x [batch, columns, ...]` at flattened indices, `absent` for ABSENT."""
    taken = x.reshape(-1, *x.shape[2:])[jnp.maximum(places, 0)]
    there = jnp.asarray(places != ABSENT).reshape(places.shape + (1,) * (x.ndim - 2))
    # Each device computes its rows.
    return constrain(jnp.where(there, taken, jnp.asarray(absent, x.dtype)))


def _put_back(whole: Array, part: Array, places: Packs) -> Array:
    """Writes `part [rows, K]` to its indices in `whole [batch, R]`."""
    if part.shape != places.responses.shape:
        raise ValueError(
            f"expected terms whose rows are arrays {places.responses.shape}, one number a token, with pack_columns; "
            f"got {part.shape}"
        )
    # Numbers outside the array are dropped.
    at = jnp.where(places.responses == ABSENT, whole.size, places.responses)
    return whole.reshape(-1).at[at.reshape(-1)].set(part.reshape(-1), mode="drop").reshape(whole.shape)
