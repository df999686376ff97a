"""KL to the reference: three estimators in the loss, and as a reward penalty in GRPO and PPO."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import Naive
from smd_jax.learner.config import UpdateConfig
from smd_jax.losses.kl import kl_penalty, reference_kl
from smd_jax.losses.named import bnpo
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.model.value_head import add_value_head
from smd_jax.train.ppo import PPOConfig, make_train_batch
from tests import bigram_update, tiny_update
from tests.toy_loop import CONFIG, MODEL, SIZES, new_loop, new_state, warm_params

IN_REWARD = UpdateConfig(loss=LossConfig(beta=0.5, kl_estimator="k1"), kl_in_reward=True)

# --- in the loss


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # the policy gives the token twice the probability of the reference
        ("k1", np.log(2), np.log(2)),
        ("k2", np.log(2) ** 2 / 2, np.log(2)),
        ("k3", 0.5 - 1 + np.log(2), 1 - 0.5),
    ],
)
def test_estimators_by_hand(estimator, value, slope):
    policy, reference = jnp.log(jnp.full((1, 1), 0.5)), jnp.log(jnp.full((1, 1), 0.25))
    np.testing.assert_allclose(reference_kl(policy, reference, estimator), [[value]], rtol=1e-6)
    found = jax.grad(lambda x: reference_kl(x, reference, estimator).sum())(policy)
    np.testing.assert_allclose(found, [[slope]], rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [-1e6, -30.0, 30.0, 1e6])
def test_large_log_ratios_do_not_overflow(estimator, log_ratio):
    policy, reference = jnp.full((1, 1), min(0.0, log_ratio)), jnp.full((1, 1), min(0.0, -log_ratio))
    value, slope = jax.value_and_grad(lambda x: reference_kl(x, reference, estimator).sum())(policy)
    assert np.isfinite(value) and abs(slope) < 2e10
    if estimator != "k3":  # towards the reference
        assert slope == np.sign(log_ratio) * 20


def test_bias_corrected_k3_has_the_gradient_of_k1():
    """On-policy. Off-policy against TRL: test_losses_trl."""

    def slopes(loss: LossConfig):
        update = UpdateConfig(loss=loss)
        data = bigram_update.batch().replace(advantages=jnp.zeros(bigram_update.ROWS), old_logprobs=None)
        return bigram_update.metrics_and_gradients(update, data, reference=bigram_update.REFERENCE)[1]

    k1 = slopes(LossConfig(beta=0.5, kl_estimator="k1"))
    corrected = slopes(LossConfig(beta=0.5, use_bias_correction_kl=True))
    k3 = slopes(LossConfig(beta=0.5))
    assert tiny_update.distance(corrected, k1) < 1e-5 < 0.1 < tiny_update.distance(k3, k1)


# --- in the reward


def test_kl_penalty_by_hand():
    logprobs = jnp.log(jnp.array([[0.5, 0.2, 0.0]]))
    reference = jnp.log(jnp.array([[0.25, 0.4, 0.3]]))
    penalty = kl_penalty(logprobs, reference, jnp.array([[True, True, False]]), 0.5)
    np.testing.assert_allclose(penalty, [[0.5 * np.log(2), -0.5 * np.log(2), 0.0]], rtol=1e-6)


def reference_of(scale: float) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), warm_params())


@pytest.mark.slow
@pytest.mark.parametrize("visibility", ["shadow", "dense"])
def test_grpo_subtracts_the_kl_from_rewards(visibility, monkeypatch):
    """As TRL's RLOOTrainer: rewards - beta * sum over the response of (old - reference), before the group's mean."""
    correction = {} if visibility == "shadow" else {"correction": Naive()}
    update = dataclasses.replace(IN_REWARD, visibility=visibility, **correction)
    loop = new_loop(dataclasses.replace(CONFIG, update=update))
    state = new_state().replace(reference=reference_of(0.1))
    samples = loop.collect(state, 0)
    batches = []
    monkeypatch.setitem(vars(loop), "update", lambda state, batch: (batches.append(batch) or state, {}))
    _, metrics = loop.learn(state, samples)

    t = samples.trajectory
    policy = np.asarray(loop.replay(state.params, t), np.float64)
    reference = np.asarray(loop.replay(state.reference, t), np.float64)
    mask = np.asarray(t.response_mask)
    difference = np.where(mask, policy - reference, 0.0)
    rewards = (samples.rewards - 0.5 * difference.sum(1)).reshape(-1, 4)
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(batches[0].advantages, expected.reshape(-1), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["kl"], difference.sum() / mask.sum(), rtol=1e-3, atol=1e-5)
    assert abs(metrics["kl"]) > 1e-3


@pytest.mark.slow
def test_step_with_kl_in_reward():
    """The logged reward is the task's, without the KL."""
    loop = new_loop(dataclasses.replace(CONFIG, update=IN_REWARD))
    state = new_state().replace(reference=reference_of(0.1))
    rewards = loop.collect(state, 0).rewards
    state, metrics = loop.step(state)
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert int(state.step) == 1 and metrics["kl"] != 0
    # On-policy the loss is the mean over tokens of advantages.
    assert abs(metrics["loss"]) < 3 and metrics["sampling/sampling_logp_difference/max"] < 2e-5


@pytest.mark.slow
def test_ppo_subtracts_the_kl_at_every_token():
    """Without discounting and with values of 0, an advantage is the sum of the remaining rewards."""
    update = dataclasses.replace(IN_REWARD, value=ValueConfig())
    config = PPOConfig(**SIZES, update=update, lam=1.0, whiten_advantages=False)
    state = new_state()
    trajectory = new_loop().collect(state, 0).trajectory
    rng = np.random.default_rng(0)
    penalty = np.where(trajectory.response_mask, rng.normal(size=trajectory.logprobs.shape), 0.0).astype(np.float32)
    rewards = rng.normal(size=8).astype(np.float32)
    params = add_value_head(state.params, MODEL.config)
    batch, _ = make_train_batch(MODEL, config)(params, trajectory, jnp.asarray(rewards), None, jnp.asarray(penalty))
    for row, length in enumerate(trajectory.lengths().tolist()):
        remaining = rewards[row] - np.cumsum(penalty[row, :length][::-1])[::-1]
        np.testing.assert_allclose(batch.advantages[row, :length], remaining, rtol=1e-4, atol=1e-5)


# --- invalid options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossConfig(kl_estimator="k1"), "expected beta > 0 with a KL estimator"),
        (lambda: LossConfig(use_bias_correction_kl=True), "beta > 0 with a KL estimator.*use_bias_correction_kl True"),
        (
            lambda: LossConfig(beta=0.1, kl_estimator="k2", use_bias_correction_kl=True),
            "expected kl_estimator 'k3' with use_bias_correction_kl.*; got 'k2'",
        ),
        (lambda: UpdateConfig(kl_in_reward=True), "expected beta > 0 with kl_in_reward; got 0"),
        (
            lambda: UpdateConfig(loss=bnpo(beta=0.1), kl_in_reward=True),
            "kl_estimator 'k1' with kl_in_reward.*; got 'k3'",
        ),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
