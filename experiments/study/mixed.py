"""Two learners on one set of weights: the shadow policy gradient, and that of a dense learner with its correction.

    loss = (1 - share) * loss(shadow masks, exact) + share * loss(full context, TIS)

Replay is exact for the policy that samples, and learns its guesses about what is gone; the corrected dense learner
looks at the same rollout as an oracle. Each is prepared for itself, with a forward pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import jax

import smd_jax as smd
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.objective import TokenTerms, make_objective
from smd_jax.learner.prepare import Prepared, prepare
from smd_jax.learner.state import Metrics, TrainBatch, TrainState
from smd_jax.learner.step import take_step
from smd_jax.learner.update import Update
from smd_jax.metrics import correction_metrics, sampler_learner_metrics, token_mean
from smd_jax.model.protocol import Params


class MixedBatch(TrainBatch):
    """What one step learns from.

    Attributes:
      dense_old_logprobs: `[batch, R]`, of the dense policy at the rollout's parameters; None: at the present ones.
    """

    dense_old_logprobs: jax.Array | None = None


@dataclass(frozen=True)
class MixedLoop(smd.GRPOLoop):
    """GRPO whose optimizer steps take both gradients.

    Attributes:
      dense: what the dense learner does; the other's configuration is `config.update`.
      share: of the dense learner's loss, from 0 to 1.
    """

    dense: UpdateConfig = field(kw_only=True)
    share: float = field(kw_only=True)

    @cached_property
    def dense_replay(self) -> ReplayFunction:
        """The dense policy's log-probabilities of a rollout."""
        return make_replay(
            self.model, self.dense.visibility, self.config.completions_per_step // self.config.minibatches
        )

    def _batch(
        self, params: Params, trajectory: smd.Trajectory, advantages: jax.Array, counted_rows: jax.Array | None
    ) -> MixedBatch:
        # A single step is taken at the rollout's parameters, where it finds the log-probabilities itself.
        later = self.config.steps_per_rollout > 1
        old = self.dense_replay(params, trajectory) if later else None
        return MixedBatch(
            trajectory, advantages, self.old_logprobs(params, trajectory), counted_rows, dense_old_logprobs=old
        )

    @cached_property
    def update(self) -> Update:
        model, optimizer, shadow, dense, share = self.model, self.optimizer, self.config.update, self.dense, self.share

        def update(state: TrainState, batch: MixedBatch) -> tuple[TrainState, Metrics]:
            # The old log-probabilities of the batch are the sampler's; the dense learner has its own.
            of_dense = batch.replace(old_logprobs=batch.dense_old_logprobs)
            parts = prepare(model, shadow, state.params, batch), prepare(model, dense, state.params, of_dense)
            ours, theirs = make_objective(model, shadow, state), make_objective(model, dense, state)

            def objective(params: Params, parts: tuple[Prepared, Prepared]) -> tuple[jax.Array, TokenTerms]:
                exact, (_, terms) = ours(params, parts[0])
                corrected, _ = theirs(params, parts[1])
                return (1 - share) * exact + share * corrected, terms

            (loss, terms), grads = jax.value_and_grad(objective, has_aux=True)(state.params, parts)
            new_state, of_step = take_step(state, optimizer, grads)
            mask = parts[0].mask
            counted = parts[0].correction.counted
            metrics = {"entropy": token_mean(terms.entropy, mask)}
            metrics |= sampler_learner_metrics(batch.trajectory.logprobs, terms.logprobs, mask)
            metrics |= correction_metrics(terms.correction_weights, counted, mask)
            return new_state, {"loss": loss} | of_step | metrics

        return jax.jit(update, donate_argnums=0)
