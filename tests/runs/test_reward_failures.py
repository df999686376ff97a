"""Training leaves out completions on which a reward function failed, and continues."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.advantages import EPSILON, group_relative, groups_with_signal, leave_one_out
from smd_jax.losses.dpo import best_worst
from smd_jax.metrics import reward_metrics
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.rewards import Rewards, RewardWarning
from smd_jax.train.grading import part_metrics
from smd_jax.train.grpo import GRPOLoop
from smd_jax.train.samples import select_groups
from tests import toy_loop
from tests.toy_loop import CONFIG, MODEL, TASK, TOKENIZER, new_loop, new_state, optimizer

# Four groups of four. One completion of the first, three of the second and all of the last have no reward.
NAN = float("nan")
REWARDS = np.array([1, 3, NAN, 5, NAN, 2, NAN, NAN, 7, 7, 1, 1, NAN, NAN, NAN, NAN], np.float32)
REWARDED = jnp.asarray(~np.isnan(REWARDS))


# --- hand-worked cases


@pytest.mark.parametrize(
    ("estimator", "first", "third"),
    [
        # Among 1, 3, 5: mean 3, squares 4 + 0 + 4 over 2. Among 7, 7, 1, 1: mean 4, four times 9 over 3.
        (group_relative, np.array([-2, 0, 0, 2]) / (2 + EPSILON), np.array([3, 3, -3, -3]) / (np.sqrt(12) + EPSILON)),
        (functools.partial(group_relative, scale="none"), [-2, 0, 0, 2], [3, 3, -3, -3]),
        # The others' means: 4, 3, 2; and 3, 3, 5, 5.
        (leave_one_out, [1 - 4, 3 - 3, 0, 5 - 2], [7 - 3, 7 - 3, 1 - 5, 1 - 5]),
    ],
)
def test_advantages_compare_rewarded_completions(estimator, first, third):
    advantages = estimator(jnp.asarray(REWARDS), 4, rewarded_rows=REWARDED)
    expected = [*first, 0, 0, 0, 0, *third, 0, 0, 0, 0]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-6)
    # Equals a group of the three completions with a reward.
    np.testing.assert_allclose(advantages[jnp.array([0, 1, 3])], estimator(jnp.array([1.0, 3, 5]), 3), rtol=1e-6)


def test_batch_scaling_uses_rewarded_completions():
    # 1 3 5 2 7 7 1 1: mean 27/8, squares 139 - 27²/8 over 7.
    deviation = np.sqrt((139 - 27**2 / 8) / 7) + EPSILON
    advantages = group_relative(jnp.asarray(REWARDS), 4, "batch", REWARDED)
    expected = np.array([-2, 0, 0, 2, 0, 0, 0, 0, 3, 3, -3, -3, 0, 0, 0, 0]) / deviation
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_groups_with_signal_and_pairs_of_rewarded_completions():
    assert groups_with_signal(jnp.asarray(REWARDS), 4, REWARDED).tolist() == [True, False, True, False]
    pairs = best_worst(jnp.asarray(REWARDS), 4, REWARDED)
    assert pairs.signal.tolist() == [True, False, True, False]
    assert (int(pairs.chosen[0]), int(pairs.rejected[0])) == (3, 0)
    assert (int(pairs.chosen[2]), int(pairs.rejected[2])) == (8, 11)


def test_reward_metrics_of_rewarded_completions():
    got = {name: float(value) for name, value in reward_metrics(jnp.asarray(REWARDS), 4, REWARDED).items()}
    assert got["reward"] == pytest.approx(27 / 8)
    assert got["reward_std"] == pytest.approx(np.sqrt((139 - 27**2 / 8) / 7))
    # 2, 0 for the single reward, √12; the last group has no rewards and does not count.
    assert got["reward_std_within_group"] == pytest.approx((2 + 0 + np.sqrt(12)) / 3)
    assert got["frac_reward_zero_std"] == 0.5, "two of the four give no gradient"


def test_metrics_of_one_reward_function():
    def mean_and_std(*rewards):
        got = part_metrics("f", np.array(rewards, np.float32))
        return float(got["rewards/f/mean"]), float(got["rewards/f/std"])

    assert mean_and_std(1, NAN, 4, 1) == (2.0, pytest.approx(np.sqrt(3)))
    assert mean_and_std(NAN, 3) == (3.0, 0.0)
    assert np.isnan(mean_and_std(NAN)).all()


# --- the loop


def reward_raising_on(texts):
    """The task's reward, which raises if a completion is one of the texts."""

    def moody(prompts, completions, **columns):
        if not texts.isdisjoint(completions):
            raise ZeroDivisionError("on purpose")
        return TASK.reward(prompts, completions, **columns)

    return moody


