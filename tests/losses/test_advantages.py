"""Advantages against TRL (golden/losses.json), and turn-level advantages by hand."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.advantages import EPSILON, Scale, group_relative, groups_with_signal, leave_one_out, turn_relative
from smd_jax.losses.dpo import best_worst
from smd_jax.metrics import reward_metrics
from tests import paths

GOLDEN = json.loads((paths.GOLDEN / "losses.json").read_text(encoding="utf-8"))
ESTIMATORS = {
    "group": group_relative,
    "batch": functools.partial(group_relative, scale="batch"),
    "none": functools.partial(group_relative, scale="none"),
    "rloo": leave_one_out,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_match_trl(name):
    ours = ESTIMATORS[name](jnp.array(GOLDEN["rewards"]), 3)
    np.testing.assert_allclose(ours, GOLDEN["advantages"][name], rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_have_no_advantage(name):
    np.testing.assert_array_equal(ESTIMATORS[name](jnp.full(6, 2.0), 3), np.zeros(6))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 992.37476, -31415.927])
def test_equal_rewards_with_a_rounded_mean_have_no_advantage(name, reward):
    """The mean of equal floats may differ from them; a deviation as small would turn that into an advantage."""
    rewards = jnp.full(20, reward, jnp.float32)
    rewarded = jnp.arange(20) != 3
    np.testing.assert_array_equal(ESTIMATORS[name](rewards, 10), np.zeros(20))
    np.testing.assert_array_equal(ESTIMATORS[name](rewards, 10, rewarded_rows=rewarded), np.zeros(20))
    turns = turn_relative(rewards.reshape(4, 5), jnp.ones((4, 5), bool), 2)
    np.testing.assert_array_equal(turns, np.zeros((4, 5)))
    metrics = reward_metrics(rewards, 10, rewarded)
    assert metrics["reward_std"] == metrics["reward_std_within_group"] == 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_may_be_booleans(name):
    correct = jnp.array([True, False, False, True, True, True])
    np.testing.assert_array_equal(ESTIMATORS[name](correct, 3), ESTIMATORS[name](correct.astype(jnp.float32), 3))
    narrow = ESTIMATORS[name](jnp.ones(6, jnp.bfloat16), 3, rewarded_rows=jnp.ones(6, bool))
    assert narrow.dtype == jnp.bfloat16


def test_groups_with_signal():
    rewards = jnp.array([1, 1, 0, 1, 0.1, 0.1, 0, 0, jnp.nan, 1])
    np.testing.assert_array_equal(groups_with_signal(rewards, 2), [False, True, False, False, False])
    # The mean of three floats 0.1 is not 0.1, so their deviation is not 0.
    np.testing.assert_array_equal(groups_with_signal(jnp.full(3, 0.1), 3), [False])
    np.testing.assert_array_equal(groups_with_signal(jnp.array([5.0, 5.0, 5.0, 4.0, 5.0, 5.0]), 3), [False, True])


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        (7, 4, "divides into groups of 4; got 7 rewards"),
        (4, 1, "groups of at least 2 completions, to compare them; got group_size 1"),
        (4, 0, "groups of at least 2 completions.*got group_size 0"),
    ],
)
def test_invalid_groups_raise(rewards, group_size, message):
    """A group of one has no advantage, so a run would silently learn nothing."""
    for function in (*ESTIMATORS.values(), groups_with_signal, best_worst):
        with pytest.raises(ValueError, match=message):
            function(jnp.zeros(rewards), group_size)


def test_turns_by_hand():
    """Group one has rewards 0, 2 | 1: mean 1, deviation 1. In group two only one conversation has a reward."""
    rewards = jnp.array([[0.0, 2.0], [1.0, 9.0], [4.0, 9.0], [9.0, 9.0]])
    answered = jnp.array([[True, True], [True, False], [True, False], [True, False]])
    rewarded = jnp.array([True, True, True, False])
    # All four rewards, 0, 2, 1 and 4, have a variance of 35 / 12.
    deviations: dict[Scale, float] = {"group": 1 + EPSILON, "batch": (35 / 12) ** 0.5 + EPSILON, "none": 1}
    for scale, deviation in deviations.items():
        found = turn_relative(rewards, answered, 2, scale, rewarded)
        np.testing.assert_allclose(found, [[0, 1 / deviation], [0, 0], [0, 0], [0, 0]], atol=1e-6)
