"""Entropy bonus and training on high-entropy tokens: exact gradients. Against TRL: `test_losses_trl`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import TIS, Naive
from smd_jax.learner.config import UpdateConfig
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.entropy import high_entropy_tokens, weighted_entropy
from smd_jax.losses.policy import LossConfig
from tests import bigram_update
from tests.bigram_update import ADVANTAGES, PARAMS, REFERENCE, explicit_logprobs, explicit_token_logprobs, trajectory
from tests.tiny_update import distance

COEF = 0.7
MASK = np.asarray(trajectory().response_mask)


def entropies(params):
    logprobs = explicit_logprobs(params)
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


@jax.jit
@jax.value_and_grad
def plain_loss(params, chosen, coef):
    """At ratio 1: policy loss of the chosen tokens, over all tokens, minus coef times their mean entropy."""
    policy = jnp.sum(jnp.where(chosen, ADVANTAGES[:, None] * explicit_token_logprobs(params), 0.0)) / MASK.sum()
    return -policy - coef * jnp.sum(jnp.where(chosen, entropies(params), 0.0)) / chosen.sum()


def on_policy():
    """Every ratio is 1."""
    return bigram_update.batch().replace(old_logprobs=None)


def chosen_tokens(quantile: float) -> np.ndarray:
    """By NumPy's quantile in float64."""
    values = np.asarray(entropies(PARAMS), np.float64)
    return MASK & (values >= np.quantile(values[MASK], 1 - quantile) - 1e-6)


@pytest.mark.parametrize(("quantile", "microbatch_size"), [(0.2, None), (0.5, 2), (1.0, 2)])
def test_only_high_entropy_tokens_are_trained(quantile, microbatch_size):
    update = UpdateConfig(entropy_coef=COEF, top_entropy_quantile=quantile, microbatch_size=microbatch_size)
    _, grads = bigram_update.metrics_and_gradients(update, on_policy())
    chosen = chosen_tokens(quantile)
    assert abs(chosen.sum() - quantile * MASK.sum()) <= 1
    assert distance(grads, plain_loss(PARAMS, chosen, COEF)[1]) < 1e-5
    other = plain_loss(PARAMS, MASK, COEF if quantile < 1 else 0.0)[1]
    assert distance(other, plain_loss(PARAMS, chosen, COEF)[1]) > 0.01


def test_kl_acts_on_all_tokens():
    """The KL and the correction metrics ignore the entropy quantile."""
    loss = LossConfig(beta=0.5)
    data = on_policy().replace(advantages=jnp.zeros(bigram_update.ROWS))
    options = {"loss": loss, "visibility": "dense", "correction": TIS()}
    whole = bigram_update.metrics_and_gradients(UpdateConfig(**options), data, REFERENCE)
    few = bigram_update.metrics_and_gradients(UpdateConfig(top_entropy_quantile=0.2, **options), data, REFERENCE)
    assert distance(few[1], whole[1]) < 1e-6
    for name in ("kl", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction"):
        np.testing.assert_allclose(few[0][name], whole[0][name], rtol=1e-6, err_msg=name)


def test_recorded_entropies_select_tokens_under_shadow_masks():
    """A dense learner computes its own entropies."""
    recorded = jax.jit(entropies)(PARAMS)

    def gradients(update, entropy):
        data = on_policy()
        return bigram_update.metrics_and_gradients(
            update, data.replace(trajectory=data.trajectory.replace(entropy=entropy))
        )[1]

    shadow = UpdateConfig(entropy_coef=COEF, top_entropy_quantile=0.5)
    highest = plain_loss(PARAMS, chosen_tokens(0.5), COEF)[1]
    assert distance(gradients(shadow, recorded), highest) < 1e-5
    lowest = MASK & (np.asarray(-recorded) >= np.quantile(-np.asarray(recorded)[MASK], 0.5) - 1e-6)
    assert distance(gradients(shadow, -recorded), plain_loss(PARAMS, lowest, COEF)[1]) < 1e-5
    assert distance(highest, plain_loss(PARAMS, lowest, COEF)[1]) > 0.1
    dense = UpdateConfig(visibility="dense", correction=Naive(), entropy_coef=COEF, top_entropy_quantile=0.5)
    assert distance(gradients(dense, -recorded), highest) < 1e-5


# --- the pure functions


def test_quantiles_by_hand():
    entropy = jnp.array([[0.1, 0.4, 9.0], [0.3, 0.2, jnp.nan]])
    mask = jnp.array([[True, True, False], [True, True, False]])
    expected = {1.0: [0.1, 0.2, 0.3, 0.4], 0.5: [0.3, 0.4], 0.3: [0.4], 0.0: [0.4]}
    for quantile, values in expected.items():
        found = entropy[high_entropy_tokens(entropy, mask, quantile)]
        np.testing.assert_allclose(sorted(found.tolist()), values, rtol=1e-6)
    assert not high_entropy_tokens(entropy, jnp.zeros((2, 3), bool), 0.5).any()
    ties = high_entropy_tokens(jnp.ones((2, 3)), mask, 0.2)
    np.testing.assert_array_equal(ties, mask)


def test_tokens_of_weight_zero_may_be_nan():
    entropy = jnp.array([[0.5, jnp.nan, jnp.inf]])
    weights = jnp.array([[0.5, 0.0, 0.0]])
    value, slopes = jax.value_and_grad(weighted_entropy)(entropy, weights)
    assert float(value) == 0.25
    np.testing.assert_array_equal(slopes, weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"entropy_coef": -0.1}, "expected a finite entropy_coef >= 0, because.*; got -0.1"),
        ({"entropy_coef": math.inf}, "expected a finite entropy_coef >= 0, because.*; got inf"),
        ({"top_entropy_quantile": 1.2}, "expected 0 <= top_entropy_quantile <= 1; got 1.2"),
        (
            {"top_entropy_quantile": 0.2, "policy_coef": 0.0, "distill": DistillConfig()},
            "expected top_entropy_quantile 1 with policy_coef 0.*; got 0.2",
        ),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**options)
