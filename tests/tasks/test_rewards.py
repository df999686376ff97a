"""What a reward function may give back, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.rewards import compute_rewards
from smd_jax.tasks.task import batch_columns


def returning(values):
    return lambda prompts, completions, **columns: values


def score(values):
    return compute_rewards(returning(values), ["p", "q"], ["a", "b"], {})


@pytest.mark.parametrize(
    "values",
    [[1, 0.5], (1.0, 0.5), np.array([1.0, 0.5]), jnp.array([1.0, 0.5]), [True, np.float16(0.5)], iter([1.0, 0.5])],
)
def test_numbers_of_every_kind_become_float32(values):
    rewards = score(values)
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [1.0, 0.5]


def test_columns_arrive_by_name():
    def matches(prompts, completions, answer, **others):
        assert others == {"level": [1, 2]}
        return [float(p + c == a) for p, c, a in zip(prompts, completions, answer, strict=True)]

    columns = {"answer": ["pa", "xx"], "level": [1, 2]}
    assert compute_rewards(matches, ["p", "q"], ["a", "b"], columns).tolist() == [1.0, 0.0]


def test_the_reward_of_a_task():
    task = ReasoningGymTask("distractor_sort", seed=0, size=4)
    rows = [task[0], task[1]]
    completions = [rows[0]["answer"], "no"]
    rewards = compute_rewards(task.reward, [row["prompt"] for row in rows], completions, batch_columns(rows))
    assert rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "expected 2 rewards, one per completion; got 1"),
        ([1.0, 0.0, 0.0], "expected 2 rewards, one per completion; got 3"),
        ([1.0, float("nan")], "finite float32 .* row 1 got nan"),
        ([float("-inf"), 0.0], "finite float32 .* row 0 got -inf"),
        ([0.0, 1e39], r"finite float32 .* row 1 got 1e\+39"),
        ([None, 1.0], "number .* row 0 got None"),
        ([1.0, "1.0"], "number .* row 1 got '1.0'"),
        ([1.0, [1.0]], r"number .* row 1 got \[1.0\]"),
    ],
)
def test_bad_rewards(values, message):
    with pytest.raises(ValueError, match=message):
        score(values)


def test_prompts_and_columns_must_be_as_many_as_the_completions():
    with pytest.raises(ValueError, match="expected 2 values in 'prompts', one per completion; got 1"):
        compute_rewards(returning([0, 0]), ["p"], ["a", "b"], {})
    with pytest.raises(ValueError, match="expected 2 values in 'answer', one per completion; got 3"):
        compute_rewards(returning([0, 0]), ["p", "q"], ["a", "b"], {"answer": [1, 2, 3]})
