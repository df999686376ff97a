"""The jitted train step. It sees a Trajectory and advantages, never the policy that made them.

for every microbatch:  learner forward under the mask ─► policy loss (+ distillation) ─► gradients, summed
once per step:         optimizer ─► new parameters, metrics
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.distillation import DistillConfig
from smd_jax.learner import check_replayable, response_hidden, response_logits, score, score_logits
from smd_jax.losses import LossConfig, LossInputs, LossTerms, policy_loss, token_weights
from smd_jax.masks import Mask
from smd_jax.metrics import mismatch_metrics
from smd_jax.model import Decoder, Params
from smd_jax.second_track import distill_term
from smd_jax.sharding import constrain_tree
from smd_jax.trajectory import Trajectory

Metrics = dict[str, Array]


@dataclass(frozen=True)
class UpdateConfig:
    """One optimizer step.

    Attributes:
      visibility: "shadow" replays the sampler's mask in the learner, so that both are one policy; "dense" trains the
        full-context policy on the sparse sampler's tokens, as if nothing had been evicted.
      loss: the policy loss. distill: the second track, or None.
      microbatch_size: rows of one forward and backward pass; gradients are summed over microbatches, in float32 or
        wider. None: all rows.
    """

    visibility: Literal["shadow", "dense"] = "shadow"
    loss: LossConfig = LossConfig()
    distill: DistillConfig | None = None
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"expected microbatch_size >= 1; got {self.microbatch_size}")
        if self.distill is not None and self.visibility == "dense":
            raise ValueError("expected visibility 'shadow' with distillation, whose student is masked; got 'dense'")

    @property
    def needs_reference(self) -> bool:
        """Whether the train state must carry reference parameters."""
        return self.loss.beta > 0 or (self.distill is not None and self.distill.direction == "anchor")


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
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


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class TrainBatch(struct.PyTreeNode):
    """What one step learns from.

    Attributes:
      trajectory: `[batch, ...]`.
      advantages: `[batch]`.
      old_logprobs: `[batch, R]` of the policy that the ratio is taken to; None: the present one, the ratio starts at 1.
    """

    trajectory: Trajectory
    advantages: Float[Array, " batch"]
    old_logprobs: Float[Array, "batch R"] | None


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class TokenTerms(struct.PyTreeNode):
    """Per-token results of the forward passes, `[batch, R]`, kept for the metrics."""

    logprobs: Float[Array, "batch R"]
    entropy: Float[Array, "batch R"]
    loss: LossTerms


def init_state(
    params: Params, optimizer: optax.GradientTransformation, key: Key[Array, ""], reference: Params | None = None
) -> TrainState:
    """A state at step 0. The reference is copied, so that it may be `params` themselves: a step donates both."""
    reference = jax.tree.map(jnp.copy, reference)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), reference, key)


def make_update(
    model: Decoder, optimizer: optax.GradientTransformation, config: UpdateConfig
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]:
    """The jitted step `(state, batch) -> (state, metrics)`; the old state's buffers are donated.

    Run it under `jax.set_mesh(mesh)` with state and batch placed by `smd_jax.sharding`, or without a mesh.

    The returned function raises ValueError for a trajectory whose probabilities no learner can reproduce (top-k, top-p
    or greedy sampling), rows that do not divide into microbatches, and a reference that is missing.
    """

    def update(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        _check(state, batch, config)
        weights = token_weights(batch.trajectory.response_mask, config.loss.loss_type)
        loss, grads, terms, distill = _accumulate(model, config, state, batch, weights)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = constrain_tree(optax.apply_updates(state.params, updates))
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **_metrics(batch.trajectory, terms)}
        if config.loss.beta:
            metrics["kl"] = _token_mean(terms.loss.kl, batch.trajectory.response_mask)
        if config.distill is not None:
            metrics["distill"] = distill
        return state.replace(step=state.step + 1, params=params, opt_state=constrain_tree(opt_state)), metrics

    return jax.jit(update, donate_argnums=0)


def make_score(model: Decoder, visibility: Literal["shadow", "dense"]) -> Callable[[Params, Trajectory], Array]:
    """The jitted `(params, trajectory) -> logprobs [batch, R]`: an extra forward pass, for a learner that is not the
    sampler and takes several steps per rollout."""

    def logprobs(params: Params, trajectory: Trajectory) -> Array:
        return score(model, params, trajectory, learner_mask(trajectory, visibility)).logprobs

    return jax.jit(logprobs)


def learner_mask(trajectory: Trajectory, visibility: Literal["shadow", "dense"]) -> Mask:
    """What the learner's queries see."""
    return trajectory.mask if visibility == "shadow" else trajectory.dense_mask()


