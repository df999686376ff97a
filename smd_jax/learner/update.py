"""The jitted train step of GRPO, RLOO and PPO. It sees a Trajectory and advantages, never the policy that made them.

once per step:         correction of the mismatch ─► weight of every token in the loss
for every microbatch:  learner forward under the mask ─► policy loss (+ distillation, value loss) ─► gradients, summed
once per step:         optimizer ─► new parameters, metrics
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.config import check_choice
from smd_jax.corrections.base import Correction, CorrectionInputs, CorrectionTerms
from smd_jax.corrections.chain import flat_parts, split_by_time
from smd_jax.corrections.uncorrected import Shadow
from smd_jax.learner.accumulation import Objective, accumulate, count_parts, in_parts
from smd_jax.learner.distill import Agreement, distill_term
from smd_jax.learner.forward import check_replayable, replay, replay_logits, response_hidden, response_logits
from smd_jax.losses.distillation import DistillConfig, teacher_positions, teacher_rows
from smd_jax.losses.policy import (
    LossConfig,
    LossInputs,
    LossTerms,
    mask_truncated_completions,
    policy_loss,
    surrogate_metrics,
)
from smd_jax.losses.value import ValueConfig, value_loss
from smd_jax.losses.weighting import TokenMean
from smd_jax.masks import Mask
from smd_jax.metrics import chi2_metrics, correction_metrics, mismatch_metrics, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.value_head import values
from smd_jax.pytrees import any_leaves
from smd_jax.ratios import lower_percentile
from smd_jax.sharding import constrain_tree
from smd_jax.trajectory import Trajectory

Metrics = dict[str, Array]
Visibility = Literal["shadow", "dense"]


@dataclass(frozen=True)
class UpdateConfig:
    """One optimizer step.

    Attributes:
      visibility: "shadow" replays the sampler's mask in the learner, so that both are one policy; "dense" trains the
        full-context policy on the sparse sampler's tokens.
      loss: the policy loss. policy_coef: its weight; 0 leaves distillation alone.
      correction: what is done about the mismatch between sampler and learner. `Shadow()` is the claim that there is
        none; every other one runs under either visibility, and has nothing to do under "shadow".
      distill: the second track, or None.
      value: PPO's critic, or None. It judges from the learner's hidden states, so it sees what the learner sees.
      reference_visibility: what the reference policy of the KL sees; None: what the learner sees.
      mask_truncated_completions: leave out responses that the length limit cut off.
      microbatch_size: rows of one forward and backward pass; gradients are summed over microbatches, in float32 or
        wider. None: all rows.
    """

    visibility: Visibility = "shadow"
    loss: LossConfig = LossConfig()
    policy_coef: float = 1.0
    correction: Correction = Shadow()
    distill: DistillConfig | None = None
    value: ValueConfig | None = None
    reference_visibility: Visibility | None = None
    mask_truncated_completions: bool = False
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        check_visibilities(self.visibility, self.reference_visibility)
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"expected microbatch_size >= 1; got {self.microbatch_size}")
        if self.distill is not None and self.visibility == "dense":
            raise ValueError("expected visibility 'shadow' with distillation, whose student is masked; got 'dense'")
        if self.policy_coef < 0 or (self.policy_coef == 0 and self.distill is None):
            raise ValueError(
                f"expected policy_coef > 0, or 0 with a distillation to learn from; got {self.policy_coef} and "
                f"distill {self.distill}"
            )
        if self.loss.beta > 0 and self.policy_coef == 0:
            raise ValueError(f"expected beta 0 with policy_coef 0, which takes the KL away too; got {self.loss.beta}")
        if self.loss.beta == 0 and self.reference_visibility is not None:
            raise ValueError(f"expected beta > 0 with a reference_visibility; got 0 and {self.reference_visibility!r}")
        check_correction(self.correction, self.visibility)
        if not self.correction.traits.clips and not self.loss.clips_plainly:
            raise ValueError(
                f"expected the plain token ratio (Clip without delta, ratio_level 'token') with "
                f"{type(self.correction).__name__}, which replaces its clipping; got {self.loss}"
            )
        if self.correction.traits.scales_bounds and not self.loss.takes_high_scale:
            raise ValueError(
                f"expected a loss that clips the ratio of single tokens (Clip, ratio_level 'token') with "
                f"{type(self.correction).__name__}, which scales its bounds; got {self.loss}"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the train state must carry reference parameters."""
        return self.loss.beta > 0 or (self.distill is not None and self.distill.direction == "anchor")


