"""The jitted train step of all algorithms, on a Trajectory and advantages.

once per step:         every term of the objective weights its tokens                                   `prepare`
for every microbatch:  learner forward under the mask ─► sum of the terms ─► gradients, summed          `make_objective`
once per step:         optimizer ─► new parameters (─► new reference), metrics                          `take_step`

With `pack_columns` sequences share the rows of a microbatch, see `smd_jax.learner.packed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from smd_jax.learner.accumulation import accumulate, count_parts
from smd_jax.learner.config import UpdateConfig, check_old_logprobs, check_reference, without_packing
from smd_jax.learner.forward import check_replayable, check_shared_prompts, checked_before
from smd_jax.learner.objective import Prepared, RowOutputs, check_new_metrics, make_objective, prepare
from smd_jax.learner.packed import accumulate_packed, check_packable, check_windows, packing_metrics, packs_of
from smd_jax.learner.packs import Packs
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, check_batch, check_parts, of_trained, trained_params
from smd_jax.learner.step import take_step
from smd_jax.learner.terms import TermResults
from smd_jax.metrics import sampler_learner_metrics, step_weights, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.shared_prompt import shared_prompt

Update = Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]


def make_update(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    max_difference: float | None = None,
) -> Update:
    """The jitted step `(state, batch) -> (state, metrics)`; the old state's buffers are donated.

    A batch changes no parameter if its loss or gradient is not finite (see `take_step`), if it has no counted tokens,
    or if sampler and learner differ at a token by more than `max_difference` nats. Set that only for a rollout's first
    step; None disables it.

    Run it under `jax.set_mesh(mesh)` with state and batch placed by `smd_jax.devices.sharding`, or without a mesh. With
    `pack_columns` call it outside of jit, because it reads the lengths.

    The returned function raises ValueError for a greedily sampled trajectory, rows that do not divide into
    microbatches, arrays whose shapes do not fit the trajectory, a missing reference, critic's head or targets,
    `trajectory.logprobs` as `old_logprobs` of a correction that measures the mismatch, and rows of `rows_per_prompt`
    without a common prompt; with `pack_columns` also for boolean masks, quantised caches, sampled evictions and a
    minimum length, which cannot be packed.

    Raises:
      TypeError: for a model that is no LanguageModel, and an optimizer or a config of another class.
      ValueError: for shared beginnings of packed rows with sliding windows shorter than a row.
    """
    check_parts(model, optimizer, config, UpdateConfig)
    check_windows(model.shape, config)

    def update(state: TrainState, batch: TrainBatch, packs: Packs | None = None) -> tuple[TrainState, Metrics]:
        # Checks of structure and static fields, which run at trace time.
        check_replayable(batch.trajectory)
        check_batch(batch)
        check_reference(config, state)
        if (packs is None) != (config.pack_columns is None):  # as `lower` could be called
            raise ValueError(f"expected packs with pack_columns, and none without; got {config.pack_columns}")

        rows = batch.advantages.shape[0]
        unpacked = without_packing(config, rows)
        once = shared_prompt(model, unpacked.rows_per_prompt, batch.trajectory.prompt_width)
        prepared = prepare(once, unpacked, state.params, batch)
        objective = of_trained(make_objective(once, config, state), state.params)
        trained = trained_params(state.params)
        if packs is None:
            microbatches = count_parts(rows, config.microbatch_size)
            result = accumulate(objective, trained, prepared, microbatches, config.rows_together)
        else:
            result = accumulate_packed(objective, trained, prepared, packs)
        state, metrics = apply_gradients(state, optimizer, config, prepared, result, max_difference)
        return state, metrics | ({} if packs is None else packing_metrics(batch.trajectory, packs, config))

    # Donated: the new state overwrites the old one, which would otherwise double the memory.
    program = jax.jit(update, donate_argnums=0)

    def check(state: TrainState, batch: TrainBatch) -> tuple[Packs, ...]:
        check_old_logprobs(config, batch)
        if config.pack_columns is not None:
            check_packable(batch.trajectory)
            return (packs_of(batch.trajectory, config),)
        check_shared_prompts(config.rows_per_prompt, batch.trajectory)
        return ()

    return checked_before(program, check)


def apply_gradients(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    prepared: Prepared,
    result: tuple[Array, Params, Metrics, RowOutputs],
    max_difference: float | None,
) -> tuple[TrainState, Metrics]:
    """Takes the optimizer step of a whole batch and returns the state and the metrics. `max_difference` is as in
    `make_update`."""
    loss, grads, sums, (learner, rows_of_terms) = result
    terms = [
        (term, TermResults(prepared.batch, prepared.mask, own, rows, state.step))
        for term, own, rows in zip(config.objective, prepared.terms, rows_of_terms, strict=True)
    ]
    # Entropy and mismatch include tokens that a correction rejects.
    mask, sampled = prepared.mask, prepared.batch.trajectory.logprobs
    own = {"entropy": token_mean(learner.entropy, mask)} | sampler_learner_metrics(sampled, learner.logprobs, mask)
    metrics = dict(sums)
    for term, results in terms:
        of_term = term.metrics(results)
        check_new_metrics(term, of_term, metrics)
        metrics |= of_term
    is_finite = jnp.isfinite(loss)
    if max_difference is not None:
        is_finite &= own["sampling/sampling_logp_difference/max"] <= max_difference
    learns = functools.reduce(jnp.maximum, (term.learns(results) for term, results in terms))
    new_state, of_step = take_step(
        state, optimizer, grads, config.reference_sync, is_finite=is_finite, learns=learns > 0
    )
    own |= step_weights(mask, learns)
    return new_state, {"loss": loss, **of_step, **own, **metrics}
