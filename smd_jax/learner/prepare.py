"""Computes counted tokens and term weights from the whole minibatch, before it is split.

Weights have denominators, such as the tokens of the minibatch, and a correction may divide by a mean over it. Computed
from a microbatch, they would depend on its size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Bool

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import Replay, Visibility, learner_replay
from smd_jax.learner.state import TrainBatch
from smd_jax.learner.terms import Minibatch
from smd_jax.losses.policy import mask_truncated_completions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import any_leaves


@any_leaves
class Prepared(struct.PyTreeNode):
    """A batch with the quantities that depend on all its rows.

    Attributes:
      batch: the unchanged batch.
      mask: `[batch, R]` counted tokens, without left-out rows and masked truncated completions.
      terms: results of `Term.prepare`, in the order of `UpdateConfig.objective`.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    terms: tuple[Any, ...]


def prepare(model: LanguageModel, config: UpdateConfig, params: Params, batch: TrainBatch) -> Prepared:
    """Prepares every term, with an extra forward pass if a correction or entropies need one."""
    mask = counted_tokens(config, batch.trajectory, batch.counted_rows)

    @functools.cache
    def replay(visibility: Visibility) -> Replay:
        # In microbatches like the update, so that this pass needs no more memory.
        sizes = config.microbatch_size, config.rows_per_prompt
        return jax.lax.stop_gradient(learner_replay(model, params, batch.trajectory, visibility, *sizes))

    minibatch = Minibatch(batch, mask, replay)
    return Prepared(batch, mask, tuple(term.prepare(minibatch) for term in config.objective))


def counted_tokens(
    config: UpdateConfig, trajectory: Trajectory, counted_rows: Bool[Array, " batch"] | None
) -> Bool[Array, "batch R"]:
    """The counted response tokens of a step; `counted_rows` as in TrainBatch."""
    mask = trajectory.response_mask
    if config.mask_truncated_completions:
        mask = mask_truncated_completions(mask, trajectory.terminated)
    return mask if counted_rows is None else mask & counted_rows[:, None]
