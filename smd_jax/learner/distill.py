"""The second track's forward passes: the dense teacher beside the masked student, on some rows and positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.learner.forward import response_hidden, response_logits
from smd_jax.losses.distillation import (
    REFERENCE_TEACHERS,
    DistillConfig,
    choose,
    divergence,
    sampled_divergence,
)
from smd_jax.message.sampling import token_logprobs
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import any_leaves
from smd_jax.ratios import overlap


@any_leaves
class Agreement(struct.PyTreeNode):
    """How much teacher and student agree, at the rows and positions that a step looks at.

    Attributes:
      overlap: 1 - TV of their next-token distributions, exact over the vocabulary, without gradient.
      inside: whether there is a token.
    """

    overlap: Float[Array, "rows columns"]
    inside: Bool[Array, "rows columns"]


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
    """`sum(weights * D)` over a microbatch, in nats, without the coefficient; and the agreement, if the divergence is
    "exact", so that both distributions are at hand.

    D is taken of the rows and positions that `config` chooses for this step, and scaled up to all of them.

    Args:
      params: parameters of the policy; with a gradient, also through `hidden`.
      reference: parameters of the reference policy; None where the direction is neither "anchor" nor "ema".
      step: optimizer steps taken.
      trajectory: rows of the microbatch.
      hidden: hidden states of the masked student, from which the response tokens are predicted.
      weights: how much each token weighs in the loss, 0 outside the response.

    Raises:
      ValueError: if the teacher is the reference and there is none, or a fraction is not a whole number of rows or
        columns.
    """
    teacher = _teacher(config, params, reference)
    rows, columns = choose(config, step, *weights.shape)
    # Over the steps every token is chosen equally often. Dividing by the share of them that a step looks at keeps the
    # mean over steps what it would be with all tokens.
    scale = weights.size / (rows.size * columns.size)
    if rows.size < weights.shape[0]:
        trajectory, hidden, weights = jax.tree.map(lambda x: x[rows], (trajectory, hidden, weights))
    # Whole sequences, whatever columns are looked at: a hidden state depends on all tokens before it.
    dense_hidden = response_hidden(model, teacher, trajectory, trajectory.dense_mask())
    tokens = trajectory.response
    if columns.size < weights.shape[1]:
        picked = (hidden, dense_hidden, tokens, weights)
        hidden, dense_hidden, tokens, weights = jax.tree.map(lambda x: x[:, columns], picked)

    def of_block(
        both: tuple[Params, Params], columns: Array, hidden: Array, dense_hidden: Array, tokens: Array
    ) -> tuple[Array, Array | None]:
        shadow = response_logits(model, both[0], hidden, trajectory, columns)
        dense = response_logits(model, both[1], dense_hidden, trajectory, columns)
        agree = jax.lax.stop_gradient(overlap(dense, shadow)) if config.estimator == "exact" else None
        return _per_token(config, dense, shadow, tokens), agree

    # Two policies' logits side by side: blocks of half as many columns.
    size = columns_at_once(model.shape, 2 * rows.size, columns.size)
    terms, agree = over_columns(of_block, (params, teacher), size, columns, hidden, dense_hidden, tokens)
    agreement = None if agree is None else Agreement(agree, weights > 0)
    return jnp.sum(weights * terms) * scale, agreement


def _teacher(config: DistillConfig, params: Params, reference: Params | None) -> Params:
    """Parameters of the dense policy, with a gradient for "published" alone."""
    # The divergence stops it as well; stopped before the forward pass, nothing of that is kept for it.
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
    """The divergence of each token, exact or from the token itself; the logits of `response_logits`."""
    if config.estimator == "exact":
        return divergence(dense, shadow, config.direction)
    # Temperature 1: `response_logits` has divided by the sampler's already.
    of_dense = token_logprobs(dense, tokens, 1.0)
    of_shadow = token_logprobs(shadow, tokens, 1.0)
    return sampled_divergence(of_dense, of_shadow, config.direction, config.estimator)