@functools.cache
def first_rollout():
    """Samples of the first rollout, and the row of a completion whose text is unique."""
    samples = new_loop().collect(new_state(), 0)
    texts = samples.completions
    return samples, next(row for row, text in enumerate(texts) if texts.count(text) == 1)


def loop_with(*functions, **options):
    loop = toy_loop.own_loop()
    loop = dataclasses.replace(loop, rewards=Rewards(functions, seconds=None, **options))
    toy_loop.share_programs(loop)
    return loop


@pytest.mark.slow
def test_training_continues_when_a_reward_function_raises():
    samples, row = first_rollout()
    loop = loop_with(reward_raising_on({samples.completions[row]}))
    with pytest.warns(RewardWarning, match=f"reward 'moody' failed on completion {row}: ZeroDivisionError: on purpose"):
        got = loop.collect(new_state(), 0)
    expected = samples.rewards.copy()
    expected[row] = np.nan
    np.testing.assert_array_equal(got.rewards, expected)
    np.testing.assert_array_equal(got.reward_parts["moody"], expected)
    assert got.counted_rows.tolist() == [i != row for i in range(8)]
    assert got.metrics["rewards/failed"] == 1
    assert float(got.metrics["reward"]) == pytest.approx(np.nanmean(expected))
    state, metrics = loop.step(new_state())
    assert metrics["rewards/failed"] == 1 and metrics["rewards/moody/mean"] == metrics["reward"]
    state, metrics = loop.step(state)
    assert int(state.step) == 2
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_the_batch_ignores_the_failed_completion():
    """The other completions of its group have the advantages of a group of three, by hand."""
    samples, row = first_rollout()
    failed = samples.rewards.copy()
    failed[row] = np.nan
    counted = ~np.isnan(failed)
    loop = new_loop()
    with jax.set_mesh(loop.mesh):
        params = new_state().params
        batch, _ = loop.rollout_batch(params, samples._replace(rewards=failed, counted_rows=counted), None)
    advantages = np.zeros(8, np.float32)
    for first in (0, 4):
        rows = first + np.flatnonzero(counted[first : first + 4])
        group = failed[rows].astype(np.float64)
        advantages[rows] = (group - group.mean()) / (group.std(ddof=1) + EPSILON)
    np.testing.assert_allclose(batch.advantages, advantages, atol=1e-6)
    np.testing.assert_array_equal(batch.counted_rows, counted)


def test_rewards_of_several_functions_are_summed_and_measured():
    def longest(completion_ids):
        return [len(ids) for ids in completion_ids]

    loop = loop_with(TASK.reward, longest, weights=(1.0, 0.5))
    samples, _ = first_rollout()
    got = loop.collect(new_state(), 0)
    lengths = np.asarray(samples.trajectory.lengths())
    np.testing.assert_array_equal(got.reward_parts["longest"], lengths)
    np.testing.assert_allclose(got.rewards, samples.rewards + 0.5 * lengths, rtol=1e-6)
    assert got.metrics["rewards/longest/mean"] == pytest.approx(lengths.mean())
    assert got.metrics["rewards/longest/std"] == pytest.approx(lengths.std(ddof=1))
    assert got.counted_rows.all()


