"""PPO: one step against its definition, corrections, and the loop on a toy-sized task."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import OPSM, Bypass, Chain, CorrectionInputs, Naive, Shadow
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig, Visibility
from smd_jax.learner.evictions import EvictionTerm
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.named import gspo
from smd_jax.losses.value import ValueConfig
from smd_jax.model.teacher_forced import apply_model, hidden_states
from smd_jax.model.value_head import VALUE_HEAD, add_value_head
from smd_jax.tasks.task import Task
from smd_jax.testing import count_compilations
from smd_jax.text.prompts import Tokenizer
from smd_jax.train.ppo import PPOConfig, PPOLoop, make_train_batch
from tests import tiny_update
from tests.bitwise import assert_bitwise_equal
from tests.corrections.test_corrections import CORRECTIONS
from tests.documented_metrics import METRICS, documented
from tests.tiny_update import LENGTH, MODEL, PARAMS, ROWS, TEMPERATURE, WIDTH, distance, trajectory
from tests.toy_loop import MODEL as LOOP_MODEL
from tests.toy_loop import ROLLOUT, SEVENS, TASK, TOKENIZER, Sevens, optimizer, run, share_programs, warm_params

CONFIG = PPOConfig(prompts_per_step=4, group_size=2, prompt_width=WIDTH, policy=H2O(), rollout=ROLLOUT, gamma=0.9)
CRITIC = ValueConfig(coef=0.5, clip_range=0.3)
REWARDS = np.array([2.0, 0.5, 3.0, 1.0, 1.3, 0.0, 2.5, 1.7], np.float32)


def perturbed(params, seed: int, scale: float):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jax.device_put(np.float32(x + scale * rng.normal(size=x.shape))), params)


OLD = {**PARAMS, VALUE_HEAD: perturbed(add_value_head(PARAMS, MODEL.config)[VALUE_HEAD], seed=0, scale=0.2)}
NOW = perturbed(OLD, seed=1, scale=0.02)  # some ratios and values are out of their clip ranges


def config_of(visibility: Visibility = "shadow", correction=None, **options) -> PPOConfig:
    correction = correction or (Shadow() if visibility == "shadow" else Naive())
    update = UpdateConfig(visibility=visibility, correction=correction, value=CRITIC, **options)
    return dataclasses.replace(CONFIG, update=update)


@functools.cache
def estimate(config: PPOConfig) -> Any:
    return make_train_batch(MODEL, config)


@functools.cache
def train_batch(config: PPOConfig) -> Any:
    return estimate(config)(OLD, trajectory(), jnp.asarray(REWARDS), None)


@functools.cache
def updated(config: PPOConfig):
    """Metrics and gradients of one step at NOW, with the estimates of OLD."""
    return tiny_update.metrics_and_gradients(config.update, train_batch(config)[0], params=NOW)


# --- one step, from the definitions


def explicit(params, visibility):
    """Log-probabilities and values `[ROWS, LENGTH]` of the response, from the model's plain calls under booleans."""
    t = trajectory()
    mask = (t.mask if visibility == "shadow" else t.dense_mask()).to_boolean()
    hidden = hidden_states(MODEL, params, t.tokens, t.positions, mask)[:, WIDTH - 1 : -1]
    logits = apply_model(MODEL, params, t.tokens, t.positions, mask)[:, WIDTH - 1 : -1] / TEMPERATURE
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), t.response[..., None], -1)[..., 0]
    head = params[VALUE_HEAD]
    return logprobs, jnp.sum(hidden * head["kernel"][:, 0][None, None], -1) + head["bias"][0]


explicit_at = jax.jit(explicit, static_argnums=1)


def explicit_estimates(values):
    """Advantages (whitened) and returns in float64, token by token, as lists of rows without padding."""
    rows = []
    for row, length in zip(np.asarray(values, np.float64), trajectory().lengths().tolist(), strict=True):
        row, advantage, following, advantages = row[:length], 0.0, 0.0, []
        for t in reversed(range(length)):
            reward = REWARDS[len(rows)] if t == length - 1 else 0.0
            advantage = reward + 0.9 * following - row[t] + 0.9 * 0.95 * advantage
            following = row[t]
            advantages.insert(0, advantage)
        rows.append((np.array(advantages), np.array(advantages) + row))
    tokens = np.concatenate([advantages for advantages, _ in rows])
    mean, deviation = tokens.mean(), np.sqrt(tokens.var(ddof=1) + 1e-8)
    return [((advantages - mean) / deviation, returns) for advantages, returns in rows]


def padded(rows) -> np.ndarray:
    return np.stack([np.pad(row, (0, LENGTH - len(row))) for row in rows]).astype(np.float32)


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.value_and_grad, has_aux=True)
def explicit_loss(params, visibility, old_logprobs, old_values, advantages, returns):
    """PPO's two losses and their sum, each a mean over all tokens of the response."""
    mask = trajectory().response_mask
    logprobs, values = explicit(params, visibility)
    ratio = jnp.exp(jnp.where(mask, logprobs - old_logprobs, 0.0))
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    errors = (values - returns) ** 2, (jnp.clip(values, old_values - 0.3, old_values + 0.3) - returns) ** 2
    policy = -jnp.sum(jnp.where(mask, surrogate, 0.0)) / mask.sum()
    critic = 0.5 * jnp.sum(jnp.where(mask, jnp.maximum(*errors), 0.0)) / mask.sum()
    clipped = jnp.sum(mask & (errors[1] > errors[0])) / mask.sum()
    return policy + 0.5 * critic, (critic, clipped, ratio)


