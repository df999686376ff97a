"""The study of learned eviction: parameters that each arm adds and trains."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from learned_eviction import GATE_SPEED, GATES, GateArm
from lib.problems import problem_of
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.model.decoder import Decoder

pytestmark = pytest.mark.study

ARMS = [arm for arms in GATES.values() for arm in arms]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_parameters_that_an_arm_trains(arm: Any):
    gate_moves = GATE_SPEED if arm.trains_gate else 0.0
    params: Any = {"embed": {"embedding": jnp.ones(2)}, EVICTION_GATE: {"layers_0": {"kernel": jnp.ones(3)}}}
    optimizer = arm.optimizer(lambda factor: optax.sgd(factor))
    updates: Any = optimizer.update(params, optimizer.init(params), params)[0]
    assert updates["embed"]["embedding"].tolist() == [-1.0] * 2
    assert updates[EVICTION_GATE]["layers_0"]["kernel"].tolist() == [-gate_moves] * 3
    assert arm.update.eviction_coef == (1.0 if arm.trains_gate else 0.0) and arm.update.policy_coef == 1.0
    assert arm.is_exact


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_parameters_that_an_arm_adds(arm: GateArm):
    shape = Decoder(problem_of("sorting-12").model_config()).shape
    params = arm.with_own_parameters({"embed": jnp.ones(1)}, shape)
    if arm.name.startswith("attention"):
        assert set(params) == {"embed"}
        optimizer = arm.optimizer(lambda factor: optax.sgd(factor))
        updates: Any = optimizer.update(params, optimizer.init(params), params)[0]
        assert updates["embed"].tolist() == [-1.0]
    else:
        assert params[EVICTION_GATE]["layers_1"]["kernel"].shape == (2, 34, 2)
