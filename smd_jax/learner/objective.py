"""The loss of one microbatch, as a function of the parameters: policy loss, and what is added to it.

hidden states under the learner's mask ─┬─► log-probabilities ─► policy loss
                                        │   and entropies     ─► entropy bonus
                                        ├─► the dense teacher beside them ─► distillation
                                        │   or a dense learner            ─► its policy loss
                                        └─► the critic's values ─► value loss
keys and values of the same pass ─► log-probabilities of evictions ─► their policy loss
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.corrections.base import Correction, CorrectionInputs
from smd_jax.corrections.chain import split_by_time
from smd_jax.learner.accumulation import Objective
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.distill import Agreement, distill_term
from smd_jax.learner.evictions import recorded_draws, response_hidden_and_evictions
from smd_jax.learner.forward import learner_mask, replay, replay_hidden, response_hidden
from smd_jax.learner.prepare import Prepared, correction_inputs
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, reference_params
from smd_jax.losses.entropy import weighted_entropy
from smd_jax.losses.evictions import eviction_loss
from smd_jax.losses.policy import LossConfig, LossInputs, LossTerms, policy_loss
from smd_jax.losses.value import ValueConfig, value_loss
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.value_head import values
from smd_jax.pytrees import any_leaves


@any_leaves
class TokenTerms(struct.PyTreeNode):
    """Per-token results of the forward passes, `[batch, R]`, for the metrics; None of what the step does not do.

    `eviction_difference` is, per row, the largest |log p_learner - log p_sampler| of its draws of evictions.
    """

    logprobs: Float[Array, "batch R"]
    entropy: Float[Array, "batch R"]
    loss: LossTerms
    correction_weights: Float[Array, "batch R"]
    values_clipped: Bool[Array, "batch R"] | None
    agreement: Agreement | None
    eviction_difference: Float[Array, " batch"] | None


def make_objective(model: LanguageModel, config: UpdateConfig, state: TrainState) -> Objective:
    """`(params, microbatch) -> (loss, (scalars to sum up, TokenTerms))`.

    The state gives what has no gradient here: the reference and the step. Of its parameters nothing is looked at but a
    base below adapters, which may be the reference.
    """

    def objective(params: Params, part: Prepared) -> tuple[Array, tuple[Metrics, TokenTerms]]:
        trajectory = part.batch.trajectory
        eviction_weights = part.eviction_weights
        evictions = None
        if eviction_weights is None:
            hidden = response_hidden(model, params, trajectory, learner_mask(trajectory, config.visibility))
        else:  # under the sampler's own mask, as `config` has made sure
            hidden, evictions = response_hidden_and_evictions(model, params, trajectory)
        learner = replay_hidden(model, params, hidden, trajectory, entropy_gradient=config.entropy_coef > 0)
        weights = _correction_weights(config, part, learner.logprobs)
        loss, loss_terms = _policy_loss(model, config, state, part, learner.logprobs, weights)
        loss = config.policy_coef * loss
        sums: Metrics = {}

        if config.dense_learner is not None:
            sums["loss/dense_avg"] = _dense_loss(model, config, state, params, part)
            share = config.dense_learner.share
            loss = (1 - share) * loss + share * sums["loss/dense_avg"]

        if part.entropy_weights is not None:
            loss = loss - config.entropy_coef * weighted_entropy(learner.entropy, part.entropy_weights)

        eviction_difference = None
        if evictions is not None and eviction_weights is not None:
            sampled = recorded_draws(trajectory)[1].logprobs
            sums["evictions/loss"] = eviction_loss(evictions, sampled, part.batch.advantages, eviction_weights)
            loss = loss + config.eviction_coef * sums["evictions/loss"]
            eviction_difference = jnp.abs(evictions - sampled).max(axis=(1, 2, 3))

        agreement = None
        if config.distill is not None:
            # Logged as a divergence in nats: its coefficient is a metric of its own.
            sums["distill"], agreement = distill_term(
                model,
                config.distill,
                params,
                reference_params(state),
                state.step,
                trajectory,
                hidden,
                part.distill_weights,
            )
            loss = loss + config.distill.coef_at(state.step) * sums["distill"]

        values_clipped = None
        if config.value is not None:
            sums["loss/value_avg"], values_clipped = _value_loss(config.value, params, hidden, part)
            loss = loss + config.value.coef * sums["loss/value_avg"]

        terms = TokenTerms(
            logprobs=learner.logprobs,
            entropy=learner.entropy,
            loss=loss_terms,
            correction_weights=weights,
            values_clipped=values_clipped,
            agreement=agreement,
            eviction_difference=eviction_difference,
        )
        return loss, jax.lax.stop_gradient((sums, terms))

    return objective


def _policy_loss(
    model: LanguageModel,
    config: UpdateConfig,
    state: TrainState,
    part: Prepared,
    logprobs: Float[Array, "batch R"],
    weights: Float[Array, "batch R"],
) -> tuple[Float[Array, ""], LossTerms]:
    """Of a learner with these log-probabilities, whose correction weighs tokens so."""
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=_ratio_to_logprobs(config.correction, part.batch, logprobs),
        reference_logprobs=_reference_logprobs(model, config, state, part.batch.trajectory),
        advantages=part.batch.advantages,
        weights=part.weights,
        # What is not chosen loses its surrogate alone, like what a correction weighs 0: its KL stays, and so do the
        # denominators.
        correction_weights=weights if part.chosen is None else jnp.where(part.chosen, weights, 0.0),
        high_scale=part.correction.high_scale,
    )
    return policy_loss(inputs, policy_loss_of(config))


def _dense_loss(
    model: LanguageModel, config: UpdateConfig, state: TrainState, params: Params, part: Prepared
) -> Float[Array, ""]:
    """Policy loss of the dense learner on the same weights, in a forward pass of its own."""
    dense = config.of_dense_learner
    assert dense is not None and part.dense is not None
    logprobs = replay(model, params, part.batch.trajectory, part.batch.trajectory.dense_mask()).logprobs
    weights = _correction_weights(dense, part.dense, logprobs)
    loss, _ = _policy_loss(model, dense, state, part.dense, logprobs, weights)
    return dense.policy_coef * loss


def policy_loss_of(config: UpdateConfig) -> LossConfig:
    """The policy loss, without its clipping where the correction brings a trust region of its own, and without the KL
    where that is in the reward."""
    loss = config.loss if config.correction.traits.clips else config.loss.unclipped()
    return loss.without_kl() if config.kl_in_reward else loss


def _correction_weights(
    config: UpdateConfig, part: Prepared, logprobs: Float[Array, "batch R"]
) -> Float[Array, "batch R"]:
    """Weights made before the forward pass, times those of a correction that had to wait for it."""
    late = split_by_time(config.correction)[1]
    if late is None:
        return part.correction.weights
    # Weights are constants of the step: no gradient flows through the policy's own part in them.
    present = jax.lax.stop_gradient(logprobs)
    return part.correction.weights * _late_weights(late, correction_inputs(part.batch, part.mask, present))


def _late_weights(late: Correction, inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    """Weights of a correction that looks at the present policy; what it rejects weighs 0."""
    terms = late.terms(inputs)
    if terms.high_scale is not None:
        raise ValueError(f"expected no high_scale from a correction that looks at the present policy; got {late}")
    # The denominators were made before the forward pass: a late rejection can take a token's weight, not its place.
    return jnp.where(terms.counted, terms.weights, 0.0)


def _ratio_to_logprobs(
    correction: Correction, batch: TrainBatch, logprobs: Float[Array, "batch R"]
) -> Float[Array, "batch R"]:
    """Log-probabilities of the policy that the ratio is taken to."""
    if correction.traits.ratio_to == "sampler":
        return batch.trajectory.logprobs
    # Without recorded ones the old policy is the present one: every ratio is 1, and its gradient that of log p.
    return jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs


def _reference_logprobs(
    model: LanguageModel, config: UpdateConfig, state: TrainState, trajectory: Trajectory
) -> Float[Array, "batch R"] | None:
    """Log-probabilities of the reference policy under its own mask; None without a KL in the loss."""
    reference = reference_params(state)
    if policy_loss_of(config).beta == 0 or reference is None:
        return None
    mask = learner_mask(trajectory, config.reference_visibility or config.visibility)
    return jax.lax.stop_gradient(replay(model, reference, trajectory, mask).logprobs)


def _value_loss(
    config: ValueConfig, params: Params, hidden: Float[Array, "batch R hidden"], part: Prepared
) -> tuple[Float[Array, ""], Bool[Array, "batch R"]]:
    """The critic's loss over all tokens that count, also those that a correction rejects: it learns the returns of what
    was sampled, and makes no use of a ratio."""
    batch = part.batch
    if batch.old_values is None or batch.returns is None:
        raise ValueError("expected old_values and returns in the batch for the value loss, as PPOLoop puts; got None")
    return value_loss(values(params, hidden), batch.old_values, batch.returns, part.value_weights, config)