@pytest.mark.slow
@pytest.mark.parametrize("visibility", ["shadow", "dense"])
def test_a_step_against_the_definition(visibility):
    batch, critic_metrics = train_batch(config_of(visibility))
    mask = np.asarray(trajectory().response_mask)
    old_logprobs, old_values = map(np.asarray, explicit_at(OLD, visibility))
    np.testing.assert_allclose(batch.old_values[mask], old_values[mask], atol=2e-5)
    np.testing.assert_allclose(batch.old_logprobs[mask], old_logprobs[mask], atol=2e-5)
    advantages, returns = map(padded, zip(*explicit_estimates(old_values), strict=True))
    np.testing.assert_allclose(batch.advantages, advantages, atol=5e-5)
    np.testing.assert_allclose(batch.returns, returns, atol=5e-5)
    assert critic_metrics["critic/values/mean"] == pytest.approx(old_values[mask].mean(), rel=1e-4)
    assert critic_metrics["critic/returns/mean"] == pytest.approx(returns[mask].mean(), rel=1e-4)
    unexplained = (returns - old_values)[mask].var() / (returns[mask].var() + 1e-5)
    assert critic_metrics["critic/vf_explained_var"] == pytest.approx(1 - unexplained, rel=1e-3)

    old = (old_logprobs, old_values, advantages, returns)
    (loss, (critic, clipped, ratio)), grads = explicit_loss(NOW, visibility, *map(jnp.asarray, old))
    assert 0.05 < clipped < 0.95 and (ratio < 0.8).any() and (ratio > 1.2).any(), "some tokens must be clipped"
    metrics, gradient = updated(config_of(visibility))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["loss/value_avg"], critic, rtol=1e-4)
    np.testing.assert_allclose(metrics["val/clipfrac_avg"], clipped, rtol=1e-5)
    assert distance(gradient, grads) < 1e-4
    assert distance(gradient[VALUE_HEAD], grads[VALUE_HEAD]) < 1e-4


def test_whitening_is_over_counted_tokens():
    config = config_of(mask_truncated_completions=True)
    counts = jnp.arange(ROWS) != 3
    batch, _ = estimate(config)(OLD, trajectory(), jnp.asarray(REWARDS), counts)
    np.testing.assert_array_equal(batch.counted_rows, counts)
    counted = np.asarray(trajectory().response_mask & (trajectory().terminated & counts)[:, None])
    assert 0 < counted.any(1).sum() < ROWS - 1
    advantages = np.asarray(batch.advantages)
    assert abs(advantages[counted].mean()) < 1e-6 and abs(advantages[counted].std(ddof=1) - 1) < 1e-5
    assert not advantages[~counted].any()


# --- microbatches and corrections


@pytest.mark.slow
def test_microbatches_change_nothing():
    whole, parts = updated(config_of()), updated(config_of(microbatch_size=2))
    assert distance(parts[1], whole[1]) < 1e-5
    for name, value in whole[0].items():
        np.testing.assert_allclose(parts[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "OPSM"])
def test_every_correction_accepts_advantages_of_tokens(name):
    mask = trajectory().response_mask
    logprobs = trajectory().logprobs
    inputs = CorrectionInputs(logprobs, logprobs - 0.3, logprobs + 0.2, jnp.asarray(REWARDS), mask)
    tokens = inputs.replace(advantages=jnp.broadcast_to(inputs.advantages[:, None], mask.shape))
    jax.tree.map(np.testing.assert_array_equal, *(CORRECTIONS[name].terms(x) for x in (inputs, tokens)))


def test_corrections_do_not_change_the_critic():
    """Sparse-RL weighs tokens, and rejects responses."""
    plain, plain_grads = updated(config_of("dense"))
    metrics, grads = updated(config_of("dense", CORRECTIONS["Sparse-RL"]))
    np.testing.assert_allclose(metrics["loss/value_avg"], plain["loss/value_avg"], rtol=1e-5)
    assert distance(grads[VALUE_HEAD], plain_grads[VALUE_HEAD]) < 1e-4
    assert distance(grads, plain_grads) > 0.01, "the policy's gradient must change"


def test_a_batch_without_value_targets_is_refused():
    batch = train_batch(config_of())[0].replace(returns=None)
    with pytest.raises(ValueError, match="expected old_values and returns in the batch for the value loss.*; got None"):
        tiny_update.metrics_and_gradients(config_of().update, batch, params=OLD)


# --- the loop

# Enough prompts to learn. All tests share one rollout and one train step.
LOOP = PPOConfig(prompts_per_step=16, group_size=1, prompt_width=9, policy=H2O(), rollout=ROLLOUT)
TWICE = dataclasses.replace(LOOP, minibatches=2, num_iterations=2)


