"""Train state and train batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.learner.storage import widened
from smd_jax.learner.trained import shared_reference, trained_params, whole_reference
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import Params
from smd_jax.pytrees import any_leaves

Metrics = dict[str, Array]


@any_leaves
class TrainState(struct.PyTreeNode):
    """The state that an optimizer step changes.

    Attributes:
      step: optimizer steps taken.
      params: parameters of the policy.
      opt_state: state of the optimizer, for the parameters that are trained: with adapters
        (`smd_jax.model.lora.add_lora`) those and a critic's head alone.
      reference: parameters of the reference policy. With adapters None means their base, and adapters alone are taken
        on the policy's base. Only a `ReferenceSync` moves them.
      key: PRNG key of the run; rollout i uses `fold_in(key, i)`, so the key itself never changes.
      behind: what the next rollout is drawn with, where rollouts are drawn ahead of the updates; None: `params`.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    reference: Params | None
    key: Key[Array, ""]
    behind: Params | None = None


@any_leaves
class TrainBatch(struct.PyTreeNode):
    """Data of one step.

    Attributes:
      trajectory: `[batch, ...]`.
      advantages: `[batch]`, or `[batch, R]` where every token has its own.
      old_logprobs: `[batch, R]`, log-probabilities of the learner at the rollout's parameters; None: at the present
        ones.
      counted_rows: `[batch]`, false for rows to leave out, of which nothing stays in any denominator; None: all rows
        count.
      old_values, returns: `[batch, R]`, the critic's values at the rollout's parameters, and its targets; None
        without a critic.
      dense_old_logprobs: as old_logprobs, of `UpdateConfig.dense_learner`; None without one.
    """

    trajectory: Trajectory
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    old_logprobs: Float[Array, "batch R"] | None
    counted_rows: Bool[Array, " batch"] | None = None
    old_values: Float[Array, "batch R"] | None = None
    returns: Float[Array, "batch R"] | None = None
    dense_old_logprobs: Float[Array, "batch R"] | None = None


def init_state(
    params: Params, optimizer: optax.GradientTransformation, key: Key[Array, ""], reference: Params | None = None
) -> TrainState:
    """A state at step 0. An update donates its buffers: without a copy, `params` are gone after the first step.

    The key is copied, so the caller's own stays alive. The reference is copied, so that it may be `params` themselves.
    What it shares with the frozen base below adapters is not copied, and with adapters None is that base.

    The optimizer's state is made for parameters in float32 or wider: a second moment in 16 bits would not change.
    """
    # One buffer cannot be donated twice, as policy and as reference. `tree.map` leaves None as it is.
    reference = jax.tree.map(jnp.copy, shared_reference(reference, params))
    opt_state = optimizer.init(widened(trained_params(params)))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, reference, jnp.copy(key))


def reference_params(state: TrainState) -> Params | None:
    """Parameters of the reference policy; with adapters their base, where the state has no other."""
    return whole_reference(state.reference, state.params)