def check_visibilities(visibility: str, reference_visibility: str | None) -> None:
    """Raises ValueError for names that are no visibility."""
    check_choice("visibility", visibility, get_args(Visibility))
    if reference_visibility is not None:
        check_choice("reference_visibility", reference_visibility, get_args(Visibility))


def check_correction(correction: Correction, visibility: Visibility) -> None:
    """Raises ValueError for a claim that the learner's visibility does not keep."""
    if visibility == "dense" and any(isinstance(part, Shadow) for part in flat_parts(correction)):
        raise ValueError(
            "expected visibility 'shadow' with the correction Shadow(), which claims that sampler and learner see the "
            "same; got 'dense'. Name what to do about the mismatch: Naive() ignores it"
        )


@any_leaves
class TrainState(struct.PyTreeNode):
    """Everything that a step changes or needs again.

    Attributes:
      step: optimizer steps taken.
      params: of the policy. opt_state: of the optimizer.
      reference: parameters of the frozen reference policy, or None.
      key: PRNG key of the run; rollout i uses `fold_in(key, i)`, so the key itself never changes.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    reference: Params | None
    key: Key[Array, ""]


@any_leaves
class TrainBatch(struct.PyTreeNode):
    """What one step learns from.

    Attributes:
      trajectory: `[batch, ...]`.
      advantages: `[batch]`, or `[batch, R]` where every token has its own.
      old_logprobs: `[batch, R]` of the learner at the rollout's parameters; None: at the present ones.
      counted_rows: `[batch]` false for rows to leave out, of which nothing stays in any denominator; None: all rows
        count.
      old_values, returns: `[batch, R]` the critic's values at the rollout's parameters, and what it should have said;
        None without a critic.
    """

    trajectory: Trajectory
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    old_logprobs: Float[Array, "batch R"] | None
    counted_rows: Bool[Array, " batch"] | None = None
    old_values: Float[Array, "batch R"] | None = None
    returns: Float[Array, "batch R"] | None = None


@any_leaves
class Prepared(struct.PyTreeNode):
    """A batch with what must be known of all its rows before it is split; `[batch, R]`.

    Attributes:
      batch: as it came, with the old log-probabilities that the correction asked for.
      mask: tokens that count: responses without rows left out and without truncated completions.
      correction: of every token, as far as it does not depend on the present policy.
      weights: of the tokens that the correction does not reject, in the policy loss.
      value_weights: of the mean over all tokens that count. distill_weights: over all tokens of the responses, for
        distillation needs no reward.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    correction: CorrectionTerms
    weights: Float[Array, "batch R"]
    value_weights: Float[Array, "batch R"]
    distill_weights: Float[Array, "batch R"]


@any_leaves
class TokenTerms(struct.PyTreeNode):
    """Per-token results of the forward passes, `[batch, R]`, kept for the metrics."""

    logprobs: Float[Array, "batch R"]
    entropy: Float[Array, "batch R"]
    loss: LossTerms
    correction_weights: Float[Array, "batch R"]
    values_clipped: Bool[Array, "batch R"] | None
    agreement: Agreement | None


Update = Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]
ReplayFunction = Callable[[Params, Trajectory], Array]  # gives log-probabilities [batch, R]


def init_state(
    params: Params, optimizer: optax.GradientTransformation, key: Key[Array, ""], reference: Params | None = None
) -> TrainState:
    """A state at step 0. The reference is copied, so that it may be `params` themselves: a step donates both."""
    reference = jax.tree.map(jnp.copy, reference)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), reference, key)


def make_update(model: LanguageModel, optimizer: optax.GradientTransformation, config: UpdateConfig) -> Update:
    """The jitted step `(state, batch) -> (state, metrics)`; the old state's buffers are donated.

    Run it under `jax.set_mesh(mesh)` with state and batch placed by `smd_jax.sharding`, or without a mesh.

    The returned function raises ValueError for a trajectory whose probabilities no learner can reproduce (greedy
    sampling), rows that do not divide into microbatches, and what is missing: a reference, or a critic's head or
    targets.
    """

    def update(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        check_replayable(batch.trajectory)
        check_reference(config, state)
        prepared = prepare(model, config, state.params, batch)
        count = count_parts(batch.advantages.shape[0], config.microbatch_size)
        objective = _objective(model, config, state)
        loss, grads, sums, terms = accumulate(objective, state.params, prepared, count)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = constrain_tree(optax.apply_updates(state.params, updates))
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **sums, **_metrics(config, prepared, terms)}
        if config.loss.beta:
            metrics["kl"] = token_mean(terms.loss.kl, prepared.correction.counted)
        if config.distill is not None:
            metrics["distill_coef"] = config.distill.coef_at(state.step)
        if terms.agreement is not None:
            metrics["distill/agreement_p5"] = lower_percentile(terms.agreement.overlap, terms.agreement.inside, 5.0)
        if config.value is not None:
            metrics["val/clipfrac_avg"] = token_mean(terms.values_clipped, prepared.mask)
        return state.replace(step=state.step + 1, params=params, opt_state=constrain_tree(opt_state)), metrics

    return jax.jit(update, donate_argnums=0)


