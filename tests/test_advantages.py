"""Group-relative advantages by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.advantages import EPSILON, group_relative

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


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage(scale):
    np.testing.assert_array_equal(group_relative(jnp.full(6, 2.0), 3, scale), np.zeros(6))


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        (7, 4, "divides into groups of 4; got 7 rewards"),
        (4, 1, "groups of at least 2 completions, because .* less the mean of its group; got group_size 1"),
        (1, 1, "groups of at least 2 completions.*got group_size 1"),
        (4, 0, "groups of at least 2 completions.*got group_size 0"),
    ],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_bad_groups(rewards, group_size, scale, message):
    """A group of one has no advantage whatever the scale: such a run would learn nothing, in silence."""
    with pytest.raises(ValueError, match=message):
        group_relative(jnp.zeros(rewards), group_size, scale)
