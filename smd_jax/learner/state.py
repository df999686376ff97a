"""Train state and train batch, and the parameters that an optimizer step changes: all, or with LoRA only the adapters,
the critic's head and the eviction gate.

state.params    embed … norm      lora      value_head      eviction_gate
                └─ frozen ─┘      └────────────── trained ──────────────┘      gradients, moments, updates
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.config import check_instance
from smd_jax.learner.accumulation import Objective
from smd_jax.learner.storage import widened
from smd_jax.message.gate import EVICTION_GATE, drop_gate
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.lora import LORA, base_params, has_lora
from smd_jax.model.protocol import Params, check_model
from smd_jax.model.value_head import VALUE_HEAD, drop_value_head
from smd_jax.pytrees import PyTreeNode
from smd_jax.shapes import check_shape

Metrics = dict[str, Array]


class TrainState(PyTreeNode):
    """The state that an optimizer step changes.

    Attributes:
      step: optimizer steps taken.
      params: parameters of the policy.
      opt_state: state of the optimizer for the trained parameters: with LoRA (`smd_jax.model.lora.add_lora`) only the
        adapters and a critic's head.
      reference: parameters of the reference policy. With LoRA, None means the base, and a reference of only adapters is
        applied to the policy's base. Only a `ReferenceSync` changes it.
      key: PRNG key of the run; rollout i uses `fold_in(key, i)`, so the key itself never changes.
      sampler_params: parameters of the next rollout if rollouts run ahead of updates; None: `params`.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    reference: Params | None
    key: Key[Array, ""]
    sampler_params: Params | None = None


class TrainBatch(PyTreeNode):
    """Data of one step.

    Attributes:
      trajectory: `[batch, ...]`.
      advantages: `[batch]`, or `[batch, R]` with one per token.
      old_logprobs: `[batch, R]`, log-probabilities of the learner at the rollout's parameters; None: those at the
        current parameters, which the update computes. The sampler's own, `trajectory.logprobs`, declare sampler and
        learner one policy, as under shadow masks. With a dense learner they make the ratio that of
        `smd.corrections.Bypass`, and corrections that measure the mismatch refuse them.
      counted_rows: `[batch]`, false for rows to leave out of the loss and all denominators; None: all rows count.
      old_values, returns: `[batch, R]`, the critic's values at the rollout's parameters, and its targets; None
        without a critic.
      dense_old_logprobs: like old_logprobs, for `UpdateConfig.dense_learner`; None without one.
    """

    trajectory: Trajectory
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    old_logprobs: Float[Array, "batch R"] | None
    counted_rows: Bool[Array, " batch"] | None = None
    old_values: Float[Array, "batch R"] | None = None
    returns: Float[Array, "batch R"] | None = None
    dense_old_logprobs: Float[Array, "batch R"] | None = None


def check_parts(model: object, optimizer: object, config: object, kind: type) -> None:
    """Raises TypeError for a model that is no LanguageModel, an optimizer that is not optax's, and a config that is not
    of the class `kind`."""
    check_model(model)
    check_instance("optimizer", optimizer, optax.GradientTransformation)
    check_instance("config", config, kind)


def check_batch(batch: TrainBatch) -> None:
    """Raises TypeError for a batch of another class or lists in place of arrays, ValueError for arrays whose shapes do
    not fit the trajectory."""
    check_instance("batch", batch, TrainBatch)
    tokens = batch.trajectory.response.shape
    check_shape("advantages", batch.advantages, tokens[:1], tokens)
    check_shape("counted_rows", batch.counted_rows, tokens[:1])
    if batch.counted_rows is not None and batch.counted_rows.dtype != bool:
        raise TypeError(f"expected counted_rows as booleans; got {batch.counted_rows.dtype}")
    for name in ("old_logprobs", "old_values", "returns", "dense_old_logprobs"):
        check_shape(name, getattr(batch, name), tokens)


def init_state(
    params: Params, optimizer: optax.GradientTransformation, key: Key[Array, ""], reference: Params | None = None
) -> TrainState:
    """A train state at step 0. The first update donates the buffers of `params`, so copy them if you need them later.

    The key is copied. The reference is copied too, so it may be `params`; arrays shared with the frozen base of LoRA
    adapters are not copied. With LoRA, None means the base.

    The optimizer's state is created for parameters in float32 or wider: a second moment in 16 bits would not change.

    Raises:
      TypeError: for an optimizer that is not optax's, or a key that is not of `jax.random.key`.
    """
    check_instance("optimizer", optimizer, optax.GradientTransformation)
    if not isinstance(key, jax.Array):
        raise TypeError(f"expected a key of jax.random.key(seed); got {key!r}")
    # One buffer cannot be donated twice, as policy and as reference.
    reference = jax.tree.map(jnp.copy, shared_reference(reference, params))
    trained = widened(trained_params(params))
    # Some optimizers keep the first parameters, as optax.contrib.prodigy does.
    held = {id(leaf) for leaf in jax.tree.leaves(trained)}
    opt_state = jax.tree.map(lambda x: jnp.copy(x) if id(x) in held else x, optimizer.init(trained))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, reference, jnp.copy(key))


def reference_params(state: TrainState) -> Params | None:
    """Parameters of the reference policy; with LoRA the base, unless the state has another reference."""
    base, reference = frozen_params(state.params), state.reference
    if reference is None:
        return base
    # A reference of only adapters is applied to the policy's base.
    return {**base, **reference} if base is not None and set(reference) == {LORA} else reference


def trained_params(params: Params) -> Params:
    """The parameters with gradients and optimizer state; without LoRA all. No copies."""
    if not has_lora(params):
        return params
    return {name: params[name] for name in (LORA, VALUE_HEAD, EVICTION_GATE) if name in params}


def frozen_params(params: Params) -> Params | None:
    """The frozen base of the adapters; None without LoRA. No copies."""
    return _model_alone(params) if has_lora(params) else None


def with_trained(params: Params, trained: Params) -> Params:
    """Replaces the trained part of `params`, the inverse of `trained_params`."""
    return {**params, **trained} if has_lora(params) else trained


def of_trained(objective: Objective, params: Params) -> Objective:
    """The objective as a function of only the trained parameters, so that frozen ones need no gradient memory."""
    return lambda trained, part: objective(with_trained(params, trained), part)


def shared_reference(reference: Params | None, params: Params) -> Params | None:
    """The part of a reference policy to store in addition to `params`: only its adapters, or nothing, if it has the
    same base (the same arrays); otherwise all of it."""
    base = frozen_params(params)
    if base is None or reference is None:
        return reference
    (own, own_structure), (leaves, structure) = jax.tree.flatten(_model_alone(reference)), jax.tree.flatten(base)
    if own_structure != structure or any(a is not b for a, b in zip(own, leaves, strict=True)):
        return reference
    return {LORA: reference[LORA]} if has_lora(reference) else None


def _model_alone(params: Params) -> Params:
    return drop_gate(drop_value_head(base_params(params)))