@functools.cache
def new_loop(config: PPOConfig = LOOP, task: Task = TASK, sizes=(1, 1, 1), tokenizer: Tokenizer = TOKENIZER) -> PPOLoop:
    loop = PPOLoop(LOOP_MODEL, task, tokenizer, optimizer(), config, make_mesh(*sizes))
    share_programs(loop)
    return loop


def new_state(seed: int = 0) -> TrainState:
    params = add_value_head(jax.tree.map(jnp.copy, warm_params()), LOOP_MODEL.config)
    return shard_tree(init_state(params, optimizer(), jax.random.key(seed)), make_mesh())


DENSE = dataclasses.replace(LOOP, update=config_of("dense", microbatch_size=4).update)


@pytest.mark.slow
@pytest.mark.parametrize(("visibility", "config"), [("shadow", TWICE), ("dense", DENSE)], ids=["shadow", "dense"])
def test_a_step_of_the_loop(visibility, config):
    state, metrics = new_loop(config).step(new_state())
    assert documented("Critic") <= set(metrics) <= METRICS
    assert all(np.shape(value) == () and math.isfinite(value) for value in metrics.values())
    assert int(state.step) == config.minibatches * config.num_iterations
    assert (metrics["mismatch_kl"] <= 1e-6) == (visibility == "shadow")
    assert metrics["critic/values/mean"] == 0 and metrics["critic/vf_explained_var"] == pytest.approx(0, abs=2e-3)
    assert metrics["loss/value_avg"] > 0 and jnp.any(state.params[VALUE_HEAD]["kernel"] != 0)


@pytest.mark.slow
def test_rewards_rise_and_the_critic_predicts_them():
    """All steps run the same programs."""
    start = new_state()  # before counting: its warm start compiles another `update`
    with count_compilations() as counts:
        _, rows = run(new_loop(TWICE, SEVENS), start, 25)
    # Other tests may have compiled the update before.
    assert counts["train_batch"] == 1 and counts["update"] <= 1
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.7, rewards
    errors = [abs(row["critic/values/mean"] - row["critic/returns/mean"]) for row in rows]
    assert np.mean(errors[-5:]) < 0.05, errors


@pytest.mark.slow
def test_a_mesh_gives_the_same_step():
    one, many = (run(new_loop(sizes=sizes), new_state(), 1) for sizes in ((1, 1, 1), (1, 2, 2, 2)))
    for name in ("loss", "reward", "grad_norm", "loss/value_avg", "critic/returns/mean"):
        np.testing.assert_allclose(many[1][0][name], one[1][0][name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(many[0].params[VALUE_HEAD]["bias"], one[0].params[VALUE_HEAD]["bias"], rtol=1e-4)


# --- bad input


def test_parameters_without_a_value_head_are_refused():
    class Unread(Sevens):
        def __getitem__(self, index: int):
            raise AssertionError("refused before anything is sampled")

    state = init_state(jax.tree.map(jnp.copy, warm_params()), optimizer(), jax.random.key(0))
    with pytest.raises(ValueError, match=r"PPO needs a value head: smd.model.add_value_head\(params, model.config\)"):
        new_loop(task=Unread()).step(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": UpdateConfig()}, "expected a critic, .*because PPO's advantages come from its values; got None"),
        ({"gamma": 1.1}, "expected 0 <= gamma <= 1; got 1.1"),
        ({"lam": -0.1}, "expected 0 <= lam <= 1; got -0.1"),
        ({"lam": float("nan")}, "expected 0 <= lam <= 1; got nan"),
        (
            {"update": UpdateConfig(value=CRITIC, correction=OPSM())},
            r"a correction that takes an advantage for every token, as PPO has them; got OPSM\(threshold=0.5\)",
        ),
        (
            {"update": UpdateConfig(value=CRITIC, correction=Chain((Bypass(), Chain((OPSM(),)))))},
            r"an advantage for every token, as PPO has them; got Chain\(.*OPSM",
        ),
        ({"update": UpdateConfig(value=CRITIC, eviction_coef=0.5)}, "eviction_coef 0 with PPO, .*; got 0.5"),
        (
            {"update": UpdateConfig(value=CRITIC, terms=(EvictionTerm(1.0),))},
            r"expected eviction_coef 0 with PPO, because .*; got 0.0 and \(EvictionTerm",
        ),
        ({"update": UpdateConfig(value=CRITIC, loss=gspo())}, "ratio_level 'token' with PPO, .*; got 'geometric'"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LOOP, **options)


@pytest.mark.slow
def test_a_completion_without_a_reward_does_not_change_the_step():
    """The parameters do not depend on the number in its place."""
    loop = new_loop()
    samples = loop.collect(new_state(), 0)
    rewarded = np.arange(len(samples.rewards)) != 3
    params = []
    for reward in (np.nan, 7.0):
        rewards = np.where(rewarded, samples.rewards, np.float32(reward))
        params.append(loop.learn(new_state(), samples._replace(rewards=rewards, counted_rows=rewarded))[0].params)
    assert_bitwise_equal(*params)
