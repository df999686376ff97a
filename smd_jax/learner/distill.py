"""Distillation term: the forward pass of the dense teacher, and the divergence."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.learner.forward import response_hidden, response_logits
from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import LearnerSetup, Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.distillation import REFERENCE_TEACHERS, DistillConfig, divergence
from smd_jax.losses.weighting import TokenMean
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.ratios import lower_percentile, overlap


@dataclass(frozen=True)
class DistillTerm(Term):
    """Divergence between the dense and the masked policy, a mean over all response tokens. It uses no reward."""

    config: DistillConfig = DistillConfig()

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.config.direction in REFERENCE_TEACHERS)

    def check(self, setup: LearnerSetup) -> None:
        config = self.config
        # A dense student cannot learn from the dense policy itself.
        if setup.visibility == "dense" and config.direction not in REFERENCE_TEACHERS:
            raise ValueError(
                "expected visibility 'shadow' with distillation whose teacher is the dense policy itself, or a "
                f"direction of {REFERENCE_TEACHERS}; got {setup.shown_visibility} with {config}"
            )
        if setup.reference_sync is not None and config.direction == "anchor":
            raise ValueError(
                "expected reference_sync None with distillation from the 'anchor', which is frozen; the direction "
                f"'ema' has a moving teacher; got {setup.reference_sync}"
            )
        if setup.reference_sync is None and config.direction == "ema":
            raise ValueError(
                "expected a reference_sync with direction 'ema', whose teacher moves with the policy; got None"
            )

    def coefficient(self, step: Int[Array, ""]) -> float:
        return self.config.coef

    def prepare(self, minibatch: Minibatch) -> Float[Array, "batch R"]:
        return TokenMean().weights(minibatch.trajectory.response_mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        loss, overlaps = distill_term(
            inputs.model,
            self.config,
            inputs.params,
            inputs.reference,
            inputs.trajectory,
            inputs.hidden,
            inputs.prepared,
        )
        # Logged as a divergence in nats, without its coefficient.
        return TermOutputs(loss, {"distill": loss}, overlaps)

    def metrics(self, results: TermResults) -> Metrics:
        return {"distill/agreement_p5": lower_percentile(results.rows, results.prepared > 0, 5.0)}

    def learns(self, results: TermResults) -> Bool[Array, ""]:
        return (results.prepared > 0).any() & (self.config.coef > 0)


def distill_term(
    model: LanguageModel,
    config: DistillConfig,
    params: Params,
    reference: Params | None,
    trajectory: Trajectory,
    hidden: Float[Array, "batch R hidden"],
    weights: Float[Array, "batch R"],
) -> tuple[Float[Array, ""], Float[Array, "batch R"]]:
    """`sum(weights * D)` over a microbatch, in nats, without the coefficient; and the agreement of teacher and student:
    1 - TV of their next-token distributions, exact over the drawable tokens, without gradient.

    Args:
      params: parameters of the policy, with a gradient, also through `hidden`.
      hidden: states that predict the response tokens under the student's mask.
      reference: parameters of the reference policy; None unless the direction is "anchor" or "ema".
      weights: weight of each token in the loss, 0 outside the response.
    """
    teacher = reference if config.direction in REFERENCE_TEACHERS else params
    # Stopped before the forward pass, so that it stores no activations; the divergence stops the gradient as well.
    if config.direction != "published":
        teacher = jax.lax.stop_gradient(teacher)
    dense_hidden = response_hidden(model, teacher, trajectory, trajectory.dense_mask())
    columns = jnp.arange(weights.shape[1])

    def of_block(
        both: tuple[Params, Params], columns: Array, hidden: Array, dense_hidden: Array
    ) -> tuple[Array, Array]:
        shadow = response_logits(model, both[0], hidden, trajectory, columns)
        dense = response_logits(model, both[1], dense_hidden, trajectory, columns)
        return divergence(dense, shadow, config.direction), jax.lax.stop_gradient(overlap(dense, shadow))

    # Logits of two policies: blocks of half as many columns.
    size = columns_at_once(model.shape, 2 * weights.shape[0], columns.size)
    terms, overlaps = over_columns(of_block, (params, teacher), size, columns, hidden, dense_hidden)
    return jnp.sum(weights * terms), overlaps
