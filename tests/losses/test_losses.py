"""Policy loss by hand: clipping, rejected tokens and weights. Values against TRL: `test_losses_trl`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.named import bnpo, cispo
from smd_jax.losses.policy import LossConfig, LossInputs, policy_loss
from smd_jax.losses.surrogates import Clip, ClipWeight
from smd_jax.losses.weighting import FixedLength, SequenceMean, TokenMean
from tests.loss_cases import EVERY_LOSS, gradient, loss_of

MASK = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], bool)  # 3, 1, 0 and 2 tokens


def one_token(ratio: float, advantage: float) -> LossInputs:
    """A single token with the given ratio of new to old probability."""
    old = jnp.log(jnp.full((1, 1), 0.25))
    return LossInputs(old + jnp.log(ratio), old, None, jnp.array([advantage]), jnp.ones((1, 1)))


# --- clipping


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # d ratio / d log p = ratio, so where nothing is clipped the slope equals the loss
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.1, 1.0, -1.1, -1.1, ""),
        (0.9, -3.0, 2.7, 2.7, ""),
        (1.5, 1.0, -1.2, 0.0, "high"),  # already likelier by more than epsilon
        (1.5, -1.0, 1.5, 1.5, ""),  # likelier, negative advantage: back towards 1
        (0.5, 1.0, -0.5, -0.5, ""),  # less likely, positive advantage: back towards 1
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


# --- corrections


def corrected(weights) -> LossInputs:
    """Two tokens with ratios 1.1 and 0.9, advantage 1, and a reference half as likely."""
    old = jnp.log(jnp.full((1, 2), 0.25))
    new = old + jnp.log(jnp.array([[1.1, 0.9]]))
    weights = None if weights is None else jnp.array([weights])
    return LossInputs(new, old, new + jnp.log(0.5), jnp.array([1.0]), jnp.full((1, 2), 0.5), weights)


def test_rejected_token_is_in_no_term_and_no_denominator():
    """Its weight is 0; its correction weight and KL may be infinite."""
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
def test_rejected_token_may_have_any_ratio(config, level):
    """A veto rejects ratios that would overflow, here 200 nats."""
    inputs = corrected([2.0, 2.0]).replace(weights=jnp.array([[0.5 * (level == "token"), 0.0]]))
    inputs = inputs.replace(old_logprobs=inputs.old_logprobs.at[0, 1].add(-200.0))
    config = replace(config, ratio_level=level)
    value, grad = jax.value_and_grad(loss_of)(inputs.logprobs, inputs, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert float(grad[0, 1]) == 0.0 and bool(grad[0, 0] != 0.0) == (level == "token")


@EVERY_LOSS
def test_counted_token_may_have_any_ratio(config):
    """Rows of one token, with advantages of both signs; the reference is the old policy."""
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


def test_beta_needs_a_reference():
    with pytest.raises(ValueError, match="expected reference log-probabilities, because beta is 0.1; got None"):
        policy_loss(one_token(1.0, 1.0), LossConfig(beta=0.1))


# --- weights of tokens


def test_invalid_max_length_raises():
    with pytest.raises(ValueError, match="expected max_length >= 1, or None for the columns of the mask; got 0"):
        FixedLength(0)


@pytest.mark.parametrize("weighting", [TokenMean(), SequenceMean(), FixedLength()])
def test_uncounted_rows_are_in_no_denominator(weighting):
    weights = weighting.weights(MASK.at[0].set(False), jnp.array([False, True, True, True]))
    np.testing.assert_array_equal(weights[0], np.zeros(4))
    np.testing.assert_allclose(weights[1:], weighting.weights(MASK[1:]), rtol=1e-6)


@pytest.mark.parametrize("weighting", [TokenMean(), SequenceMean(), FixedLength()])
def test_weights_of_a_batch_without_tokens_are_zero(weighting):
    np.testing.assert_array_equal(weighting.weights(jnp.zeros((2, 3), bool)), np.zeros((2, 3)))


def test_only_the_policy_has_a_gradient():
    inputs = corrected(None)
    terms = jax.grad(lambda x: policy_loss(inputs.replace(logprobs=x), LossConfig(beta=1.0))[1].kl.sum())
    np.testing.assert_array_equal(terms(inputs.logprobs), np.zeros((1, 2)))


# --- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clip(0.0), "expected 0 < epsilon < 1; got 0.0"),
        (lambda: Clip(1.0), "expected 0 < epsilon < 1; got 1.0"),
        (lambda: Clip(epsilon_high=0.0), "expected epsilon_high > 0; got 0.0"),
        (lambda: ClipWeight(0.0), "expected epsilon_high > 0; got 0.0"),
        (lambda: LossConfig(beta=-0.1), "expected a finite beta >= 0; got -0.1"),
        (lambda: LossConfig(beta=float("inf")), "expected a finite beta >= 0; got inf"),
        (lambda: Clip(delta=1.2), "expected delta above the upper bound 1.2 of the ratio; got 1.2"),
        (lambda: Clip(0.2, 0.5, 1.4), "expected delta above the upper bound 1.5 of the ratio; got 1.4"),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("advantages", (1,), r"expected advantages of shape \[4\] or \[4, 6\]; got \[1\]"),
        ("advantages", (), r"expected advantages of shape \[4\] or \[4, 6\]; got \[\]"),
        ("advantages", (4, 1), r"expected advantages of shape \[4\] or \[4, 6\]; got \[4, 1\]"),
        ("old_logprobs", (6,), r"expected old_logprobs of shape \[4, 6\]; got \[6\]"),
        ("reference_logprobs", (4, 1), r"expected reference_logprobs of shape \[4, 6\]; got \[4, 1\]"),
        ("weights", (4,), r"expected weights of shape \[4, 6\]; got \[4\]"),
        ("correction_weights", (1, 6), r"expected correction_weights of shape \[4, 6\]; got \[1, 6\]"),
        ("logprobs", (6,), r"expected logprobs of shape \[batch, R\]; got \[6\]"),
    ],
)
def test_wrong_shapes_raise(name, shape, message):
    """No broadcasting. Other losses: tests/house/test_wrong_objects.py."""
    tokens = jnp.zeros((4, 6))
    good = LossInputs(tokens, tokens, None, jnp.zeros(4), tokens)
    policy_loss(good, LossConfig())
    with pytest.raises(ValueError, match=message):
        policy_loss(good.replace(**{name: jnp.zeros(shape)}), LossConfig())
