"""The policy loss by hand, and against a NumPy reference with numerical gradients. Against TRL: `test_losses_trl`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.named import bnpo, cispo
from smd_jax.losses.policy import LossConfig, LossInputs, mask_truncated_completions, policy_loss, surrogate_metrics
from smd_jax.losses.surrogates import Clip, ClipWeight
from smd_jax.losses.weighting import FixedLength, SequenceMean, TokenMean
from tests.loss_cases import EVERY_LOSS, LOSSES, gradient, loss_of

MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], bool)  # 3, 1, 0 and 2 tokens


def one_token(ratio: float, advantage: float, weight: float = 1.0) -> LossInputs:
    """A single token with the given ratio of new to old probability."""
    old = jnp.log(jnp.full((1, 1), 0.25))
    return LossInputs(old + jnp.log(ratio), old, None, jnp.array([advantage]), jnp.array([[weight]]))


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
    inputs, config = one_token(ratio, advantage), bnpo(epsilon=0.2)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)
    np.testing.assert_allclose(terms.ratio, [[ratio]], rtol=1e-6)
    assert {name: bool(x[0, 0]) for name, x in terms.surrogate.items()} == {
        "clip_ratio/low_mean": clipped == "low",
        "clip_ratio/high_mean": clipped == "high",
        "clip_ratio/region_mean": clipped != "",
    }


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
    inputs, config = one_token(ratio, advantage), bnpo(epsilon=0.2, epsilon_high=0.6)
    np.testing.assert_allclose(policy_loss(inputs, config)[0], loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.5, -1.0, 2.5, 2.5),  # bad and likelier: PPO lets the ratio grow without a bound
        (3.5, -1.0, 3.0, 0.0),  # but not above delta
        (0.5, -1.0, 0.8, 0.0),
        (3.5, 1.0, -1.2, 0.0),  # the upper bound of a good token comes first
    ],
)
def test_the_dual_clip_by_hand(ratio, advantage, loss, slope):
    inputs, config = one_token(ratio, advantage), bnpo(delta=3.0)
    np.testing.assert_allclose(policy_loss(inputs, config)[0], loss, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[slope]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(0.1, 1.0, 0.1, False), (0.1, -1.0, 0.1, False), (1.5, 2.0, 1.5, False), (4.0, 2.0, 3.0, True)],
)
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    """The clipped ratio weighs the token's log-probability and has no gradient itself."""
    inputs, config = one_token(ratio, advantage), cispo(2.0)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, -weight * advantage * np.log(0.25 * ratio), rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[-weight * advantage]], rtol=1e-6)
    assert {name: bool(x[0, 0]) for name, x in terms.surrogate.items()} == {"cispo_clip_ratio": clipped}


