"""The second track of the loss: the divergence between dense and masked policy, with the forward passes it needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.distillation import DistillConfig, divergence, teacher_rows
from smd_jax.learner import response_hidden, response_logits
from smd_jax.model import Decoder, Params
from smd_jax.trajectory import Trajectory


def distill_term(
    model: Decoder,
    config: DistillConfig,
    params: Params,
    reference: Params | None,
    step: Int[Array, ""],
    trajectory: Trajectory,
    hidden: Float[Array, "batch R hidden"],
    weights: Float[Array, "batch R"],
) -> Float[Array, ""]:
    """The weighted divergence of the rows that get a dense forward pass, scaled up to all rows."""
    rows = hidden.shape[0]
    chosen = teacher_rows(rows, config.fraction)
    if chosen < rows:
        index = (step + jnp.arange(chosen) * rows // chosen) % rows
        trajectory, hidden, weights = jax.tree.map(lambda x: x[index], (trajectory, hidden, weights))
    if config.direction == "published":
        teacher = params
    else:
        teacher = jax.lax.stop_gradient(reference if config.direction == "anchor" else params)
    dense_hidden = response_hidden(model, teacher, trajectory, trajectory.dense_mask())

    @jax.checkpoint
    def weighted(params: Params, teacher: Params, hidden: Array, dense_hidden: Array) -> Array:
        shadow = response_logits(model, params, hidden, trajectory.temperature)
        dense = response_logits(model, teacher, dense_hidden, trajectory.temperature)
        return jnp.sum(weights * divergence(dense, shadow, config.direction))

    return weighted(params, teacher, hidden, dense_hidden) * (rows / chosen)
