"""The parameters that an optimizer step changes: all, or with LoRA only the adapters, the critic's head and the
eviction gate.

state.params    embed … norm      lora      value_head      eviction_gate
                └─ frozen ─┘      └────────────── trained ──────────────┘      gradients, moments, updates
"""

from __future__ import annotations

import jax

from smd_jax.learner.accumulation import Objective
from smd_jax.message.gate import EVICTION_GATE, drop_gate
from smd_jax.model.lora import LORA, base_params, has_lora
from smd_jax.model.protocol import Params
from smd_jax.model.value_head import VALUE_HEAD, drop_value_head

TRAINED_BESIDE_A_BASE = (LORA, VALUE_HEAD, EVICTION_GATE)


def trained_params(params: Params) -> Params:
    """The parameters with gradients and optimizer state; without LoRA all. No copies."""
    if not has_lora(params):
        return params
    return {name: params[name] for name in TRAINED_BESIDE_A_BASE if name in params}


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
