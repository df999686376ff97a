"""What must be known of a whole minibatch before it is split: the correction, and the weight of every token.

Weights have denominators, such as the tokens of the minibatch, and a correction may divide by a mean over it. Made from
a microbatch they would depend on its size.
"""

from __future__ import annotations

import jax
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.corrections.base import CorrectionInputs, CorrectionTerms
from smd_jax.corrections.chain import split_by_time
from smd_jax.learner.config import UpdateConfig, takes_sampler_for_old
from smd_jax.learner.evictions import recorded_draws
from smd_jax.learner.forward import learner_replay
from smd_jax.learner.state import TrainBatch
from smd_jax.losses.entropy import high_entropy_tokens
from smd_jax.losses.evictions import eviction_weights
from smd_jax.losses.policy import mask_truncated_completions
from smd_jax.losses.weighting import TokenMean
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import any_leaves


@any_leaves
class Prepared(struct.PyTreeNode):
    """A batch with what must be known of all its rows before it is split; `[batch, R]`.

    Attributes:
      batch: as it came, with the old log-probabilities that the correction asked for.
      mask: tokens that count: responses without rows left out and without truncated completions.
      correction: what happens to every token, as far as it does not depend on the present policy.
      weights: weights in the policy loss, of the tokens that the correction does not reject.
      value_weights: weights in the value loss, a mean over all tokens that count.
      distill_weights: weights in the distillation, a mean over all tokens of the responses, because it needs no reward.
      chosen: tokens that the policy loss learns from, by their entropy; None: all.
      entropy_weights: weights of the entropies in the bonus, a mean over the tokens that are chosen; None: no bonus.
      dense: the same for the dense learner on the same weights; None without one.
      eviction_weights: `[batch, compressions]` weights of the evictions' log-probabilities; None: nobody trains them.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    correction: CorrectionTerms
    weights: Float[Array, "batch R"]
    value_weights: Float[Array, "batch R"]
    distill_weights: Float[Array, "batch R"]
    chosen: Bool[Array, "batch R"] | None
    entropy_weights: Float[Array, "batch R"] | None
    dense: Prepared | None
    eviction_weights: Float[Array, "batch compressions"] | None


def prepare(model: LanguageModel, config: UpdateConfig, params: Params, batch: TrainBatch) -> Prepared:
    """Corrects the whole batch, and weighs its tokens; an extra forward pass where correction or entropies need one."""
    trajectory = batch.trajectory
    mask = counted_tokens(config, trajectory, batch.counted_rows)
    early = split_by_time(config.correction)[0]
    needs_logprobs = early.traits.uses_mismatch and batch.old_logprobs is None
    entropy = _known_entropy(config, trajectory)
    if needs_logprobs or (entropy is None and config.top_entropy_quantile < 1):
        # In microbatches, as the update itself: this pass must not need more memory than that one.
        sizes = config.microbatch_size, config.rows_per_prompt
        present = learner_replay(model, params, trajectory, config.visibility, *sizes)
        present = jax.lax.stop_gradient(present)
        entropy = present.entropy if entropy is None else entropy
        batch = batch.replace(old_logprobs=present.logprobs) if needs_logprobs else batch
    chosen = None
    if config.top_entropy_quantile < 1:
        assert entropy is not None
        chosen = high_entropy_tokens(entropy, mask, config.top_entropy_quantile)
    correction = early.terms(correction_inputs(batch, mask))
    dense = None
    if config.of_dense_learner is not None:
        of_dense = batch.replace(old_logprobs=batch.dense_old_logprobs)
        dense = prepare(model, config.of_dense_learner, params, of_dense)
    # Rejected tokens leave the policy loss and its denominators. The critic and distillation keep them.
    return Prepared(
        batch,
        mask,
        correction,
        weights=config.loss.weighting.weights(correction.counted, batch.counted_rows),
        value_weights=TokenMean().weights(mask),
        distill_weights=TokenMean().weights(trajectory.response_mask),
        chosen=chosen,
        entropy_weights=TokenMean().weights(mask if chosen is None else chosen) if config.entropy_coef else None,
        dense=dense,
        eviction_weights=_eviction_weights(trajectory, mask) if config.eviction_coef else None,
    )


def _eviction_weights(trajectory: Trajectory, mask: Bool[Array, "batch R"]) -> Float[Array, "batch compressions"]:
    draws = recorded_draws(trajectory)[1]
    return eviction_weights(draws.trained(trajectory.valid), mask)


def _known_entropy(config: UpdateConfig, trajectory: Trajectory) -> Float[Array, "batch R"] | None:
    """The entropies that the sampler recorded, if it stands for the learner. With several steps a rollout they are
    those before the first: what a token was to the policy that drew it."""
    return trajectory.entropy if takes_sampler_for_old(config) else None


def counted_tokens(
    config: UpdateConfig, trajectory: Trajectory, counted_rows: Bool[Array, " batch"] | None
) -> Bool[Array, "batch R"]:
    """The response tokens that a step learns from; `counted_rows` as in TrainBatch."""
    mask = trajectory.response_mask
    if config.mask_truncated_completions:
        mask = mask_truncated_completions(mask, trajectory.terminated)
    return mask if counted_rows is None else mask & counted_rows[:, None]


def correction_inputs(
    batch: TrainBatch, mask: Bool[Array, "batch R"], logprobs: Float[Array, "batch R"] | None = None
) -> CorrectionInputs:
    """What a correction looks at; `logprobs` of the learner now, once they are known."""
    sampler = batch.trajectory.logprobs
    old = sampler if batch.old_logprobs is None else batch.old_logprobs
    return CorrectionInputs(sampler, old, logprobs, batch.advantages, mask)
