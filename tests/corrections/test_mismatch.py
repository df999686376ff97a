"""Metrics of the mismatch and of corrections: by hand, and against verl and NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import TIS, CorrectionInputs
from smd_jax.metrics import CORRECTION_METRICS, SAMPLER_LEARNER_METRICS, correction_metrics, sampler_learner_metrics
from smd_jax.ratios import lower_percentile, overlap
from tests.correction_cases import GOLDEN, golden_inputs, inputs_of
from tests.documented_metrics import documented


def statistics(inputs: CorrectionInputs):
    assert inputs.sampler_logprobs is not None
    metrics = sampler_learner_metrics(inputs.sampler_logprobs, inputs.old_logprobs, inputs.mask)
    assert metrics.keys() == set(SAMPLER_LEARNER_METRICS) == documented("Sampler and learner")
    return {name: value for name, value in metrics.items() if name.startswith("rollout_corr/")}


def test_metrics_match_verl():
    inputs = golden_inputs()
    metrics = statistics(inputs)
    for name in ("chi2_token", "chi2_seq"):
        np.testing.assert_allclose(metrics[f"rollout_corr/{name}"], GOLDEN["metrics"][name], rtol=1e-5)
    terms = TIS().terms(inputs)
    metrics = correction_metrics(terms.weights, terms.counted, inputs.mask)
    for name in ("mean", "min", "max", "eff_sample_size"):
        value = metrics[f"rollout_corr/rollout_is_{name}"]
        np.testing.assert_allclose(value, GOLDEN["metrics"][f"rollout_is_{name}"], rtol=1e-5)


def test_chi2_by_hand():
    """Tokens 2, 0.5, 1: mean square 5.25 / 3. Responses 2 * 0.5 and 1: both 1. ESS (3.5 / 3)^2 / (5.25 / 3)."""
    inputs = inputs_of([[2.0, 0.5], [1.0, 8.0]], mask=[[1, 1], [1, 0]])
    metrics = statistics(inputs)
    expected = {"chi2_token": 0.75, "chi2_seq": 0.0, "eff_sample_size": 7 / 9, "agreement_p5": 0.55}
    assert metrics.keys() == {f"rollout_corr/{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"rollout_corr/{name}"], value, rtol=1e-5, atol=1e-6)


def test_rejected_fractions_by_hand():
    """6 tokens: one not kept, one of weight 0, one both. Row 1 loses all of its tokens, row 2 none; row 3 is empty."""
    mask = jnp.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    keep = mask.at[0, 0].set(False).at[1, 0].set(False)
    weights = jnp.where(mask, 1.0, 0.0).at[0, 1].set(0.0).at[1, 0].set(0.0)
    metrics = correction_metrics(weights, keep, mask)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_masked_fraction"], 3 / 6)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_seq_masked_fraction"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_rs_seq_dropped_fraction"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_eff_sample_size"], 4 / 6, rtol=1e-6)
    counted = jnp.ones((1, 2), bool)
    metrics = correction_metrics(jnp.zeros((1, 2)), counted, counted)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0


def test_weights_by_hand():
    """Rejected tokens count, padding does not."""
    mask = jnp.array([[1, 1, 0], [1, 0, 0]], bool)
    weights = jnp.array([[0.5, 2.0, jnp.nan], [0.8, -1.0, jnp.inf]])
    metrics = correction_metrics(weights, mask.at[0, 0].set(False), mask)
    for name, value in {"mean": 1.1, "min": 0.5, "max": 2.0}.items():
        np.testing.assert_allclose(metrics[f"rollout_corr/rollout_is_{name}"], value, rtol=1e-6)


def test_every_statistic_is_documented():
    inputs = golden_inputs()
    terms = TIS().terms(inputs)
    metrics = correction_metrics(terms.weights, terms.counted, inputs.mask)
    assert metrics.keys() == set(CORRECTION_METRICS) == documented("Corrections")


def test_statistics_without_tokens_and_without_mismatch():
    one = inputs_of(np.ones((2, 3)))
    for mask in (one.mask, jnp.zeros((2, 3), bool)):
        metrics = statistics(one.replace(mask=mask))
        metrics |= correction_metrics(jnp.where(mask, 1.0, 0.0), mask, mask)
        for name, value in metrics.items():
            is_one = "rollout_is" in name or name.endswith(("size", "p5"))
            assert value == (1.0 if is_one else 0.0), (name, value)


@pytest.mark.parametrize("percent", [0.0, 5.0, 37.0, 50.0, 100.0])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_percentiles_match_numpy(percent, count):
    rng = np.random.default_rng(count)
    values, mask = rng.uniform(size=(5, 8)).astype(np.float32), np.zeros(40, bool)
    mask[rng.permutation(40)[:count]] = True
    mask = mask.reshape(5, 8)
    junk = jnp.where(mask, values, jnp.nan)
    result = lower_percentile(junk, jnp.asarray(mask), percent)
    np.testing.assert_allclose(result, np.percentile(values[mask], percent), rtol=1e-5)


def test_invalid_percent_raises():
    with pytest.raises(ValueError, match="expected 0 <= percent <= 100; got 101"):
        lower_percentile(jnp.ones((1, 1)), jnp.ones((1, 1), bool), 101.0)


def test_overlap_is_one_minus_total_variation_and_the_mean_of_clipped_xi():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = overlap(jnp.log(jnp.asarray(p)) + 3.0, jnp.log(jnp.asarray(q)))
    np.testing.assert_allclose(exact, 1 - 0.5 * np.abs(p - q).sum(), rtol=1e-6)
    np.testing.assert_allclose(exact, (q * np.minimum(1, p / q)).sum(), rtol=1e-6)
