"""Arrays of wrong shape at the doors of losses: refused by name, where broadcasting would make a number of them."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

from smd_jax.losses.dpo import DPOConfig, DPOInputs, dpo_loss
from smd_jax.losses.policy import LossConfig, LossInputs, policy_loss
from smd_jax.shapes import check_shape

TOKENS = jnp.zeros((4, 6))
GOOD = LossInputs(TOKENS, TOKENS, None, jnp.zeros(4), TOKENS)
GOOD_PAIRS = DPOInputs(*[jnp.zeros(4)] * 5)

# Under pytest, jaxtyping refuses these before the functions themselves can: what a user sees is seen without it.
WITHOUT_JAXTYPING = """
import jax.numpy as jnp
import numpy as np
from smd_jax import losses
from smd_jax.losses.policy import eviction_loss
from smd_jax.losses.value import terminal_rewards, whiten

row, tokens, mask = jnp.zeros(4), jnp.zeros((4, 6)), jnp.ones((4, 6), bool)
for call in (
    lambda: losses.group_relative(jnp.zeros((4, 1)), 2),
    lambda: losses.leave_one_out(jnp.zeros(()), 2),
    lambda: losses.groups_with_signal(tokens, 2),
    lambda: losses.best_worst(tokens, 2),
    lambda: terminal_rewards(jnp.zeros((4, 1)), mask),
    lambda: whiten(row, mask),
    lambda: losses.gae(tokens, jnp.zeros((4, 1)), mask),
    lambda: losses.gae(jnp.zeros(6), tokens, mask),
    lambda: losses.value_loss(tokens, tokens, jnp.zeros(6), tokens, losses.ValueConfig()),
    lambda: losses.SequenceMean().weights(jnp.ones(4, bool)),
    lambda: losses.TokenMean().weights(mask, jnp.ones(6, bool)),
    lambda: eviction_loss(jnp.zeros((4, 1, 1, 2)), jnp.zeros((4, 1, 1, 2)), tokens, jnp.zeros((4, 2))),
):
    try:
        call()
    except ValueError as error:
        print(error)
    else:
        print("accepted")
rewards = np.array([1.0, 0.0])  # NumPy arrays give the same advantages
print(losses.leave_one_out(rewards, 2), losses.group_relative(rewards, 2, "none"))
"""
MESSAGES = [
    "expected rewards of shape [batch]; got [4, 1]",
    "expected rewards of shape [batch]; got []",
    "expected rewards of shape [batch]; got [4, 6]",
    "expected rewards of shape [batch]; got [4, 6]",
    "expected rewards of shape [4]; got [4, 1]",
    "expected advantages of shape [4, 6]; got [4]",
    "expected values of shape [4, 6]; got [4, 1]",
    "expected rewards of shape [4, 6]; got [6]",
    "expected returns of shape [4, 6]; got [6]",
    "expected mask of shape [batch, R]; got [4]",
    "expected counted_rows of shape [4]; got [6]",
    "expected advantages of shape [4]; got [4, 6]",
    "[ 1. -1.] [ 0.5 -0.5]",
]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("advantages", (1,), r"expected advantages of shape \[4\] or \[4, 6\]; got \[1\]"),
        ("advantages", (), r"expected advantages of shape \[4\] or \[4, 6\]; got \[\]"),
        ("advantages", (4, 1), r"expected advantages of shape \[4\] or \[4, 6\]; got \[4, 1\]"),
        ("old_logprobs", (6,), r"expected old_logprobs of shape \[4, 6\]; got \[6\]"),
        ("reference_logprobs", (4, 1), r"expected reference_logprobs of shape \[4, 6\]; got \[4, 1\]"),
        ("weights", (4,), r"expected weights of shape \[4, 6\]; got \[4\]"),
        ("correction_weights", (1, 6), r"expected correction_weights of shape \[4, 6\]; got \[1, 6\]"),
        ("logprobs", (6,), r"expected logprobs of shape \[batch, R\]; got \[6\]"),
    ],
)
def test_policy_loss(name, shape, message):
    policy_loss(GOOD, LossConfig())
    with pytest.raises(ValueError, match=message):
        policy_loss(GOOD.replace(**{name: jnp.zeros(shape)}), LossConfig())


@pytest.mark.parametrize("name", ["rejected_logprobs", "reference_chosen_logprobs", "weights"])
def test_dpo_loss(name):
    dpo_loss(GOOD_PAIRS, DPOConfig())
    with pytest.raises(ValueError, match=rf"expected {name} of shape \[4\]; got \[1\]"):
        dpo_loss(GOOD_PAIRS.replace(**{name: jnp.zeros(1)}), DPOConfig())


def test_the_other_doors():
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAXTYPING], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == MESSAGES


def test_what_is_optional_may_be_missing():
    check_shape("reference_logprobs", None, (4, 6))
