"""PPO, online DPO and evaluation on conversations: only the tokens that the policy sampled count."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.environments.respondent import EnvironmentRespondent
from smd_jax.eviction.policies import Dense, SnapKV
from smd_jax.learner.forward import response_hidden
from smd_jax.learner.state import init_state
from smd_jax.message.quantization import QuantConfig
from smd_jax.model.value_head import add_value_head, values
from smd_jax.sampler.conversation_loop import ConversationConfig, converse
from smd_jax.tasks.rewards import Rewards, TooManyFailures
from smd_jax.testing import random_params
from smd_jax.train.conversations import EnvironmentConfig, TextCompaction
from smd_jax.train.evaluation import Decode, EvaluationConfig, Evaluator
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.ppo import PPOConfig, PPOLoop
from tests.train import test_conversations as base

SHARED_FIELDS = ("prompts_per_step", "group_size", "prompt_width", "policy", "rollout")
SIZES: dict[str, Any] = {name: getattr(base.CONFIG, name) for name in SHARED_FIELDS}
PPO = PPOConfig(**SIZES, gamma=0.9, lam=0.8, whiten_advantages=False)
DPO = OnlineDPOConfig(**SIZES)
CONVERSATION = ConversationConfig(turns=4)


def judged(**options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(environments=EnvironmentsHere(base.Judge), conversation=CONVERSATION, **options)


def new_loop(config: Any, **options: Any) -> Any:
    kind: Any = PPOLoop if isinstance(config, PPOConfig) else OnlineDPOLoop
    sizes: Any = {"mesh": make_mesh(1, 1, 1), "environment": judged(**options)}
    return kind(base.MODEL, base.Rows(), base.TOKENIZER, optax.adam(1e-3), config, **sizes)


def ppo_params(scale: float) -> Any:
    params = add_value_head(random_params(base.MODEL.config), base.MODEL.config)
    head = params["value_head"]
    noise = jax.random.normal(jax.random.key(3), head["kernel"].shape)
    return {**params, "value_head": {**head, "kernel": scale * noise}}


@jax.jit
def critic_values(params: Any, policy_params: Any, trajectory: Any) -> jax.Array:
    return values(params, response_hidden(base.MODEL, policy_params, trajectory, trajectory.mask))


@pytest.mark.parametrize("credit", ["trajectory", pytest.param("turn", marks=pytest.mark.slow)])
def test_ppo_against_the_definition(credit: str):
    """GAE over the sampled tokens; tokens of the environment have advantage 0."""
    loop = new_loop(PPO, credit=credit)
    params = ppo_params(0.3)
    samples = loop.grade(loop.respond(params, jax.random.key(0), 0))
    trajectory = samples.trajectory
    batch, _ = loop.rollout_batch(params, samples, None)
    critic = np.asarray(critic_values(params, loop.policy_params(params), trajectory))
    sampled = np.asarray(trajectory.response_mask)
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


@pytest.mark.slow
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


# --- evaluation

DECODES = (Decode("dense"), Decode("sampler", SnapKV(window=4)))
PARAMS = random_params(base.MODEL.config)


class ThreeRows(base.Rows):
    def __len__(self) -> int:
        return 3


def new_evaluator(kind: str = "judges", decodes: Any = DECODES, rewards: Any = None, **options: Any) -> Evaluator:
    config = EvaluationConfig(decodes=decodes, rollout=base.ROLLOUT, prompt_width=8, group_size=2, rows=4, seed=3)
    rows = ThreeRows(kind)
    return Evaluator(base.MODEL, rows, base.TOKENIZER, config, rewards=rewards, environment=judged(**options))


@pytest.mark.slow
@pytest.mark.parametrize("decodes", [DECODES, DECODES[1:]])
def test_evaluation_equals_direct_conversations(decodes: Any):
    """The second batch has padding rows, which do not count."""
    evaluator = new_evaluator(decodes=decodes)
    rows = [ThreeRows()[index] for index in range(3)]
    for decode, result in zip(decodes, evaluator.run(PARAMS), strict=True):
        assert result.rewards.shape == (3, 2) and len(result.completions) == 3
        environments, dialogue = EnvironmentsHere(base.Judge), Dialogue(base.TOKENIZER)
        respondent = EnvironmentRespondent(environments, dialogue, base.TOKENIZER, rows, 2, 8)
        inputs: Any = base.MODEL, PARAMS, respondent.prompts, evaluator._keys(np.arange(3)), respondent
        sizes: Any = {"policy": decode.policy, "config": decode.rollout(base.ROLLOUT), "group_size": 2}
        conversed = converse(*inputs, **sizes, conversation=CONVERSATION)
        expected = [each.reward for each in respondent.conversations]
        np.testing.assert_allclose(result.rewards.reshape(-1), expected)
        np.testing.assert_array_equal(result.lengths.reshape(-1), conversed.trajectory.lengths())
        np.testing.assert_array_equal(~result.clipped.reshape(-1), conversed.trajectory.terminated)
        assert result.metrics[f"eval/{decode.name}/reward"] == pytest.approx(np.mean(expected))
        assert any("(1)" in text for texts in result.completions for text in texts)


def test_evaluation_of_several_contexts():
    """Sizes as in the loop's tests, to share their programs."""
    evaluator = new_evaluator(decodes=DECODES[1:], compaction=TextCompaction(contexts=2, after_tokens=3, ask="?!?"))
    sizes: dict[str, Any] = {"rollout": base.WIDER.rollout, "prompt_width": 32, "group_size": 4, "rows": 8}
    (result,) = dataclasses.replace(evaluator, config=dataclasses.replace(evaluator.config, **sizes)).run(PARAMS)
    assert result.rewards.shape == result.lengths.shape == result.clipped.shape == (3, 4)
    assert any("?!?" in text for texts in result.completions for text in texts)


def test_failed_environments():
    with pytest.warns(UserWarning, match="no disk"), pytest.raises(TooManyFailures, match="no disk"):
        new_evaluator("fails", DECODES[:1]).run(PARAMS)
    with pytest.warns(UserWarning, match="no disk"):
        (result,) = new_evaluator("fails", DECODES[:1], max_failed=1.0).run(PARAMS)
    assert np.isnan(result.rewards).all() and np.isnan(result.reward)


def test_incompatible_options_of_an_evaluation():
    with pytest.raises(ValueError, match="expected quant None in a conversation"):
        new_evaluator(decodes=(Decode("small", Dense(), quant=QuantConfig(bits=8, group=4)),))
    with pytest.raises(ValueError, match="expected no rewards with an environment"):
        new_evaluator(rewards=Rewards((base.Rows().reward,), seconds=None))
