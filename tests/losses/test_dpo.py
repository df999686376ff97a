"""DPO loss: invariances, and pairs of a group. Values and gradients: `tests/learner/test_pair_term.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.dpo import (
    DPOConfig,
    DPOInputs,
    Pairs,
    best_worst,
    dpo_loss,
    dpo_metrics,
    pair_weights,
    sequence_logprobs,
)
from tests.documented_metrics import documented

LOSSES = pytest.mark.parametrize(
    "config", [DPOConfig(beta=0.5), DPOConfig(beta=0.5, loss_type="ipo")], ids=lambda c: c.loss_type
)


def inputs_of(chosen, rejected, reference_chosen, reference_rejected, weights) -> DPOInputs:
    arrays = (chosen, rejected, reference_chosen, reference_rejected, weights)
    return DPOInputs(*(jnp.asarray(np.atleast_1d(x), jnp.float32) for x in arrays))


def gradients(inputs: DPOInputs, config: DPOConfig):
    """With respect to the chosen and the rejected log-probabilities."""

    def loss(chosen, rejected):
        return dpo_loss(inputs.replace(chosen_logprobs=chosen, rejected_logprobs=rejected), config)[0]

    return jax.grad(loss, argnums=(0, 1))(inputs.chosen_logprobs, inputs.rejected_logprobs)


def random_inputs(seed: int, pairs: int = 5) -> DPOInputs:
    rng = np.random.default_rng(seed)
    chosen, rejected, reference_chosen, reference_rejected = rng.normal(-20, 3, (4, pairs))
    return inputs_of(chosen, rejected, reference_chosen, reference_rejected, rng.uniform(0.1, 1, pairs))


def test_metrics_without_counted_pairs_are_zero():
    found = dpo_metrics(dpo_loss(random_inputs(0), DPOConfig())[1], jnp.zeros(5))
    assert found == dict.fromkeys(documented("Online DPO"), 0.0)


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
def test_pairs_of_weight_zero_have_no_effect(config, junk, name):
    inputs = random_inputs(1)
    inputs = inputs.replace(weights=inputs.weights.at[2].set(0.0))
    dirty = inputs.replace(**{name: getattr(inputs, name).at[2].set(junk)})
    assert float(dpo_loss(dirty, config)[0]) == float(dpo_loss(inputs, config)[0])
    jax.tree.map(np.testing.assert_array_equal, dpo_loss(dirty, config)[1], dpo_loss(inputs, config)[1])
    jax.tree.map(np.testing.assert_array_equal, gradients(dirty, config), gradients(inputs, config))


@LOSSES
def test_large_log_ratios_do_not_overflow(config):
    inputs = inputs_of([-1e4, -1.0], [-1.0, -1e4], [-1.0, -1.0], [-1.0, -1.0], [0.5, 0.5])
    assert np.isfinite(dpo_loss(inputs, config)[0])
    assert all(np.isfinite(x).all() for x in gradients(inputs, config))


# --- weights, sums over tokens


def test_pairs_without_signal_are_not_in_the_denominator():
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


@pytest.mark.parametrize("beta", [0.0, -0.1, float("nan"), float("inf")])
def test_invalid_beta_raises(beta):
    with pytest.raises(ValueError, match=f"expected a finite beta > 0; got {beta}"):
        DPOConfig(beta=beta)


def test_unknown_loss_type_raises():
    config = DPOConfig()
    object.__setattr__(config, "loss_type", "hinge")  # past the type checker of the tests
    with pytest.raises(ValueError, match="expected loss_type to be one of sigmoid, ipo; got 'hinge'"):
        config.__post_init__()


@pytest.mark.parametrize("name", ["rejected_logprobs", "reference_chosen_logprobs", "weights"])
def test_wrong_shapes_raise(name):
    good = DPOInputs(*[jnp.zeros(4)] * 5)
    dpo_loss(good, DPOConfig())
    with pytest.raises(ValueError, match=rf"expected {name} of shape \[4\]; got \[1\]"):
        dpo_loss(good.replace(**{name: jnp.zeros(1)}), DPOConfig())


# --- pairs by rewards


def as_lists(pairs: Pairs) -> tuple[list[int], list[int], list[bool]]:
    return pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.signal.tolist()


def test_best_and_worst_by_hand():
    rewards = jnp.array([0.5, 2.0, -1.0, 3.0, 0.0, 1.0])
    assert as_lists(best_worst(rewards, 3)) == ([1, 3], [2, 4], [True, True])
    assert as_lists(best_worst(rewards, 2)) == ([1, 3, 5], [0, 2, 4], [True] * 3)
    assert as_lists(best_worst(rewards, 6)) == ([3], [2], [True])


def test_ties_choose_the_first_and_reject_the_last():
    rewards = jnp.array([0.0, 1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 2.0])
    assert as_lists(best_worst(rewards, 4)) == ([1, 4], [3, 7], [True, False])


def test_nan_reward_gives_no_signal():
    assert best_worst(jnp.array([jnp.nan, 1.0, 0.0, 1.0]), 2).signal.tolist() == [False, True]


def test_a_difference_of_one_bit_gives_a_signal():
    value = np.float32(0.1)
    rewards = jnp.asarray(np.array([value, np.nextafter(value, np.float32(1)), value, value], np.float32))
    assert as_lists(best_worst(rewards, 2)) == ([1, 2], [0, 3], [True, False])