def test_a_reward_with_an_unknown_parameter_is_refused_before_sampling():
    def greedy(completions, trainer_state):
        return [0.0]

    with pytest.raises(ValueError, match="expected reward 'greedy' to ask for some of .*'metadata'.*trainer_state"):
        loop_with(greedy)


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_different_fields(seed):
    """Odd rows have an answer, even rows have tests."""
    rows, seen = [{"prompt": "12=", "tests": "x"}, {"prompt": "12=", "answer": "12"}] * 4, []

    def by_tests(completions, tests):
        seen.append(tests)
        return [None if one is None else 1.0 for one in tests]

    def by_answer(completions, answer, **columns):
        assert columns.keys() == {"prompts", "completion_ids", "tests"}, "also if no row of the batch has tests"
        return [None if one is None else 2.0 for one in answer]

    rewards = Rewards((by_tests, by_answer), seconds=None)
    config = dataclasses.replace(CONFIG, seed=seed)
    loop = GRPOLoop(MODEL, DatasetTask(rows), TOKENIZER, optimizer(), config, rewards=rewards)
    for index in range(2):
        rewarded = loop.collect(new_state(), index)
        assert rewarded.rewards.tolist() == [2.0 if "answer" in row else 1.0 for row in rewarded.task_rows]
    assert {type(one) for tests in seen for one in tests} == {str, type(None)}
    # A batch without tests.
    graded = rewards.grade(["12="], ["1"], [[1]], {"answer": ["12"]})
    assert graded.rewards.tolist() == [2.0] and seen[-1] == [None]


def rollout_with(rewards, part):
    """The first rollout with these rewards, and with those of a reward function `f`."""
    rewards, part = np.array(rewards, np.float32), np.array(part, np.float32)
    failed = {"rewards/failed": jnp.float32(np.isnan(rewards).sum())}
    rewarded = ~np.isnan(rewards)
    metrics = reward_metrics(jnp.asarray(rewards), 4, jnp.asarray(rewarded))
    metrics |= part_metrics("f", part) | failed
    samples = first_rollout()[0]
    changed = {"rewards": rewards, "counted_rows": rewarded, "reward_parts": {"f": part}}
    return samples._replace(**changed, metrics=samples.metrics | metrics)


def test_dynamic_sampling_selects_groups_by_their_rewards():
    # The second group of the first rollout has no signal: its remaining rewards are equal.
    rewards = np.array([[1, NAN, 0, 1, 2, 2, NAN, 2], [0, 0, 0, 0, NAN, NAN, 3, 4]])
    got = select_groups([rollout_with(row, row + 10) for row in rewards], group_size=4, groups=2)
    assert np.isnan(got.rewards).tolist() == [False, True, False, False, True, True, False, False]
    assert got.rewards[~np.isnan(got.rewards)].tolist() == [1, 0, 1, 3, 4]
    np.testing.assert_array_equal(got.counted_rows, ~np.isnan(got.rewards))
    np.testing.assert_array_equal(got.reward_parts["f"], got.rewards + 10)
    assert float(got.metrics["rewards/failed"]) == 4, "failures of all sampled completions"


def test_dynamic_sampling_pools_the_rewards_of_all_rollouts():
    """One rollout has no reward, and the pooled deviation exceeds those of single rollouts."""
    parts = (([NAN] * 8, [NAN] * 8), ([0] * 8, [1, 3] * 4), ([0, 4] * 4, [NAN] * 8))
    got = select_groups([rollout_with(*each) for each in parts], group_size=4, groups=2)
    expected = {
        "reward": 1.0,
        "reward_std": np.std([0] * 12 + [4] * 4, ddof=1),
        "rewards/f/mean": 2.0,
        "rewards/f/std": np.std([1, 3] * 4, ddof=1),
    }
    assert {name: float(got.metrics[name]) for name in expected} == pytest.approx(expected)
