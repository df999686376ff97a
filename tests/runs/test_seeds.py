"""Seeds: each has different random numbers; invalid ones are refused before compilation."""

from typing import Any

import jax
import numpy as np
import pytest

from smd_jax.config import MAX_SEED
from smd_jax.eviction.policies import H2O
from smd_jax.sampler.fixed_batch import RolloutConfig
from smd_jax.tasks.build import TaskChoice
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.train.evaluation import Decode, EvaluationConfig
from smd_jax.train.grpo import GRPOConfig

ROLLOUT = RolloutConfig(max_new_tokens=4, budget=6, buffer=2)


def evaluation(seed: Any) -> EvaluationConfig:
    return EvaluationConfig(decodes=(Decode("h2o", H2O()),), rollout=ROLLOUT, prompt_width=4, seed=seed)


def loop(seed: Any) -> GRPOConfig:
    return GRPOConfig(prompts_per_step=2, group_size=2, prompt_width=4, policy=H2O(), rollout=ROLLOUT, seed=seed)


SEED_USERS = {
    "loop": loop,
    "evaluation": evaluation,
    "task": lambda seed: TaskChoice("reasoning_gym:chain_sum", seed=seed),
    "row order": lambda seed: batch_indices(10, 4, 0, seed),
    "parameters": lambda seed: random_params(tiny_model_config(num_layers=1), seed),
}


@pytest.mark.parametrize("where", SEED_USERS)
@pytest.mark.parametrize(
    ("seed", "message"), [(-1, "expected seed >= 0"), (2**32, "32 bits.*got 4294967296"), (2**63, "32 bits")]
)
def test_negative_and_too_large_seeds_are_refused(where: str, seed: int, message: str):
    with pytest.raises(ValueError, match=message):
        SEED_USERS[where](seed)
    SEED_USERS[where](MAX_SEED)


def test_seeds_have_different_keys_and_row_orders():
    keys = [jax.random.key_data(jax.random.key(seed)) for seed in (0, 1, 2**31, MAX_SEED)]
    assert len(np.unique(keys, axis=0)) == 4
    orders = [batch_indices(20, 20, step, seed) for seed in (0, 1, 2**31, MAX_SEED) for step in range(3)]
    assert len(np.unique(orders, axis=0)) == 12, "one per epoch and seed"


def test_reasoning_gym_refuses_a_negative_seed():
    with pytest.raises(
        ValueError, match="expected seed >= 0, a whole number .Python's generator takes -1 for 1.; got -1"
    ):
        ReasoningGymTask("chain_sum", seed=-1, size=3)