def make_replay(model: LanguageModel, visibility: Visibility, microbatch_size: int | None = None) -> ReplayFunction:
    """The jitted `(params, trajectory) -> logprobs [batch, R]`: an extra forward pass, for a learner that is not the
    sampler and takes several steps per rollout. `microbatch_size` as in UpdateConfig."""

    def logprobs(params: Params, trajectory: Trajectory) -> Array:
        return learner_logprobs(model, params, trajectory, visibility, microbatch_size)

    return jax.jit(logprobs)


def learner_logprobs(
    model: LanguageModel, params: Params, trajectory: Trajectory, visibility: Visibility, microbatch_size: int | None
) -> Float[Array, "batch R"]:
    """Of the response tokens, in as many passes as there are microbatches."""

    def of(part: Trajectory) -> Array:
        return replay(model, params, part, learner_mask(part, visibility)).logprobs

    return in_parts(of, trajectory, count_parts(trajectory.tokens.shape[0], microbatch_size))


def learner_mask(trajectory: Trajectory, visibility: Visibility) -> Mask:
    """What the learner's queries see."""
    return trajectory.mask if visibility == "shadow" else trajectory.dense_mask()


def counted_tokens(
    config: UpdateConfig, trajectory: Trajectory, counted_rows: Bool[Array, " batch"] | None
) -> Bool[Array, "batch R"]:
    """The response tokens that a step learns from; `counted_rows` as in TrainBatch."""
    mask = trajectory.response_mask
    if config.mask_truncated_completions:
        mask = mask_truncated_completions(mask, trajectory.terminated)
    return mask if counted_rows is None else mask & counted_rows[:, None]


def prepare(model: LanguageModel, config: UpdateConfig, params: Params, batch: TrainBatch) -> Prepared:
    """Corrects the whole batch, and weighs its tokens; an extra forward pass where the correction needs one."""
    trajectory = batch.trajectory
    mask = counted_tokens(config, trajectory, batch.counted_rows)
    early = split_by_time(config.correction)[0]
    if early.traits.uses_mismatch and batch.old_logprobs is None:
        present = learner_logprobs(model, params, trajectory, config.visibility, config.microbatch_size)
        batch = batch.replace(old_logprobs=jax.lax.stop_gradient(present))
    correction = early.terms(correction_inputs(batch, mask))
    return Prepared(
        batch,
        mask,
        correction,
        weights=config.loss.weighting.weights(correction.counted, batch.counted_rows),
        value_weights=TokenMean().weights(mask),
        distill_weights=TokenMean().weights(trajectory.response_mask),
    )


def correction_inputs(
    batch: TrainBatch, mask: Bool[Array, "batch R"], logprobs: Float[Array, "batch R"] | None = None
) -> CorrectionInputs:
    """What a correction looks at; `logprobs` of the learner now, once they are known."""
    sampler = batch.trajectory.logprobs
    old = sampler if batch.old_logprobs is None else batch.old_logprobs
    return CorrectionInputs(sampler, old, logprobs, batch.advantages, mask)


def takes_sampler_for_old(config: UpdateConfig) -> bool:
    """Whether the log-probabilities that the sampler recorded stand for the learner's at the rollout's parameters.

    With shadow masks the two are the same, unless a correction is to measure that they are.
    """
    return config.visibility == "shadow" and not config.correction.traits.uses_mismatch


def check_rows_of(config: UpdateConfig, rows: int, columns: int) -> None:
    """Raises ValueError for a minibatch of `rows` responses of `columns` tokens that the configuration cannot split."""
    part = rows // count_parts(rows, config.microbatch_size)
    if config.distill is not None:
        teacher_rows(part, config.distill.fraction)
        teacher_positions(columns, config.distill.position_fraction)


def check_reference(config: UpdateConfig, state: TrainState) -> None:
    """Raises ValueError if the state lacks the reference parameters that the configuration asks for."""
    if config.needs_reference and state.reference is None:
        raise ValueError("expected reference parameters in the train state (beta > 0 or direction 'anchor'); got None")


