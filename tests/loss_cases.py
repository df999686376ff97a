"""Policy losses under test, in one table: every loss in it gets all invariance tests."""

from dataclasses import replace

import jax
import pytest

from smd_jax.losses import named
from smd_jax.losses.policy import LossConfig, LossInputs, policy_loss

# GSPO is GRPO at the level "geometric", which CONFIGS has for every loss.
LOSSES = {name: make for name, make in named.LOSSES.items() if name != "gspo"}

NAMES = pytest.mark.parametrize("name", LOSSES)

CONFIGS = {
    f"{name}-{level}": replace(make(beta=0.1), ratio_level=level)
    for name, make in LOSSES.items()
    for level in ("token", "geometric")
}
EVERY_LOSS = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def loss_of(logprobs, inputs: LossInputs, config: LossConfig):
    return policy_loss(inputs.replace(logprobs=logprobs), config)[0]


def gradient(inputs: LossInputs, config: LossConfig):
    return jax.grad(loss_of)(inputs.logprobs, inputs, config)


def loss_and_gradient(inputs: LossInputs, config: LossConfig):
    return jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