def test_the_ratio_of_a_sequence_by_hand():
    # Ratios 0.5 and 4.5, geometric mean 1.5; each token moves it by half. The third column is padding.
    old = jnp.log(jnp.array([[0.2, 0.1, 0.5]]))
    new = old + jnp.log(jnp.array([[0.5, 4.5, 7.0]]))
    inputs = LossInputs(new, old, None, jnp.array([-2.0]), jnp.array([[0.5, 0.5, 0.0]]))
    config = LossConfig(weighting=SequenceMean(), ratio_level="geometric")
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(terms.ratio, [[1.5, 1.5, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(value, 1.5 * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient(inputs, config), [[1.5, 1.5, 0.0]], rtol=1e-6)
    good = inputs.replace(advantages=jnp.array([2.0]))
    np.testing.assert_allclose(policy_loss(good, config)[0], -1.2 * 2, rtol=1e-6)
    np.testing.assert_array_equal(gradient(good, config), np.zeros((1, 3)))
    np.testing.assert_array_equal(policy_loss(good, config)[1].surrogate["clip_ratio/high_mean"], [[True, True, False]])


# --- corrections


def corrected(weights) -> LossInputs:
    """Two tokens with ratios 1.1 and 0.9, advantage 1, and a reference half as likely."""
    old = jnp.log(jnp.full((1, 2), 0.25))
    new = old + jnp.log(jnp.array([[1.1, 0.9]]))
    weights = None if weights is None else jnp.array([weights])
    return LossInputs(new, old, new + jnp.log(0.5), jnp.array([1.0]), jnp.full((1, 2), 0.5), weights)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("weights", "factors"), [(None, [1, 1]), ([0.5, 3.0], [0.5, 3.0]), ([1.0, 0.0], [1, 0]), ([0.0, 3.0], [0, 3.0])]
)
def test_corrections_multiply_the_surrogate_and_not_the_kl(weights, factors, beta):
    inputs, config = corrected(weights), LossConfig(beta=beta)
    kl = 0.5 - 1 + np.log(2)
    value, terms = policy_loss(inputs, config)
    # The denominator stays 2 tokens, those of weight 0 included.
    np.testing.assert_allclose(value, beta * kl - 0.5 * (1.1 * factors[0] + 0.9 * factors[1]), rtol=1e-6)
    slopes = [0.5 * (beta * 0.5 - 1.1 * factors[0]), 0.5 * (beta * 0.5 - 0.9 * factors[1])]
    np.testing.assert_allclose(gradient(inputs, config), [slopes], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(terms.ratio, [[1.1, 0.9]], rtol=1e-6)


def test_a_rejected_token_is_in_no_term_and_no_denominator():
    """Its weight in the loss is 0, and what stands there may be anything."""
    inputs = corrected([0.5, np.inf]).replace(weights=jnp.array([[1.0, 0.0]]))
    assert inputs.reference_logprobs is not None
    inputs = inputs.replace(reference_logprobs=jnp.where(inputs.weights > 0, inputs.reference_logprobs, -jnp.inf))
    config = LossConfig(beta=0.1)
    value, terms = policy_loss(inputs, config)
    np.testing.assert_allclose(value, 0.1 * (0.5 - 1 + np.log(2)) - 0.5 * 1.1, rtol=1e-6)
    assert gradient(inputs, config)[0, 1] == 0 and terms.kl[0, 1] == 0 and terms.ratio[0, 1] == 1


def test_no_gradient_flows_through_the_correction():
    inputs = corrected(None)
    both = jax.grad(lambda x: loss_of(x, inputs.replace(correction_weights=jnp.exp(x)), LossConfig()))
    fixed = inputs.replace(correction_weights=jnp.exp(inputs.logprobs))
    np.testing.assert_array_equal(both(inputs.logprobs), gradient(fixed, LossConfig()))


@pytest.mark.parametrize("level", ["token", "geometric"])
@pytest.mark.parametrize("config", [bnpo(), cispo()])
def test_a_rejected_token_may_have_any_ratio(config, level):
    """What a veto rejects is just what overflows: 200 nats."""
    inputs = corrected([2.0, 2.0]).replace(weights=jnp.array([[0.5 * (level == "token"), 0.0]]))
    inputs = inputs.replace(old_logprobs=inputs.old_logprobs.at[0, 1].add(-200.0))
    config = replace(config, ratio_level=level)
    value, grad = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert float(grad[0, 1]) == 0.0 and bool(grad[0, 0] != 0.0) == (level == "token")


@EVERY_LOSS
def test_a_counted_token_may_have_any_ratio(config):
    """Rows of one token, good and bad; also with a reference that is as far away on the other side."""
    log_ratio, advantages = np.array([[-200], [200], [-200], [200]], np.float32), jnp.array([1.0, 1.0, -1.0, -1.0])
    new = jnp.full((4, 1), np.float32(np.log(0.25)))
    inputs = LossInputs(new, new - log_ratio, new - log_ratio, advantages, jnp.full((4, 1), 0.25))
    value, grad = jax.value_and_grad(loss_of)(new, inputs, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    np.testing.assert_allclose(policy_loss(inputs, config)[1].ratio, np.exp(np.sign(log_ratio) * 20), rtol=1e-5)


def test_rejected_tokens_are_not_counted_as_clipped():
    inputs = one_token(1.5, 1.0).replace(weights=jnp.zeros((1, 1)))
    assert not policy_loss(inputs, LossConfig())[1].surrogate["clip_ratio/high_mean"][0, 0]


# --- the KL to the reference


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
    np.testing.assert_allclose(SequenceMean().weights(MASK), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["dapo", "bnpo", "cispo"])
def test_the_mean_over_tokens(name):
    np.testing.assert_allclose(LOSSES[name]().weighting.weights(MASK), np.asarray(MASK) / 6, rtol=1e-6)


def test_dr_grpo_divides_by_a_constant():
    np.testing.assert_allclose(FixedLength().weights(MASK), np.asarray(MASK) / (4 * 4), rtol=1e-6)
    np.testing.assert_allclose(FixedLength(10).weights(MASK), np.asarray(MASK) / (4 * 10), rtol=1e-6)


def test_a_length_that_means_nothing():
    with pytest.raises(ValueError, match="expected max_length >= 1, or None for the columns of the mask; got 0"):
        FixedLength(0)


def test_truncated_completions_leave_the_mask():
    left = mask_truncated_completions(MASK, jnp.array([False, True, True, True]))
    np.testing.assert_array_equal(left, np.asarray(MASK) & np.array([[0], [1], [1], [1]], bool))
    assert float(TokenMean().weights(left)[3, 0]) == pytest.approx(1 / 3)
    assert float(SequenceMean().weights(left)[3, 0]) == pytest.approx(1 / 2 / 4), "the row still counts"


@pytest.mark.parametrize("weighting", [TokenMean(), SequenceMean(), FixedLength()])
def test_rows_that_do_not_count_are_in_no_denominator(weighting):
    weights = weighting.weights(MASK.at[0].set(False), jnp.array([False, True, True, True]))
    np.testing.assert_array_equal(weights[0], np.zeros(4))
    np.testing.assert_allclose(weights[1:], weighting.weights(MASK[1:]), rtol=1e-6)


@pytest.mark.parametrize("weighting", [TokenMean(), SequenceMean(), FixedLength()])
def test_a_batch_without_tokens_weighs_nothing(weighting):
    np.testing.assert_array_equal(weighting.weights(jnp.zeros((2, 3), bool)), np.zeros((2, 3)))


# --- against NumPy


def reference_loss(logprobs, old, reference, advantages, weights, config: LossConfig) -> float:
    """The formula token by token, in float64."""
    clip = config.surrogate
    assert isinstance(clip, Clip)
    low, high = 1 - clip.epsilon, 1 + (clip.epsilon if clip.epsilon_high is None else clip.epsilon_high)
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
    return *arrays, np.asarray(SequenceMean().weights(MASK), np.float64)


@pytest.mark.parametrize("config", [LossConfig(), bnpo(epsilon=0.1, epsilon_high=0.4, beta=0.3)])
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


# --- metrics of the surrogate


def test_the_share_of_clipped_tokens_by_hand():
    """Ratios 1.5, 1.5 and 1 of one response, 1 of another; the last column is padding."""
    old = jnp.log(jnp.full((2, 4), 0.2))
    ratio = jnp.array([[1.5, 1.5, 1.0, 9.0], [1.0, 9.0, 9.0, 9.0]])
    counted = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
    inputs = LossInputs(old + jnp.log(ratio), old, None, jnp.ones(2), counted / 4)
    for config, share in ((LossConfig(), 2 / 4), (LossConfig(ratio_level="geometric"), 1 / 2)):
        metrics = surrogate_metrics(policy_loss(inputs, config)[1], counted, config)
        expected = {"clip_ratio/low_mean": 0, "clip_ratio/high_mean": share, "clip_ratio/region_mean": share}
        assert {name: float(x) for name, x in metrics.items()} == expected
    nothing = surrogate_metrics(policy_loss(inputs, LossConfig())[1], jnp.zeros((2, 4), bool), LossConfig())
    assert not any(nothing.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(0.0), "expected 0 < epsilon < 1; got 0.0"),
        (lambda: Clip(1.0), "expected 0 < epsilon < 1; got 1.0"),
        (lambda: Clip(epsilon_high=0.0), "expected epsilon_high > 0; got 0.0"),
        (lambda: ClipWeight(0.0), "expected epsilon_high > 0; got 0.0"),
        (lambda: LossConfig(beta=-0.1), "expected beta >= 0; got -0.1"),
        (lambda: Clip(delta=1.2), "expected delta above the upper bound 1.2 of the ratio; got 1.2"),
        (lambda: Clip(0.2, 0.5, 1.4), "expected delta above the upper bound 1.5 of the ratio; got 1.4"),
    ],
)
def test_bad_configurations(make, message):
    with pytest.raises(ValueError, match=message):
        make()
