"""The optimizer step of every update, and the reference that may follow the policy.

    every `every` optimizer steps:   reference  <-  alpha * policy + (1 - alpha) * reference

    ReferenceSync(0.6, 512)          TR-DPO (arXiv:2404.09656), TRL's sync_ref_model
    ReferenceSync.ema(0.999)         an exponential moving average of the policies of all steps

The reference is part of the train state and is sharded and checkpointed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from smd_jax.devices.sharding import constrain_tree
from smd_jax.learner.state import Metrics, TrainState, trained_params, with_trained
from smd_jax.learner.storage import PARAMS, REFERENCE, rounded, widened
from smd_jax.model.lora import LORA, has_lora
from smd_jax.model.protocol import Params
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class ReferenceSync:
    """Schedule of the reference's updates.

    Attributes:
      alpha: share of the policy in the new reference (TRL: ref_model_mixup_alpha); 1 copies it.
      every: optimizer steps between two updates (TRL: ref_model_sync_steps).
    """

    alpha: float = 0.6
    every: int = 512

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"expected 0 < alpha <= 1, the policy's share of the new reference; got {self.alpha}")
        if self.every < 1:
            raise ValueError(f"expected every >= 1 optimizer steps; got {self.every}")

    @classmethod
    def ema(cls, decay: float) -> ReferenceSync:
        """An exponential moving average that keeps `decay` of itself at every step.

        Raises:
          ValueError: unless 0 <= decay < 1.
        """
        if not 0 <= decay < 1:
            raise ValueError(f"expected 0 <= decay < 1, the share that the average keeps; got {decay}")
        return cls(1 - decay, 1)


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

    Non-finite gradients are skipped, as in `skip_step`: parameters and moments do not change, but the step counts.

    16-bit parameters are updated in float32 and rounded, see `smd_jax.learner.storage`; the optimizer sees float32 or
    wider.

    Args:
      grads: gradients of the trained parameters, see `smd_jax.learner.state.trained_params`.
      is_finite: false if, for example, the loss is not finite; then the gradients are not used.
      learns: false without counted tokens, when gradients are 0. Then the step is left out as in `skip_step`, but
        `update/skipped` does not count it.

    Returns:
      The state; `grad_norm`, the norm of the gradients before clipping; `update/skipped`, 1 for skipped gradients; and
      `learning_rate`, if the optimizer's state has one, as with `optax.inject_hyperparams` and the optimizers of
      `smd_jax.train.optimizers`.
    """
    grads = widened(grads)
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm) & is_finite
    before = trained_params(state.params)
    wide = widened(before)
    updates, stepped = optimizer.update(grads, state.opt_state, wide)
    trained = rounded(optax.apply_updates(wide, updates), before, state.key, state.step, PARAMS)
    # Selected elementwise: two branches would each need memory.
    trained, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite & learns, new, old),
        (trained, stepped),
        (before, with_schedules_advanced(state.opt_state)),
    )
    # Without the constraint the compiler could choose another sharding, and the next step would be compiled again.
    params = with_trained(state.params, constrain_tree(trained))
    new = state.replace(step=state.step + 1, params=params, opt_state=constrain_tree(opt_state))
    metrics = {"grad_norm": norm, "update/skipped": (~is_finite).astype(jnp.float32)}
    # Of this step, also of a skipped one. A schedule has a state of the same name that is not an array.
    rates = optax.tree.get_all_with_path(stepped, "learning_rate", lambda _, x: isinstance(x, jax.Array))
    # With several optimizers there is no single learning rate.
    if len(rates) == 1:
        metrics["learning_rate"] = jnp.asarray(rates[0][1])
    return synchronised(new, sync), metrics


def skip_step(state: TrainState, sync: ReferenceSync | None = None) -> TrainState:
    """The state after a step without counted tokens. Parameters do not change, not even by momentum and weight decay.
    The step counts, also in schedules: rows, random numbers and learning rates of later rollouts depend on it."""
    opt_state = with_schedules_advanced(state.opt_state)
    return synchronised(state.replace(step=state.step + 1, opt_state=opt_state), sync)


def _after_step(schedule: Any) -> Any:
    """The state of a schedule one step later, if it is a counter, as that of a plain function."""
    is_counter = getattr(schedule, "_fields", None) == ("count",)
    return schedule._replace(count=optax.safe_increment(schedule.count)) if is_counter else schedule


def with_schedules_advanced(opt_state: optax.OptState) -> optax.OptState:
    """The optimizer's state after a step that only its schedules count.

    Advances schedules of `optax.scale_by_schedule` and `optax.inject_hyperparams`. Moments and their own counters do
    not change, nor do schedules whose state is no counter and those inside of `optax.MultiSteps`.
    """
    scheduled = (
        optax.MultiStepsState,
        optax.ScaleByScheduleState,
        optax.schedules.InjectStatefulHyperparamsState,
    )

    def advanced(part: Any) -> Any:
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=optax.safe_increment(part.count))
        if isinstance(part, optax.schedules.InjectStatefulHyperparamsState):
            states = {name: _after_step(each) for name, each in part.hyperparams_states.items()}
            return part._replace(
                count=optax.safe_increment(part.count),
                hyperparams_states=states,
                inner_state=with_schedules_advanced(part.inner_state),
            )
        return part

    return jax.tree.map(advanced, opt_state, is_leaf=lambda x: isinstance(x, scheduled))


def synchronised(state: TrainState, sync: ReferenceSync | None) -> TrainState:
    """Mixes the reference with the policy if it is due after `state.step` steps; without `sync` the state is unchanged.

    It is mixed in float32 or wider. A bfloat16 reference is rounded stochastically, because rounding to nearest would
    lose a small share of the policy, see `smd_jax.learner.storage`. Raises as `check_sync`.
    """
    if sync is None:
        return state
    check_sync(state, sync)

    def mixed() -> Params:
        policy, reference = widened(_followed(state.params)), widened(state.reference)
        wide = jax.tree.map(lambda new, old: sync.alpha * new + (1 - sync.alpha) * old, policy, reference)
        return rounded(wide, state.reference, state.key, state.step, REFERENCE)

    # A branch, not a `where`, so that nothing is computed between updates.
    due = state.step % sync.every == 0
    reference = mixed() if sync.every == 1 else jax.lax.cond(due, mixed, lambda: state.reference)
    return state.replace(reference=constrain_tree(reference))


def check_sync(state: TrainState, sync: ReferenceSync | None) -> None:
    """Raises ValueError if `sync` is set and the state has no reference that can be mixed with the policy: one with the
    same leaves, and with LoRA a set of adapters on the same base."""
    reference = state.reference
    if sync is None:
        return
    adapters_alone = isinstance(reference, Mapping) and set(reference) == {LORA}
    if has_lora(state.params) and not adapters_alone:
        raise ValueError(
            "expected adapters as the reference that follows adapters, init_state(params, …, reference=params); got "
            + ("their base" if reference is None else "whole parameters")
        )
    followed = jax.tree.structure(_followed(state.params))
    if jax.tree.structure(reference) != followed:
        raise ValueError(
            "expected reference parameters with the same leaves as the policy's, to mix them (in PPO including the "
            f"value head); got {jax.tree.structure(reference)} and {followed}"
        )


def _followed(params: Params) -> Params:
    """The parameters that the reference is mixed with. Adapters are mixed A with A and B with B: a mixture of their
    products would have twice the rank."""
    return {LORA: params[LORA]} if has_lora(params) else params
