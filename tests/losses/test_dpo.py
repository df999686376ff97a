"""The DPO loss: by hand, its gradient by formula, and what must not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.dpo import (
    DPO_METRICS,
    DPOConfig,
    DPOInputs,
    dpo_loss,
    dpo_metrics,
    pair_weights,
    sequence_logprobs,
)

LOSSES = pytest.mark.parametrize(
    "config", [DPOConfig(beta=0.5), DPOConfig(beta=0.5, loss_type="ipo")], ids=lambda c: c.loss_type
)


def inputs_of(chosen, rejected, reference_chosen, reference_rejected, weights) -> DPOInputs:
    arrays = (chosen, rejected, reference_chosen, reference_rejected, weights)
    return DPOInputs(*(jnp.asarray(np.atleast_1d(x), jnp.float32) for x in arrays))


def gradients(inputs: DPOInputs, config: DPOConfig):
    """By the log-probabilities of the chosen and of the rejected."""

    def loss(chosen, rejected):
        return dpo_loss(inputs.replace(chosen_logprobs=chosen, rejected_logprobs=rejected), config)[0]

    return jax.grad(loss, argnums=(0, 1))(inputs.chosen_logprobs, inputs.rejected_logprobs)


# --- by hand: log ratios 1 and -1 to the reference, h = 2, beta h = 1

ONE_PAIR = inputs_of(-4.0, -6.0, -5.0, -5.0, 1.0)


def test_sigmoid_by_hand():
    loss, terms = dpo_loss(ONE_PAIR, DPOConfig(beta=0.5))
    np.testing.assert_allclose(loss, 0.31326168751822286, rtol=1e-6)  # log(1 + e^-1)
    np.testing.assert_allclose([terms["rewards/chosen"][0], terms["rewards/rejected"][0]], [0.5, -0.5], rtol=1e-6)


def test_ipo_by_hand():
    """(2 - 1 / (2 * 0.5))^2 = 1, and at the target 1 / (2 beta) = h nothing is left."""
    np.testing.assert_allclose(dpo_loss(ONE_PAIR, DPOConfig(beta=0.5, loss_type="ipo"))[0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(dpo_loss(ONE_PAIR, DPOConfig(beta=0.25, loss_type="ipo"))[0], 0.0, atol=1e-6)


def random_inputs(seed: int, pairs: int = 5) -> DPOInputs:
    rng = np.random.default_rng(seed)
    chosen, rejected, reference_chosen, reference_rejected = rng.normal(-20, 3, (4, pairs))
    return inputs_of(chosen, rejected, reference_chosen, reference_rejected, rng.uniform(0.1, 1, pairs))


@LOSSES
def test_gradients_by_formula(config):
    """sigmoid: -beta sigmoid(-beta h) (arXiv:2305.18290 section 4); ipo: 2 (h - 1 / (2 beta)). Beta is 0.5."""
    inputs = random_inputs(0)
    chosen, rejected, reference_chosen, reference_rejected, weights = map(np.float64, jax.tree.leaves(inputs))
    h = chosen - rejected - reference_chosen + reference_rejected
    slope = -0.5 / (1 + np.exp(0.5 * h)) if config.loss_type == "sigmoid" else 2 * (h - 1)
    of_chosen, of_rejected = gradients(inputs, config)
    np.testing.assert_allclose(of_chosen, weights * slope, rtol=1e-4)
    np.testing.assert_allclose(of_rejected, -weights * slope, rtol=1e-4)


@LOSSES
def test_only_the_policy_has_a_gradient(config):
    inputs = random_inputs(0)
    slopes = jax.grad(lambda x: dpo_loss(x, config)[0])(inputs)
    for name in ("reference_chosen_logprobs", "reference_rejected_logprobs", "weights"):
        np.testing.assert_array_equal(getattr(slopes, name), 0.0)
    terms = jax.grad(lambda x: dpo_loss(x, config)[1]["rewards/chosen"].sum())(inputs)
    np.testing.assert_array_equal(terms.chosen_logprobs, 0.0)


@LOSSES
@pytest.mark.parametrize("junk", [jnp.inf, -jnp.inf, jnp.nan, 1e30])
@pytest.mark.parametrize("name", ["chosen_logprobs", "reference_rejected_logprobs"])
def test_a_pair_that_weighs_nothing_may_hold_anything(config, junk, name):
    inputs = random_inputs(1)
    inputs = inputs.replace(weights=inputs.weights.at[2].set(0.0))
    dirty = inputs.replace(**{name: getattr(inputs, name).at[2].set(junk)})
    assert float(dpo_loss(dirty, config)[0]) == float(dpo_loss(inputs, config)[0])
    jax.tree.map(np.testing.assert_array_equal, dpo_loss(dirty, config)[1], dpo_loss(inputs, config)[1])
    jax.tree.map(np.testing.assert_array_equal, gradients(dirty, config), gradients(inputs, config))


@LOSSES
def test_far_from_the_reference_nothing_overflows(config):
    inputs = inputs_of([-1e4, -1.0], [-1.0, -1e4], [-1.0, -1.0], [-1.0, -1.0], [0.5, 0.5])
    assert np.isfinite(dpo_loss(inputs, config)[0])
    assert all(np.isfinite(x).all() for x in gradients(inputs, config))


@LOSSES
def test_microbatches_and_order_change_nothing(config):
    inputs = random_inputs(2, pairs=6)
    whole = dpo_loss(inputs, config)[0]
    order = np.array([3, 0, 5, 1, 4, 2])
    parts = [dpo_loss(jax.tree.map(lambda x, i=i: x[order[i : i + 2]], inputs), config)[0] for i in (0, 2, 4)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


# --- weights, sums over tokens, metrics


def test_pairs_without_signal_leave_the_denominator():
    np.testing.assert_allclose(pair_weights(jnp.array([True, False, True, True])), [1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(pair_weights(jnp.zeros(3, bool)), np.zeros(3))


@pytest.mark.parametrize("junk", [0.0, jnp.nan, -jnp.inf])
def test_padding_changes_nothing(junk):
    logprobs = jnp.array([[-1.0, -2.0, -4.0], [-0.5, junk, junk]])
    mask = jnp.array([[True, True, True], [True, False, False]])
    wide = jnp.pad(logprobs, ((0, 0), (0, 2)), constant_values=junk)
    np.testing.assert_allclose(sequence_logprobs(logprobs, mask), [-7.0, -0.5])
    np.testing.assert_allclose(sequence_logprobs(wide, jnp.pad(mask, ((0, 0), (0, 2)))), [-7.0, -0.5])
    slope = jax.grad(lambda x: sequence_logprobs(x, mask).sum())(logprobs)
    np.testing.assert_array_equal(slope, mask)


def test_metrics_by_hand():
    """Margins 1, -1 and, of a pair that weighs nothing, 0."""
    inputs = inputs_of([-4, -6, -1], [-6, -4, -2], [-5, -5, -9], [-5, -4, -9], [0.5, 0.5, 0.0])
    terms = dpo_loss(inputs, DPOConfig(beta=0.5))[1]
    metrics = dpo_metrics(terms, inputs.weights)
    expected = {"rewards/chosen": 0.0, "rewards/rejected": -0.25, "rewards/margins": 0.25, "rewards/accuracies": 0.5}
    expected |= {"logps/chosen": -5.0, "logps/rejected": -5.0}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)
    nothing = dpo_metrics(terms, jnp.zeros(3))
    assert set(nothing) == set(expected) == DPO_METRICS.keys() and not any(float(value) for value in nothing.values())


@pytest.mark.parametrize("beta", [0.0, -0.1, float("nan"), float("inf")])
def test_a_beta_that_means_nothing(beta):
    with pytest.raises(ValueError, match=f"expected a finite beta > 0; got {beta}"):
        DPOConfig(beta=beta)


def test_an_unknown_loss():
    config = DPOConfig()
    object.__setattr__(config, "loss_type", "hinge")  # behind the type checker, which users do not have
    with pytest.raises(ValueError, match="expected loss_type to be one of sigmoid, ipo; got 'hinge'"):
        config.__post_init__()


@pytest.mark.parametrize("name", ["rejected_logprobs", "reference_chosen_logprobs", "weights"])
def test_wrong_shapes(name):
    good = DPOInputs(*[jnp.zeros(4)] * 5)
    dpo_loss(good, DPOConfig())
    with pytest.raises(ValueError, match=rf"expected {name} of shape \[4\]; got \[1\]"):
        dpo_loss(good.replace(**{name: jnp.zeros(1)}), DPOConfig())
