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
from smd_jax.learner.objective import TokenTerms, make_objective
from smd_jax.learner.prepare import Prepared, prepare
from smd_jax.learner.state import Metrics, TrainBatch, TrainState
from smd_jax.learner.step import take_step
from smd_jax.learner.update import Update
from smd_jax.metrics import correction_metrics, sampler_learner_metrics, token_mean
from smd_jax.model.protocol import Params


@dataclass(frozen=True)
class MixedLoop(smd.GRPOLoop):
    """GRPO whose one optimizer step a rollout takes both gradients.

    Attributes:
      dense: what the dense learner does; the other's configuration is `config.update`.
      share: of the dense learner's loss, from 0 to 1.
    """

    dense: UpdateConfig = field(kw_only=True)
    share: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.steps_per_rollout != 1:
            # Later steps would need the dense policy's log-probabilities from before the first.
            raise ValueError(f"expected one optimizer step a rollout; got {self.config.steps_per_rollout}")

    @cached_property
    def update(self) -> Update:
        model, optimizer, shadow, dense, share = self.model, self.optimizer, self.config.update, self.dense, self.share

        def update(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
            # The old log-probabilities of the batch are the sampler's; the dense learner has its own.
            of_dense = batch.replace(old_logprobs=None)
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
