"""Pairs of a group: by hand and under permutations."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.losses.dpo import Pairs, best_worst


def listed(pairs: Pairs) -> tuple[list[int], list[int], list[bool]]:
    return pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.signal.tolist()


# --- by rewards


def test_best_and_worst_by_hand():
    rewards = jnp.array([0.5, 2.0, -1.0, 3.0, 0.0, 1.0])
    assert listed(best_worst(rewards, 3)) == ([1, 3], [2, 4], [True, True])
    assert listed(best_worst(rewards, 2)) == ([1, 3, 5], [0, 2, 4], [True] * 3)
    assert listed(best_worst(rewards, 6)) == ([3], [2], [True])


def test_of_equal_ones_the_first_is_chosen_and_the_last_rejected():
    rewards = jnp.array([0.0, 1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 2.0])
    assert listed(best_worst(rewards, 4)) == ([1, 4], [3, 7], [True, False])


def test_a_reward_that_is_nan_gives_no_signal():
    assert best_worst(jnp.array([jnp.nan, 1.0, 0.0, 1.0]), 2).signal.tolist() == [False, True]


def test_the_difference_may_be_one_bit():
    value = np.float32(0.1)
    rewards = jnp.asarray(np.array([value, np.nextafter(value, np.float32(1)), value, value], np.float32))
    assert listed(best_worst(rewards, 2)) == ([1, 2], [0, 3], [True, False])


@dataclasses.dataclass(frozen=True)
class Group:
    """Rewards of one group, and where each completion goes."""

    rewards: tuple[int, ...]
    order: tuple[int, ...]


@st.composite
def batches(draw):
    size = draw(st.integers(2, 5))
    rewards = st.lists(st.integers(-3, 3), min_size=size, max_size=size)
    groups = draw(st.lists(st.tuples(rewards, st.permutations(range(size))), min_size=1, max_size=4))
    places = draw(st.permutations(range(len(groups))))
    return size, [Group(tuple(r), tuple(o)) for r, o in groups], list(places)


@settings(max_examples=50, deadline=None)
@given(batches())
def test_pairs_follow_their_rows(spec):
    """Groups in another order, completions in another order within theirs: rows are renamed and nothing else."""
    size, groups, places = spec
    rewards = np.array([group.rewards for group in groups], np.float32).reshape(-1)
    moved = np.concatenate([size * place + np.array(groups[place].order) for place in places])
    one, other = best_worst(jnp.asarray(rewards), size), best_worst(jnp.asarray(rewards[moved]), size)
    np.testing.assert_array_equal(other.signal, np.asarray(one.signal)[places])
    for name in ("chosen", "rejected"):
        before, after = np.asarray(getattr(one, name))[places], moved[np.asarray(getattr(other, name))]
        np.testing.assert_array_equal(rewards[after], rewards[before])
        unique = [groups[p].rewards.count(int(rewards[row])) == 1 for p, row in zip(places, before, strict=True)]
        np.testing.assert_array_equal(after[unique], before[unique])
    assert (np.asarray(one.chosen) // size == np.arange(len(groups))).all()
    assert (np.asarray(one.chosen) != np.asarray(one.rejected)).all()
