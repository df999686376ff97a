"""The jitted train step of online DPO. It sees pairs of trajectories, never the eviction policy that made them.

once per step:         weight of every pair in the loss
for every microbatch:  policy and reference forward under the learner's mask ─► loss of whole pairs ─► gradients, summed
once per step:         optimizer ─► new parameters (─► new reference), metrics

Log-probabilities are at the sampler's temperature; TRL's are at temperature 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.learner.accumulation import accumulate, count_parts
from smd_jax.learner.forward import Visibility, check_replayable, learner_mask, replay
from smd_jax.learner.state import Metrics, TrainState, check_parts, of_trained, reference_params, trained_params
from smd_jax.learner.step import ReferenceSync, take_step
from smd_jax.losses.dpo import DPOConfig, DPOInputs, dpo_loss, dpo_metrics, pair_weights, sequence_logprobs
from smd_jax.losses.kl import k3
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics, step_weights, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import any_leaves
from smd_jax.typed_fields import check_types


@dataclass(frozen=True, kw_only=True)
class DPOUpdateConfig:
    """One optimizer step.

    Attributes:
      visibility: "shadow" replays the sampler's mask in the learner, so that both are one policy; "dense" trains the
        full-context policy on the sparse sampler's pairs, without a correction.
      loss: the preference loss.
      microbatch_size: pairs of one forward and backward pass, each of them two rows; gradients are summed over
        microbatches, in float32 or wider. None: all pairs.
      reference_sync: how the reference follows the policy (TR-DPO); None: it is frozen.
    """

    visibility: Visibility = "shadow"
    loss: DPOConfig = DPOConfig()
    microbatch_size: int | None = None
    reference_sync: ReferenceSync | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"expected microbatch_size >= 1; got {self.microbatch_size}")


@any_leaves
class PairBatch(struct.PyTreeNode):
    """The data of one step. Pairs are the leading axis of every leaf, so that no split separates the two of a pair.

    Attributes:
      chosen, rejected: `[pairs, ...]`, both of one prompt.
      signal: `[pairs]`, false for pairs of equal rewards, which weigh nothing.
    """

    chosen: Trajectory
    rejected: Trajectory
    signal: Bool[Array, " pairs"]


DPOUpdate = Callable[[TrainState, PairBatch], tuple[TrainState, Metrics]]


def make_dpo_update(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    config: DPOUpdateConfig,
    max_difference: float | None = None,
) -> DPOUpdate:
    """The jitted step `(state, batch) -> (state, metrics)`; the old state's buffers are donated. `max_difference` is as
    in `smd_jax.learner.update.make_update`. A batch without counted pairs changes no parameter.

    Run it under `jax.set_mesh(mesh)` with state and batch placed by `smd_jax.devices.sharding`, or without a mesh.

    The returned function raises ValueError for greedily sampled trajectories, pairs that do not divide into
    microbatches, and a missing reference.

    Raises:
      TypeError: for a model that is no LanguageModel, and an optimizer or a config of another class.
    """
    check_parts(model, optimizer, config, DPOUpdateConfig)

    def update(state: TrainState, batch: PairBatch) -> tuple[TrainState, Metrics]:
        check_replayable(batch.chosen)
        check_replayable(batch.rejected)
        check_reference(state)
        # A response without tokens makes no pair.
        complete = batch.chosen.response_mask.any(axis=1) & batch.rejected.response_mask.any(axis=1)
        weights = pair_weights(batch.signal & complete)
        count = count_parts(batch.signal.shape[0], config.microbatch_size, "pairs")
        objective = of_trained(functools.partial(_objective, model, config, state), state.params)
        loss, grads, _, (tokens, pairs) = accumulate(objective, trained_params(state.params), (batch, weights), count)
        rows = _rows(batch)
        logprobs, entropy, kl = map(_merged, tokens)
        metrics = {
            **dpo_metrics(pairs, weights),
            # Means over the tokens of all responses.
            "kl": token_mean(kl, rows.response_mask),
            "entropy": token_mean(entropy, rows.response_mask),
            **sampler_learner_metrics(rows.logprobs, logprobs, rows.response_mask),
        }
        is_finite = jnp.isfinite(loss)
        if max_difference is not None:
            is_finite &= metrics["sampling/sampling_logp_difference/max"] <= max_difference
        learns = (weights > 0).any()
        new_state, of_step = take_step(
            state, optimizer, grads, config.reference_sync, is_finite=is_finite, learns=learns
        )
        return new_state, {"loss": loss, **of_step, **metrics, **step_weights(rows.response_mask, (weights > 0).sum())}

    # Donated: the new state overwrites the old one, which would otherwise double the memory.
    return jax.jit(update, donate_argnums=0)


def check_reference(state: TrainState) -> None:
    """Raises ValueError for a state without reference parameters."""
    if reference_params(state) is None:
        raise ValueError(
            "expected reference parameters in the train state, because DPO's reward is a ratio to them; got None"
        )


def _rows(batch: PairBatch) -> Trajectory:
    """Both responses of every pair, `[2 * pairs, ...]`: chosen, rejected, chosen, … so no rows move between devices."""
    return _merged(jax.tree.map(lambda *both: jnp.stack(both, axis=1), batch.chosen, batch.rejected))


def _merged(tree: Any) -> Any:
    """`[pairs, 2, ...]` -> `[2 * pairs, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _paired(x: Array) -> Array:
    """`[2 * pairs, ...]` -> `[pairs, 2, ...]`."""
    return x.reshape(-1, 2, *x.shape[1:])


def _objective(
    model: LanguageModel,
    config: DPOUpdateConfig,
    state: TrainState,
    params: Params,
    part: tuple[PairBatch, Float[Array, " pairs"]],
) -> tuple[Array, tuple[Any, Any]]:
    """The loss of pairs with their weights in the whole batch. For the metrics also log-probabilities, entropies and KL
    of both responses, `[pairs, 2, R]`, the chosen first; and the terms of the pairs."""
    batch, weights = part
    rows = _rows(batch)
    seen = learner_mask(rows, config.visibility)
    learner = replay(model, params, rows, seen)
    # The reference comes from the state, not from the differentiated argument.
    reference = jax.lax.stop_gradient(replay(model, reference_params(state), rows, seen).logprobs)
    # Index 0 of a pair is the chosen response, as in `_rows`.
    policy, frozen = (_paired(sequence_logprobs(x, rows.response_mask)) for x in (learner.logprobs, reference))
    loss, pairs = dpo_loss(DPOInputs(policy[:, 0], policy[:, 1], frozen[:, 0], frozen[:, 1], weights), config.loss)
    tokens = tuple(map(_paired, (learner.logprobs, learner.entropy, k3(learner.logprobs, reference))))
    return loss, jax.lax.stop_gradient(((), (tokens, pairs)))
