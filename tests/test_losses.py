"""The policy loss on numbers worked out by hand, and against a NumPy reference with numerical gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses import LossConfig, LossInputs, k3, policy_loss, token_weights

MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], bool)  # 3, 1, 0 and 2 tokens


def one_token(ratio: float, advantage: float, weight: float = 1.0) -> LossInputs:
    """A single token with the given ratio of new to old probability."""
    old = jnp.log(jnp.full((1, 1), 0.25))
    return LossInputs(old + jnp.log(ratio), old, None, jnp.array([advantage]), jnp.array([[weight]]))


def loss_of(logprobs, inputs: LossInputs, config: LossConfig):
    return policy_loss(inputs.replace(logprobs=logprobs), config)[0]


def gradient(inputs: LossInputs, config: LossConfig):
    return jax.grad(loss_of)(inputs.logprobs, inputs, config)


# --- clipping


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # d ratio / d log p = ratio, so where nothing is clipped the slope equals the loss
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.1, 1.0, -1.1, -1.1, ""),
        (0.9, -3.0, 2.7, 2.7, ""),
        (1.5, 1.0, -1.2, 0.0, "high"),  # already likelier by more than epsilon: no more of it
        (1.5, -1.0, 1.5, 1.5, ""),  # likelier but bad: the way back is open
        (0.5, 1.0, -0.5, -0.5, ""),  # rarer but good: the way back is open
        (0.5, -1.0, 0.8, 0.0, "low"),
        (1.5, 0.0, 0.0, 0.0, ""),
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, slope, clipped):
    inputs, config = one_token(ratio, advantage), LossConfig(epsilon=0.2)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)
    np.testing.assert_allclose(terms.ratio, [[ratio]], rtol=1e-6)
    assert (bool(terms.clipped_low[0, 0]), bool(terms.clipped_high[0, 0])) == (clipped == "low", clipped == "high")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.5, -1.5),  # within 1 + 0.6
        (1.7, 1.0, -1.6, 0.0),
        (0.85, -1.0, 0.85, 0.85),
        (0.5, -1.0, 0.8, 0.0),  # the lower bound stays 1 - 0.2
    ],
)
def test_the_upper_bound_by_itself(ratio, advantage, loss, slope):
    inputs, config = one_token(ratio, advantage), LossConfig(epsilon=0.2, epsilon_high=0.6)
    np.testing.assert_allclose(policy_loss(inputs, config)[0], loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)


def test_bounds():
    assert LossConfig(epsilon=0.25).bounds == (0.75, 1.25)
    assert LossConfig(epsilon=0.25, epsilon_high=0.5).bounds == (0.75, 1.5)


# --- the KL to the reference


def test_k3_by_hand():
    # log ratio = log(reference / policy): exp(r) - 1 - r
    policy, reference = jnp.log(jnp.array([0.5, 0.25, 0.5])), jnp.log(jnp.array([0.25, 0.5, 0.5]))
    expected = [0.5 - 1 + np.log(2), 2 - 1 - np.log(2), 0.0]
    np.testing.assert_allclose(k3(policy, reference), expected, rtol=1e-5, atol=1e-7)


def test_the_mean_of_k3_over_the_policy_is_the_kl():
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    estimate = np.asarray(k3(jnp.log(jnp.asarray(policy)), jnp.log(jnp.asarray(reference))))
    np.testing.assert_allclose((policy * estimate).sum(), (policy * np.log(policy / reference)).sum(), rtol=1e-5)


def test_beta_adds_the_kl_to_the_loss():
    inputs = one_token(1.0, 2.0, weight=0.5)
    inputs = inputs.replace(reference_logprobs=inputs.logprobs + jnp.log(0.5))
    value, terms = policy_loss(inputs, LossConfig(beta=0.1))
    kl = 0.5 - 1 + np.log(2)
    np.testing.assert_allclose(terms.kl, [[kl]], rtol=1e-5)
    np.testing.assert_allclose(value, 0.5 * (0.1 * kl - 2.0), rtol=1e-6)
    # d k3 / d log p = 1 - reference / policy
    np.testing.assert_allclose(gradient(inputs, LossConfig(beta=0.1)), [[0.5 * (0.1 * 0.5 - 2.0)]], rtol=1e-5)


def test_beta_needs_a_reference():
    with pytest.raises(ValueError, match="expected reference log-probabilities, because beta is 0.1; got None"):
        policy_loss(one_token(1.0, 1.0), LossConfig(beta=0.1))


# --- weights of tokens


def test_grpo_is_the_mean_over_sequences_of_means_over_tokens():
    third, half = 1 / 3, 1 / 2
    expected = np.array([[third, third, third, 0], [1, 0, 0, 0], [0, 0, 0, 0], [half, half, 0, 0]]) / 4
    np.testing.assert_allclose(token_weights(MASK, "grpo"), expected, rtol=1e-6)


def test_bnpo_is_the_mean_over_tokens():
    np.testing.assert_allclose(token_weights(MASK, "bnpo"), np.asarray(MASK) / 6, rtol=1e-6)


def test_dr_grpo_divides_by_a_constant():
    np.testing.assert_allclose(token_weights(MASK, "dr_grpo"), np.asarray(MASK) / (4 * 4), rtol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_a_batch_without_tokens_weighs_nothing(loss_type):
    np.testing.assert_array_equal(token_weights(jnp.zeros((2, 3), bool), loss_type), np.zeros((2, 3)))


# --- against NumPy


def reference_loss(logprobs, old, reference, advantages, weights, config: LossConfig) -> float:
    """The formula token by token, in float64."""
    low, high = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    total = 0.0
    for row, column in np.argwhere(weights > 0):
        ratio = np.exp(logprobs[row, column] - old[row, column])
        log_ratio = reference[row, column] - logprobs[row, column]
        surrogate = min(ratio * advantages[row], min(max(ratio, low), high) * advantages[row])
        total += weights[row, column] * (config.beta * (np.exp(log_ratio) - 1 - log_ratio) - surrogate)
    return total


def random_arrays(seed: int):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (4, 4))
    # Ratios from 0.6 to 1.6: some clipped on either side, none at the kink itself.
    arrays = (old + rng.uniform(-0.5, 0.5, (4, 4)), old, old + rng.normal(0, 0.5, (4, 4)), rng.normal(0, 1, 4))
    return *arrays, np.asarray(token_weights(MASK, "grpo"), np.float64)


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(epsilon=0.1, epsilon_high=0.4, beta=0.3)])
def test_loss_and_gradient_against_numerical_differences(config):
    for seed in range(3):
        arrays = random_arrays(seed)
        with jax.enable_x64(True):
            inputs = LossInputs(*map(jnp.asarray, arrays))
            loss, grad = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
            loss, grad = float(loss), np.asarray(grad)
        np.testing.assert_allclose(loss, reference_loss(*arrays, config), rtol=1e-12)
        numerical = np.zeros((4, 4))
        for place in np.ndindex(4, 4):
            step = np.zeros((4, 4))
            step[place] = 1e-6
            above, below = (reference_loss(arrays[0] + s, *arrays[1:], config) for s in (step, -step))
            numerical[place] = (above - below) / 2e-6
        np.testing.assert_allclose(grad, numerical, atol=1e-8)


def test_only_the_policy_has_a_gradient():
    inputs = LossInputs(*(jnp.asarray(x, jnp.float32) for x in random_arrays(0)))
    terms = jax.grad(lambda x: policy_loss(inputs.replace(logprobs=x), LossConfig(beta=1.0))[1].kl.sum())
    np.testing.assert_array_equal(terms(inputs.logprobs), np.zeros((4, 4)))


# --- outside the response


@pytest.mark.parametrize("junk", [np.inf, -np.inf, np.nan, 1e30, -1e4, 1e4])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "reference_logprobs"])
def test_what_lies_outside_the_mask_does_not_leak(name, junk):
    config = LossConfig(beta=0.1)
    clean = LossInputs(*(jnp.asarray(x, jnp.float32) for x in random_arrays(1)))
    before = {
        "logprobs": clean.logprobs,
        "old_logprobs": clean.old_logprobs,
        "reference_logprobs": clean.reference_logprobs,
    }
    dirty = clean.replace(**{name: jnp.where(MASK, before[name], junk)})
    (loss, terms), (clean_loss, clean_terms) = policy_loss(dirty, config), policy_loss(clean, config)
    assert float(loss) == float(clean_loss)
    jax.tree.map(np.testing.assert_array_equal, terms, clean_terms)
    np.testing.assert_array_equal(gradient(dirty, config), gradient(clean, config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "expected 0 < epsilon < 1; got 0.0"),
        ({"epsilon": 1.0}, "expected 0 < epsilon < 1; got 1.0"),
        ({"epsilon_high": 0.0}, "expected epsilon_high > 0; got 0.0"),
        ({"beta": -0.1}, "expected beta >= 0; got -0.1"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)
