"""The jitted train step of GRPO, RLOO and PPO. It sees a Trajectory and advantages, never the policy that made them.

once per step:         correction of the mismatch ─► weight of every token in the loss                  `prepare`
for every microbatch:  learner forward under the mask ─► policy loss (+ distillation, value loss)       `objective`
                       ─► gradients, summed                                                             `accumulation`
once per step:         optimizer ─► new parameters (─► new reference), metrics                          `step`
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from smd_jax.learner.accumulation import accumulate, count_parts
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import check_replayable
from smd_jax.learner.objective import TokenTerms, make_objective
from smd_jax.learner.prepare import Prepared, prepare
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, check_reference
from smd_jax.learner.step import take_step
from smd_jax.learner.trained import of_trained, trained_params
from smd_jax.losses.policy import surrogate_metrics
from smd_jax.metrics import correction_metrics, sampler_learner_metrics, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.shared_prompt import shared_prompt
from smd_jax.ratios import lower_percentile

Update = Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]


def make_update(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    max_difference: float | None = None,
) -> Update:
    """The jitted step `(state, batch) -> (state, metrics)`; the old state's buffers are donated.

    A batch whose loss or gradient is not finite changes no parameter, see `take_step`; neither does one in which
    nothing counts, nor one in which sampler and learner differ at a token by more than `max_difference` nats (None: by
    anything), which makes sense of a rollout's first step alone.

    Run it under `jax.set_mesh(mesh)` with state and batch placed by `smd_jax.devices.sharding`, or without a mesh.

    The returned function raises ValueError for a trajectory whose probabilities no learner can reproduce (greedy
    sampling), rows that do not divide into microbatches, and what is missing: a reference, or a critic's head or
    targets.
    """

    def update(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        # Structure and static fields alone: these checks run while the step is traced, not at every call.
        check_replayable(batch.trajectory)
        check_reference(config, state)

        once = shared_prompt(model, config.rows_per_prompt, batch.trajectory.prompt_width)
        prepared = prepare(once, config, state.params, batch)
        microbatches = count_parts(batch.advantages.shape[0], config.microbatch_size)
        objective = of_trained(make_objective(once, config, state), state.params)
        loss, grads, sums, terms = accumulate(
            objective, trained_params(state.params), prepared, microbatches, config.rows_per_prompt
        )

        return finished(state, optimizer, config, prepared, (loss, sums, grads, terms), max_difference)

    # Donated: parameters and optimizer state of the old step are overwritten, or a model would need twice its memory.
    return jax.jit(update, donate_argnums=0)


def finished(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    config: UpdateConfig,
    prepared: Prepared,
    found: tuple[Array, Metrics, Params, TokenTerms],
    max_difference: float | None,
) -> tuple[TrainState, Metrics]:
    """The optimizer step with what a whole batch has found: loss, sums, gradients and terms; and its metrics.

    Args:
      max_difference: as in `make_update`.
    """
    loss, sums, grads, terms = found
    metrics = _metrics(config, state, prepared, terms)
    sound = jnp.isfinite(loss)
    if max_difference is not None:
        sound &= metrics["sampling/sampling_logp_difference/max"] <= max_difference
    teaches = _teaches(config, state, prepared)
    new_state, of_step = take_step(state, optimizer, grads, config.reference_sync, sound=sound, teaches=teaches)
    return new_state, {"loss": loss, **of_step, **sums} | metrics


def _teaches(config: UpdateConfig, state: TrainState, prepared: Prepared) -> Bool[Array, ""]:
    """Whether any term of the loss has something to learn from."""
    found = prepared.correction.counted.any()
    if config.value is not None or config.entropy_coef or config.eviction_coef:
        found |= prepared.mask.any()
    if prepared.dense is not None:
        found |= prepared.dense.correction.counted.any()
    if config.distill is not None:
        # A teacher needs no reward: it has something to say of every token.
        found |= (config.distill.coef_at(state.step) > 0) & (prepared.distill_weights > 0).any()
    return found


def _metrics(config: UpdateConfig, state: TrainState, prepared: Prepared, terms: TokenTerms) -> Metrics:
    """Token means over the responses, how far the learner is from the sampler, and what each term of the loss did."""
    mask = prepared.mask
    counted = prepared.correction.counted
    metrics = {
        "entropy": token_mean(terms.entropy, mask),
        # What the loss did is measured over the tokens that it counts; how far sampler and learner are apart, also over
        # those that a correction rejects.
        **surrogate_metrics(terms.loss, counted, config.loss, prepared.batch.counted_rows),
        **sampler_learner_metrics(prepared.batch.trajectory.logprobs, terms.logprobs, mask),
        **correction_metrics(terms.correction_weights, counted, mask),
    }
    # In the reward it is a number of the whole rollout, which the loop has.
    if config.loss.beta and not config.kl_in_reward:
        metrics["kl"] = token_mean(terms.loss.kl, counted)
    if config.distill is not None:
        metrics["distill_coef"] = config.distill.coef_at(state.step)
    if terms.agreement is not None:
        metrics["distill/agreement_p5"] = lower_percentile(terms.agreement.overlap, terms.agreement.inside, 5.0)
    if terms.eviction_difference is not None:
        metrics["evictions/logp_difference/max"] = terms.eviction_difference.max()
    if terms.values_clipped is not None:
        metrics["val/clipfrac_avg"] = token_mean(terms.values_clipped, mask)
    return metrics
