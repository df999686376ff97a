"""Distillation term: the dense teacher's forward pass and the divergence, on selected rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.learner.forward import response_hidden, response_logits
from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import LearnerSetup, Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.distillation import (
    REFERENCE_TEACHERS,
    DistillConfig,
    choose,
    divergence,
    sampled_divergence,
)
from smd_jax.losses.weighting import TokenMean
from smd_jax.message.sampling import token_logprobs
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import any_leaves
from smd_jax.ratios import lower_percentile, overlap


@any_leaves
class Agreement(struct.PyTreeNode):
    """Agreement of teacher and student at the rows of a step.

    Attributes:
      overlap: 1 - TV of their next-token distributions, exact over the vocabulary, without gradient.
      inside: whether the position is a response token.
    """

    overlap: Float[Array, "rows columns"]
    inside: Bool[Array, "rows columns"]


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
                f"direction of {REFERENCE_TEACHERS}; got 'dense' with {config}"
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
        if setup.pack_columns is not None and config.fraction < 1:
            raise ValueError(f"expected distillation of all rows with pack_columns; got {config}")
        if setup.rows_per_prompt > 1 and config.fraction < 1:
            raise ValueError(
                f"expected distillation of all rows with rows_per_prompt {setup.rows_per_prompt}, because a share "
                f"splits rows of one prompt; got {config}"
            )

    def coefficient(self, step: Int[Array, ""]) -> float:
        return self.config.coef

    def prepare(self, minibatch: Minibatch) -> Float[Array, "batch R"]:
        return TokenMean().weights(minibatch.trajectory.response_mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        loss, agreement = distill_term(
            inputs.model,
            self.config,
            inputs.params,
            inputs.reference,
            inputs.step,
            inputs.trajectory,
            inputs.hidden,
            inputs.prepared,
        )
        # Logged as a divergence in nats, without its coefficient.
        return TermOutputs(loss, {"distill": loss}, agreement)

    def metrics(self, results: TermResults) -> Metrics:
        agreement: Agreement | None = results.rows
        if agreement is None:
            return {}
        return {"distill/agreement_p5": lower_percentile(agreement.overlap, agreement.inside, 5.0)}

    def learns(self, results: TermResults) -> Bool[Array, ""]:
        return (results.prepared > 0).any() & (self.config.coef > 0)


def distill_term(
    model: LanguageModel,
    config: DistillConfig,
    params: Params,
    reference: Params | None,
    step: Int[Array, ""],
    trajectory: Trajectory,
    hidden: Float[Array, "batch R hidden"],
    weights: Float[Array, "batch R"],
) -> tuple[Float[Array, ""], Agreement | None]:
    """`sum(weights * D)` over a microbatch, in nats, without the coefficient; and the agreement for an "exact"
    divergence. D is computed on the rows that `config` selects in this step, and scaled up to all.

    Args:
      params: parameters of the policy, with a gradient, also through `hidden`.
      hidden: states that predict the response tokens under the student's mask.
      reference: parameters of the reference policy; None unless the direction is "anchor" or "ema".
      weights: weight of each token in the loss, 0 outside the response.

    Raises:
      ValueError: if the reference is missing, or the fraction is not a whole number of rows.
    """
    teacher = _teacher(config, params, reference)
    rows = choose(config, step, weights.shape[0])
    # Over the steps every row is selected equally often; dividing by the share keeps the mean.
    scale = weights.shape[0] / rows.size
    if rows.size < weights.shape[0]:
        trajectory, hidden, weights = jax.tree.map(lambda x: x[rows], (trajectory, hidden, weights))
    dense_hidden = response_hidden(model, teacher, trajectory, trajectory.dense_mask())
    columns = jnp.arange(weights.shape[1])

    def of_block(
        both: tuple[Params, Params], columns: Array, hidden: Array, dense_hidden: Array, tokens: Array
    ) -> tuple[Array, Array | None]:
        shadow = response_logits(model, both[0], hidden, trajectory, columns)
        dense = response_logits(model, both[1], dense_hidden, trajectory, columns)
        agree = jax.lax.stop_gradient(overlap(dense, shadow)) if config.estimator == "exact" else None
        return _per_token(config, dense, shadow, tokens), agree

    # Logits of two policies: blocks of half as many columns.
    size = columns_at_once(model.shape, 2 * rows.size, columns.size)
    terms, agree = over_columns(of_block, (params, teacher), size, columns, hidden, dense_hidden, trajectory.response)
    agreement = None if agree is None else Agreement(agree, weights > 0)
    return jnp.sum(weights * terms) * scale, agreement


def _teacher(config: DistillConfig, params: Params, reference: Params | None) -> Params:
    """Parameters of the dense policy, with a gradient only for "published"."""
    # Stopped before the forward pass, so that it stores no activations; the divergence stops the gradient as well.
    if config.direction == "published":
        return params
    if config.direction not in REFERENCE_TEACHERS:
        return jax.lax.stop_gradient(params)
    if reference is None:
        raise ValueError(f"expected reference parameters for direction {config.direction!r}; got None")
    return jax.lax.stop_gradient(reference)


def _per_token(
    config: DistillConfig,
    dense: Float[Array, "batch R vocab"],
    shadow: Float[Array, "batch R vocab"],
    tokens: Int[Array, "batch R"],
) -> Float[Array, "batch R"]:
    """The divergence of each token, exact or estimated from the token; logits as from `response_logits`."""
    if config.estimator == "exact":
        return divergence(dense, shadow, config.direction)
    # Temperature 1, because `response_logits` has divided by the sampler's temperature.
    of_dense = token_logprobs(dense, tokens, 1.0)
    of_shadow = token_logprobs(shadow, tokens, 1.0)
    return sampled_divergence(of_dense, of_shadow, config.direction, config.estimator)
