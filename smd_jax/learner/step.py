"""The optimizer step of every update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from smd_jax.devices.sharding import constrain_tree
from smd_jax.learner.reference import ReferenceSync, check_same_leaves, follow
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.learner.storage import PARAMS, rounded, widened
from smd_jax.learner.trained import check_followable, followed_params, trained_params, with_trained
from smd_jax.model.protocol import Params


def take_step(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    grads: Params,
    sync: ReferenceSync | None = None,
    *,
    is_finite: Bool[Array, ""] | bool = True,
    learns: Bool[Array, ""] | bool = True,
) -> tuple[TrainState, Metrics]:
    """The state after one optimizer step, and its metrics.

    Non-finite gradients are skipped: parameters and optimizer do not change, but the step counts, as in `skip_step`.

    16-bit parameters are updated in float32 and rounded, see `smd_jax.learner.storage`; the optimizer sees float32 or
    wider.

    Args:
      grads: gradients of the trained parameters, see `smd_jax.learner.trained`.
      is_finite: false if, for example, the loss is not finite; then the gradients are not used.
      learns: false without counted tokens, when gradients are 0. Parameters and optimizer then do not change, as in
        `skip_step`; this is not counted in `update/skipped`.

    Returns:
      The state; `grad_norm`, the norm of the gradients before clipping; `update/skipped`, 1 for skipped gradients; and
      `learning_rate`, if the optimizer's state has one, as with `optax.inject_hyperparams` and the optimizers of
      `smd_jax.train.optimizers`.
    """
    grads = widened(grads)
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm) & is_finite
    moves = is_finite & learns
    before = trained_params(state.params)
    wide = widened(before)
    updates, opt_state = optimizer.update(grads, state.opt_state, wide)
    trained = rounded(optax.apply_updates(wide, updates), before, state.key, state.step, PARAMS)
    # Selected elementwise: two branches would each need memory.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(moves, new, old), (trained, opt_state), (before, state.opt_state)
    )
    # Without the constraint the compiler could choose another sharding, and the next step would be compiled again.
    params = with_trained(state.params, constrain_tree(trained))
    new = state.replace(step=state.step + 1, params=params, opt_state=constrain_tree(opt_state))
    skipped = (~is_finite).astype(jnp.float32)
    return synchronised(new, sync), {"grad_norm": norm, "update/skipped": skipped, **_learning_rate(opt_state)}


def skip_step(state: TrainState, sync: ReferenceSync | None = None) -> TrainState:
    """The state after a step without counted tokens. Parameters do not change, not even by momentum and weight decay.
    The step counts, because rows and random numbers of later rollouts depend on it."""
    return synchronised(state.replace(step=state.step + 1), sync)


def check_sync(state: TrainState, sync: ReferenceSync | None) -> None:
    """Raises ValueError if `sync` is set and the state has no reference that can be mixed with the policy."""
    if sync is not None:
        check_followable(state.reference, state.params)
        check_same_leaves(state.reference, followed_params(state.params))


def synchronised(state: TrainState, sync: ReferenceSync | None) -> TrainState:
    """Updates the reference if it is due; without `sync` the state is unchanged."""
    if sync is None:
        return state
    check_followable(state.reference, state.params)
    reference = follow(sync, state.reference, followed_params(state.params), state.step, state.key)
    return state.replace(reference=constrain_tree(reference))


def _learning_rate(opt_state: Any) -> Metrics:
    # A schedule has a state of the same name that is not an array.
    found = optax.tree.get_all_with_path(opt_state, "learning_rate", lambda _, x: isinstance(x, jax.Array))
    # With several optimizers there is no single learning rate.
    return {"learning_rate": jnp.asarray(found[0][1])} if len(found) == 1 else {}
