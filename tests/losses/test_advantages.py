"""Advantages by hand and against TRL's (golden/losses.json)."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.advantages import EPSILON, Scale, group_relative, groups_with_signal, leave_one_out, turn_relative
from smd_jax.losses.dpo import best_worst
from tests import paths

GOLDEN = json.loads((paths.GOLDEN / "losses.json").read_text(encoding="utf-8"))
ESTIMATORS = {
    "group": group_relative,
    "batch": functools.partial(group_relative, scale="batch"),
    "none": functools.partial(group_relative, scale="none"),
    "rloo": leave_one_out,
}

REWARDS = jnp.array([1.0, 0.0, 0.0, 1.0, 5.0, 1.0, 3.0, 3.0])  # group means 0.5 and 3
CENTRED = np.array([0.5, -0.5, -0.5, 0.5, 2.0, -2.0, 0.0, 0.0])


def test_each_group_by_its_own_deviation():
    # Bessel: 4 * 0.25 / 3 and 8 / 3
    deviation = np.repeat([np.sqrt(1 / 3), np.sqrt(8 / 3)], 4)
    np.testing.assert_allclose(group_relative(REWARDS, 4), CENTRED / (deviation + EPSILON), rtol=1e-6)


def test_all_groups_by_the_deviation_of_the_batch():
    # mean 1.75; the squares of the differences sum to 2 * 1.75² + 3 * 0.75² + 2 * 1.25² + 3.25² = 21.5
    deviation = np.sqrt(21.5 / 7)
    np.testing.assert_allclose(group_relative(REWARDS, 4, "batch"), CENTRED / (deviation + EPSILON), rtol=1e-6)


def test_without_a_deviation():
    np.testing.assert_allclose(group_relative(REWARDS, 4, "none"), CENTRED, rtol=1e-6)


def test_groups_are_contiguous():
    np.testing.assert_allclose(group_relative(jnp.array([0.0, 2.0, 10.0, 20.0]), 2, "none"), [-1, 1, -5, 5])


def test_leave_one_out_by_hand():
    # The others' means: of 1, 0, 0, 1 they are 1/3 and 2/3; of 5, 1, 3, 3 they are 7/3, 11/3, 3 and 3.
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 8 / 3, -8 / 3, 0, 0]
    np.testing.assert_allclose(leave_one_out(REWARDS, 4), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(leave_one_out(REWARDS, 4), group_relative(REWARDS, 4, "none") * 4 / 3, rtol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_trl(name):
    ours = ESTIMATORS[name](jnp.array(GOLDEN["rewards"]), 3)
    np.testing.assert_allclose(ours, GOLDEN["advantages"][name], rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_follow_their_completions(name):
    order = np.array([6, 4, 7, 5, 1, 0, 3, 2])  # groups swapped, completions shuffled within theirs
    expected = ESTIMATORS[name](REWARDS, 4)[order]
    np.testing.assert_allclose(ESTIMATORS[name](REWARDS[order], 4), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_have_no_advantage(name):
    np.testing.assert_array_equal(ESTIMATORS[name](jnp.full(6, 2.0), 3), np.zeros(6))


def test_which_groups_carry_signal():
    rewards = jnp.array([1, 1, 0, 1, 0.1, 0.1, 0, 0, jnp.nan, 1])
    np.testing.assert_array_equal(groups_with_signal(rewards, 2), [False, True, False, False, False])
    # Three times 0.1 has another mean than 0.1, and so a deviation: only the order tells that they are equal.
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
def test_bad_groups(rewards, group_size, message):
    """A group of one has no advantage whatever the scale: such a run would learn nothing, in silence."""
    for function in (*ESTIMATORS.values(), groups_with_signal, best_worst):
        with pytest.raises(ValueError, match=message):
            function(jnp.zeros(rewards), group_size)


def test_turns_by_hand():
    """Group one has rewards 0, 2 | 1: mean 1, deviation 1. In group two one conversation alone has a reward."""
    rewards = jnp.array([[0.0, 2.0], [1.0, 9.0], [4.0, 9.0], [9.0, 9.0]])
    answered = jnp.array([[True, True], [True, False], [True, False], [True, False]])
    rewarded = jnp.array([True, True, True, False])
    # All four rewards, 0, 2, 1 and 4, have a variance of 35 / 12.
    deviations: dict[Scale, float] = {"group": 1 + EPSILON, "batch": (35 / 12) ** 0.5 + EPSILON, "none": 1}
    for scale, deviation in deviations.items():
        found = turn_relative(rewards, answered, 2, scale, rewarded)
        np.testing.assert_allclose(found, [[0, 1 / deviation], [0, 0], [0, 0], [0, 0]], atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_single_turns_is_group_relative_without_turns(scale):
    one = turn_relative(REWARDS[:, None], jnp.ones((8, 1), bool), 4, scale)
    np.testing.assert_allclose(one[:, 0], group_relative(REWARDS, 4, scale), rtol=1e-6)
