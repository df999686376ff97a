"""PPO and online DPO on conversations: only the tokens that the policy sampled count."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.learner.forward import response_hidden
from smd_jax.learner.state import init_state
from smd_jax.model.value_head import add_value_head, values
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.testing import random_params
from smd_jax.train.conversations import EnvironmentConfig, TextCompaction
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.ppo import PPOConfig, PPOLoop
from tests.train import test_conversations as base

SHARED_FIELDS = ("prompts_per_step", "group_size", "prompt_width", "policy", "rollout")
SIZES: dict[str, Any] = {name: getattr(base.CONFIG, name) for name in SHARED_FIELDS}
PPO = PPOConfig(**SIZES, gamma=0.9, lam=0.8, whiten_advantages=False)
DPO = OnlineDPOConfig(**SIZES)


def new_loop(config: Any, **options: Any) -> Any:
    kind: Any = PPOLoop if isinstance(config, PPOConfig) else OnlineDPOLoop
    environment = EnvironmentConfig(
        environments=EnvironmentsHere(base.Judge), conversation=ConversationConfig(turns=4), **options
    )
    mesh = make_mesh(1, 1, 1)
    return kind(base.MODEL, base.Rows(), base.TOKENIZER, optax.adam(1e-3), config, mesh, environment=environment)


def ppo_params(scale: float) -> Any:
    params = add_value_head(random_params(base.MODEL.config), base.MODEL.config)
    head = params["value_head"]
    noise = jax.random.normal(jax.random.key(3), head["kernel"].shape)
    return {**params, "value_head": {**head, "kernel": scale * noise}}


@jax.jit
def critic_values(params: Any, policy_params: Any, trajectory: Any) -> jax.Array:
    return values(params, response_hidden(base.MODEL, policy_params, trajectory, trajectory.mask))


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_ppo_against_the_definition(credit: str):
    """GAE over the sampled tokens; tokens of the environment have advantage 0."""
    loop = new_loop(PPO, credit=credit)
    params = ppo_params(0.3)
    samples = loop.grade(loop.respond(params, jax.random.key(0), 0))
    trajectory = samples.trajectory
    batch, _ = loop.rollout_batch(params, samples, None)
    critic, sampled = (
        np.asarray(critic_values(params, loop.policy_params(params), trajectory)),
        np.asarray(trajectory.response_mask),
    )
    turns = np.asarray(trajectory.turns())
    assert turns.max() > 2
    for row in range(8):
        columns = np.flatnonzero(sampled[row])
        reward = np.zeros(len(columns))
        turn_rewards = samples.conversations[row].rewards
        if credit == "trajectory":
            reward[-1] = sum(turn_rewards)
        else:
            ends = [np.flatnonzero(turns[row, columns] == turn)[-1] for turn in range(1, len(turn_rewards) + 1)]
            reward[ends] = turn_rewards
        next_value = advantage = 0.0
        for step in range(len(columns) - 1, -1, -1):
            value = critic[row, columns[step]]
            advantage = reward[step] + 0.9 * next_value - value + 0.9 * 0.8 * advantage
            next_value = value
            np.testing.assert_allclose(np.asarray(batch.advantages)[row, columns[step]], advantage, atol=1e-4)
        assert not np.asarray(batch.advantages)[row, ~sampled[row]].any()


@pytest.mark.slow
def test_a_step_of_ppo():
    loop = new_loop(PPO, credit="turn")
    state = shard_tree(init_state(ppo_params(0.0), optax.adam(1e-3), jax.random.key(4)), make_mesh(1, 1, 1))
    state, metrics = loop.step(state)
    assert metrics["sampling/sampling_logp_difference/max"] <= 2e-5 and metrics["conversations/turns"] > 1
    assert metrics["loss/value_avg"] > 0 and metrics["grad_norm"] > 0


def test_a_step_of_online_dpo():
    """Pairs the best and worst conversations; log-probabilities of unsampled tokens do not change the update."""
    loop = new_loop(DPO)
    params = random_params(base.MODEL.config)

    def new_state() -> Any:
        own = jax.tree.map(jnp.copy, params)
        state = init_state(own, optax.adam(1e-3), jax.random.key(4), reference=jax.tree.map(jnp.copy, params))
        return shard_tree(state, make_mesh(1, 1, 1))

    samples = loop.grade(loop.respond(params, jax.random.key(0), 0))
    pairs = loop.pairs(samples)
    rewards = samples.rewards.reshape(2, 4)
    assert samples.rewards[np.asarray(pairs.chosen)].tolist() == rewards.max(axis=1).tolist()
    assert samples.rewards[np.asarray(pairs.rejected)].tolist() == rewards.min(axis=1).tolist()
    state, metrics = loop.learn(new_state(), samples)
    assert float(metrics["sampling/sampling_logp_difference/max"]) <= 2e-5 and float(metrics["grad_norm"]) > 0
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6), "the reference has the drawable tokens of the policy"
    unsampled = ~np.asarray(samples.trajectory.response_mask)
    changed = samples.trajectory.replace(logprobs=jnp.where(unsampled, -7.0, samples.trajectory.logprobs))
    same, _ = loop.learn(new_state(), samples._replace(trajectory=changed))
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)
    # With two steps per rollout, too, the guard runs before the first.
    twice = new_loop(dataclasses.replace(DPO, num_iterations=2))
    for difference in (1.0, np.nan):
        wrong = samples.trajectory.replace(logprobs=samples.trajectory.logprobs + difference)
        state, metrics = twice.learn(new_state(), samples._replace(trajectory=wrong))
        assert int(state.step) == 0 and not float(metrics["sampling/sampling_logp_difference/max"]) < 0.9


COMPACTION = TextCompaction(after_tokens=20, ask="?")


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (PPO, {"compaction": COMPACTION}, "expected compaction None with PPO"),
        (DPO, {"compaction": COMPACTION}, "expected credit 'trajectory' and compaction None with online DPO"),
        (DPO, {"credit": "turn"}, "expected credit 'trajectory' and compaction None with online DPO"),
        (dataclasses.replace(PPO, rollout=dataclasses.replace(base.ROLLOUT, eos_token_id=None)), {}, "to end a turn"),
    ],
)
def test_incompatible_options(config: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        new_loop(config, **options)