def _objective(model: LanguageModel, config: UpdateConfig, state: TrainState) -> Objective:
    """The loss of one microbatch as a function of the parameters."""
    late = split_by_time(config.correction)[1]

    def objective(params: Params, part: Prepared) -> tuple[Array, tuple[Metrics, TokenTerms]]:
        trajectory = part.batch.trajectory

        # Logits are large and cheap: recompute them in the backward pass instead of keeping them.
        @jax.checkpoint
        def policy_terms(params: Params, hidden: Array) -> Any:
            return replay_logits(response_logits(model, params, hidden, trajectory), trajectory)

        hidden = response_hidden(model, params, trajectory, learner_mask(trajectory, config.visibility))
        scores = policy_terms(params, hidden)
        weights = part.correction.weights
        if late is not None:
            present = jax.lax.stop_gradient(scores.logprobs)
            weights = weights * _late_weights(late, correction_inputs(part.batch, part.mask, present))
        inputs = LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=_ratio_to_logprobs(config.correction, part.batch, scores.logprobs),
            reference_logprobs=_reference_logprobs(model, config, state, trajectory),
            advantages=part.batch.advantages,
            weights=part.weights,
            correction_weights=weights,
            high_scale=part.correction.high_scale,
        )
        loss, terms = policy_loss(inputs, policy_loss_of(config))
        loss, sums, values_clipped, agreement = config.policy_coef * loss, {}, None, None
        if config.distill is not None:
            second = (model, config.distill, params, state.reference, state.step)
            sums["distill"], agreement = distill_term(*second, trajectory, hidden, part.distill_weights)
            loss = loss + config.distill.coef_at(state.step) * sums["distill"]
        if config.value is not None:
            sums["loss/value_avg"], values_clipped = _value_loss(config.value, params, hidden, part)
            loss = loss + config.value.coef * sums["loss/value_avg"]
        kept = TokenTerms(scores.logprobs, scores.entropy, terms, weights, values_clipped, agreement)
        return loss, jax.lax.stop_gradient((sums, kept))

    return objective


def policy_loss_of(config: UpdateConfig) -> LossConfig:
    """The policy loss, without its clipping where the correction brings a trust region of its own."""
    return config.loss if config.correction.traits.clips else config.loss.unclipped()


def _value_loss(
    config: ValueConfig, params: Params, hidden: Float[Array, "batch R hidden"], part: Prepared
) -> tuple[Float[Array, ""], Bool[Array, "batch R"]]:
    """Of all tokens that count: what a correction does to the policy's loss is no business of the critic's."""
    batch = part.batch
    if batch.old_values is None or batch.returns is None:
        raise ValueError("expected old_values and returns in the batch for the value loss, as PPOLoop puts; got None")
    return value_loss(values(params, hidden), batch.old_values, batch.returns, part.value_weights, config)


def _late_weights(late: Correction, inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    """Of a correction that looks at the present policy; what it rejects weighs 0."""
    terms = late.terms(inputs)
    if terms.high_scale is not None:
        raise ValueError(f"expected no high_scale from a correction that looks at the present policy; got {late}")
    return jnp.where(terms.counted, terms.weights, 0.0)


def _ratio_to_logprobs(
    correction: Correction, batch: TrainBatch, logprobs: Float[Array, "batch R"]
) -> Float[Array, "batch R"]:
    """Of the policy that the ratio is taken to."""
    if correction.traits.ratio_to == "sampler":
        return batch.trajectory.logprobs
    return jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs


def _reference_logprobs(
    model: LanguageModel, config: UpdateConfig, state: TrainState, trajectory: Trajectory
) -> Float[Array, "batch R"] | None:
    if config.loss.beta == 0 or state.reference is None:
        return None
    mask = learner_mask(trajectory, config.reference_visibility or config.visibility)
    return jax.lax.stop_gradient(replay(model, state.reference, trajectory, mask).logprobs)


def _metrics(config: UpdateConfig, prepared: Prepared, terms: TokenTerms) -> Metrics:
    """Token means over the response, and how far the learner is from the sampler."""
    mask = prepared.mask
    counted = prepared.correction.counted
    sampler = prepared.batch.trajectory.logprobs
    return {
        "entropy": token_mean(terms.entropy, mask),
        **surrogate_metrics(terms.loss, counted, config.loss, prepared.batch.counted_rows),
        **mismatch_metrics(sampler, terms.logprobs, mask),
        **chi2_metrics(sampler, terms.logprobs, mask),
        **correction_metrics(terms.correction_weights, counted, mask),
    }
