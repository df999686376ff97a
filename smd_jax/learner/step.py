"""The end of every update: gradients change the train state."""

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

    Gradients that are not finite are left out: parameters and optimizer stay, the step counts, as in `skip_step`.

    Parameters of 16 bits are updated in float32 and rounded, see `smd_jax.learner.storage`: an optimizer sees float32
    or wider, as it did when `init_state` made its state.

    Args:
      grads: of the parameters that are trained, see `smd_jax.learner.trained`.
      is_finite: false if the loss, for example, is not finite: the gradients are then not used.
      learns: false where nothing counts, so that the gradients are 0: parameters and optimizer stay, as in `skip_step`.
        That is no `update/skipped`.

    Returns:
      The state; `grad_norm`, the norm of the gradients before the optimizer clips them; `update/skipped`, 1 where they
      were left out; and `learning_rate`, that of this step, if the optimizer's state has one:
      `optax.inject_hyperparams` keeps it there, as do the optimizers of `smd_jax.train.optimizers`.
    """
    grads = widened(grads)
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm) & is_finite
    moves = is_finite & learns
    before = trained_params(state.params)
    wide = widened(before)
    updates, opt_state = optimizer.update(grads, state.opt_state, wide)
    trained = rounded(optax.apply_updates(wide, updates), before, state.key, state.step, PARAMS)
    # Selected element by element, in the loop that writes them: two branches would each need memory.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(moves, new, old), (trained, opt_state), (before, state.opt_state)
    )
    # Otherwise the compiler could choose another sharding for new parameters, and the next step, which takes their
    # buffers, would be compiled a second time.
    params = with_trained(state.params, constrain_tree(trained))
    new = state.replace(step=state.step + 1, params=params, opt_state=constrain_tree(opt_state))
    skipped = (~is_finite).astype(jnp.float32)
    return synchronised(new, sync), {"grad_norm": norm, "update/skipped": skipped, **_learning_rate(opt_state)}


def skip_step(state: TrainState, sync: ReferenceSync | None = None) -> TrainState:
    """The state after a step in which nothing counts. The parameters stay, as momentum and weight decay would not leave
    them; the step still counts, because rows and random numbers of later rollouts follow from it."""
    return synchronised(state.replace(step=state.step + 1), sync)


def check_sync(state: TrainState, sync: ReferenceSync | None) -> None:
    """Raises ValueError if the state has no reference that could follow the policy, as `sync` says it does."""
    if sync is not None:
        check_followable(state.reference, state.params)
        check_same_leaves(state.reference, followed_params(state.params))


def synchronised(state: TrainState, sync: ReferenceSync | None) -> TrainState:
    """The state with its reference moved, if that is due after so many steps; without `sync` nothing moves."""
    if sync is None:
        return state
    check_followable(state.reference, state.params)
    reference = follow(sync, state.reference, followed_params(state.params), state.step, state.key)
    return state.replace(reference=constrain_tree(reference))


def _learning_rate(opt_state: Any) -> Metrics:
    # A schedule has a state by the same name, which is no number.
    found = optax.tree.get_all_with_path(opt_state, "learning_rate", lambda _, x: isinstance(x, jax.Array))
    # Where there are several optimizers, none of their rates is the learning rate.
    return {"learning_rate": jnp.asarray(found[0][1])} if len(found) == 1 else {}
