"""The study of evictions as actions: what each of its arms moves, and which jobs it has."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import eviction_action
from eviction_action import GATE_ARMS, GATE_SPEED, cells
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.model.decoder import Decoder

pytestmark = pytest.mark.study

MOVES = {"gate-frozen": (1.0, 0.0), "gate-alone": (0.0, GATE_SPEED), "gate-joint": (1.0, GATE_SPEED)}


@pytest.mark.parametrize("arm", GATE_ARMS, ids=lambda arm: arm.name)
def test_what_an_arm_moves(arm: eviction_action.GateArm):
    tokens, gate = MOVES[arm.name]
    params: Any = {"embed": {"embedding": jnp.ones(2)}, EVICTION_GATE: {"layers_0": {"kernel": jnp.ones(3)}}}
    optimizer = arm.optimizer(lambda factor: optax.sgd(factor))
    updates: Any = optimizer.update(params, optimizer.init(params), params)[0]
    assert updates["embed"]["embedding"].tolist() == [-tokens] * 2
    assert updates[EVICTION_GATE]["layers_0"]["kernel"].tolist() == [-gate] * 3
    assert (arm.update.policy_coef > 0, arm.update.eviction_coef > 0) == (tokens > 0, gate > 0)
    assert arm.is_exact


def test_a_gate_lies_beside_the_start():
    shape = Decoder(cells()[0].problem.model_config()).shape
    params = GATE_ARMS[0].with_own_parameters({"embed": jnp.ones(1)}, shape)
    assert set(params) == {"embed", EVICTION_GATE}
    assert params[EVICTION_GATE]["layers_1"]["kernel"].shape == (2, 34, 2)