def _check(state: TrainState, batch: TrainBatch, config: UpdateConfig) -> None:
    check_replayable(batch.trajectory)
    rows, micro = batch.advantages.shape[0], config.microbatch_size
    if micro is not None and rows % micro:
        raise ValueError(f"expected rows that divide into microbatches of {micro}; got {rows} rows")
    if config.needs_reference and state.reference is None:
        raise ValueError("expected reference parameters in the train state (beta > 0 or direction 'anchor'); got None")


def _accumulate(
    model: Decoder, config: UpdateConfig, state: TrainState, batch: TrainBatch, weights: Float[Array, "batch R"]
) -> tuple[Array, Params, TokenTerms, Array]:
    """Loss, gradients, per-token terms and divergence of the batch, microbatch by microbatch."""
    rows = batch.advantages.shape[0]
    count = rows // (config.microbatch_size or rows)

    def of(part: tuple[TrainBatch, Array]) -> tuple[tuple[Array, Array], TokenTerms, Params]:
        objective = _objective(model, config, state, *part)
        (loss, (distill, terms)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        return (loss, distill), terms, grads

    if count == 1:
        (loss, distill), terms, grads = of((batch, weights))
        return loss, grads, terms, distill

    def one(carry: tuple[Any, Params], part: tuple[TrainBatch, Array]) -> tuple[tuple[Any, Params], TokenTerms]:
        sums, terms, grads = of(part)
        return jax.tree.map(jnp.add, carry, (sums, grads)), terms

    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), state.params)
    zeros = ((jnp.zeros(()), jnp.zeros(())), wide)
    ((loss, distill), grads), terms = jax.lax.scan(one, zeros, _split((batch, weights), count))
    return loss, grads, jax.tree.map(_merge, terms), distill


def _split(tree: Any, count: int) -> Any:
    """`[batch, ...]` -> `[count, batch / count, ...]`: microbatch i takes rows i, i + count, …, so that every
    microbatch has rows of every device and nothing moves between them."""
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), tree)


def _merge(x: Array) -> Array:
    """The inverse of `_split`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _objective(
    model: Decoder, config: UpdateConfig, state: TrainState, batch: TrainBatch, weights: Float[Array, "batch R"]
) -> Callable[[Params], tuple[Array, tuple[Array, TokenTerms]]]:
    """The loss of one microbatch as a function of the parameters."""
    trajectory = batch.trajectory

    # Logits are large and cheap: recompute them in the backward pass instead of keeping them.
    @jax.checkpoint
    def policy_terms(params: Params, hidden: Array) -> Any:
        return score_logits(response_logits(model, params, hidden, trajectory.temperature), trajectory)

    def objective(params: Params) -> tuple[Array, tuple[Array, TokenTerms]]:
        hidden = response_hidden(model, params, trajectory, learner_mask(trajectory, config.visibility))
        scores = policy_terms(params, hidden)
        inputs = LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=jax.lax.stop_gradient(scores.logprobs) if batch.old_logprobs is None else batch.old_logprobs,
            reference_logprobs=_reference_logprobs(model, config, state, trajectory),
            advantages=batch.advantages,
            weights=weights,
        )
        loss, terms = policy_loss(inputs, config.loss)
        distill = jnp.zeros(())
        if config.distill is not None:
            distill = distill_term(
                model, config.distill, params, state.reference, state.step, trajectory, hidden, weights
            )
            loss = loss + config.distill.coef_at(state.step) * distill
        kept = jax.lax.stop_gradient((distill, TokenTerms(scores.logprobs, scores.entropy, terms)))
        return loss, kept

    return objective


def _reference_logprobs(
    model: Decoder, config: UpdateConfig, state: TrainState, trajectory: Trajectory
) -> Float[Array, "batch R"] | None:
    if config.loss.beta == 0 or state.reference is None:
        return None
    mask = learner_mask(trajectory, config.visibility)
    return jax.lax.stop_gradient(score(model, state.reference, trajectory, mask).logprobs)


def _metrics(trajectory: Trajectory, terms: TokenTerms) -> Metrics:
    """Token means over the response, and how far the learner is from the sampler."""
    mask = trajectory.response_mask
    low, high = _token_mean(terms.loss.clipped_low, mask), _token_mean(terms.loss.clipped_high, mask)
    return {
        "entropy": _token_mean(terms.entropy, mask),
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        **mismatch_metrics(trajectory.logprobs, terms.logprobs, mask),
    }


def _token_mean(x: Array, mask: Bool[Array, "batch R"]) -> Array:
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(mask.sum(), 1)
