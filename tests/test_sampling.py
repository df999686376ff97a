"""Sampling: sets and probabilities by hand, and frequencies of many draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.sampling import SamplingConfig, filter_logits, sample, token_logprobs

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 3.0  # logits are free up to a constant
DRAWS = 20_000


def kept(**settings: Any) -> set[int]:
    """Tokens that a filter leaves."""
    out = np.asarray(filter_logits(LOGITS[None], SamplingConfig(**settings)))[0]
    assert (out[np.isfinite(out)] == np.asarray(LOGITS)[np.isfinite(out)]).all()
    return set(np.flatnonzero(np.isfinite(out)).tolist())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.7}, {1, 3, 4}),
        ({"top_p": 0.999}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # of 0.85 that are left, 0.4 and 0.25 are 76 %
        ({"top_k": 2, "top_p": 0.99}, {1, 3}),
    ],
)
def test_sets(settings: dict[str, Any], expected: set[int]):
    assert kept(**settings) == expected


def test_logits_beyond_any_filter_stay_out():
    logits = jnp.array([[1.0, -jnp.inf, 0.0]])
    assert np.isfinite(filter_logits(logits, SamplingConfig(top_p=0.999))).tolist() == [[True, False, True]]


def draw(config: SamplingConfig, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    tokens, logprobs = sample(jnp.broadcast_to(LOGITS, (DRAWS, 5)), keys, config)
    assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32
    return np.asarray(tokens), np.asarray(logprobs)


def sharpened(temperature: float, tokens: list[int]) -> np.ndarray:
    """p^(1/temperature) over some tokens, normalised."""
    weights = np.where(np.isin(np.arange(5), tokens), PROBABILITIES ** (1 / temperature), 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (SamplingConfig(), [0, 1, 2, 3, 4]),
        (SamplingConfig(temperature=0.5), [0, 1, 2, 3, 4]),
        (SamplingConfig(temperature=2.0), [0, 1, 2, 3, 4]),
        (SamplingConfig(top_k=3), [1, 3, 4]),
        (SamplingConfig(temperature=0.5, top_p=0.7), [1, 3]),  # squares: 0.16 and 0.0625 are 83 % of all
        (SamplingConfig(temperature=2.0, top_p=0.7), [1, 3, 4]),  # roots: the first two are only 53 %
    ],
)
def test_frequencies_and_log_probabilities(config: SamplingConfig, tokens: list[int]):
    """Tokens come as often as they should, and report the probability that they came with, filters included."""
    expected = sharpened(config.temperature, tokens)
    drawn, logprobs = draw(config)
    np.testing.assert_allclose(logprobs, np.log(expected[drawn]), rtol=1e-5, atol=1e-6)
    counts = np.bincount(drawn, minlength=5)
    assert not counts[expected == 0].any()
    inside = expected > 0
    chi_square = ((counts - DRAWS * expected)[inside] ** 2 / (DRAWS * expected[inside])).sum()
    assert chi_square < 25  # at most four degrees of freedom: by chance once in 20,000 seeds


def test_greedy():
    """The likeliest token; its log-probability at temperature 1."""
    tokens, logprobs = draw(SamplingConfig(temperature=0.0))
    assert set(tokens) == {1}
    np.testing.assert_allclose(logprobs, np.log(0.4), rtol=1e-5)


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(0.7, top_k=3, top_p=0.9), SamplingConfig(0.0)])
def test_a_row_depends_on_its_own_key_and_logits_alone(config: SamplingConfig):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 9)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 6)
    tokens, logprobs = sample(logits, keys, config)
    for row in range(6):
        alone = sample(logits[row : row + 1], keys[row : row + 1], config)
        assert alone[0][0] == tokens[row]
        np.testing.assert_allclose(alone[1][0], logprobs[row], rtol=1e-6)
    turned = sample(logits[::-1], keys[::-1], config)
    np.testing.assert_array_equal(turned[0], tokens[::-1])


def test_token_logprobs():
    """log_softmax of the logits divided by the temperature, whatever the leading axes."""
    logits = np.random.default_rng(1).normal(size=(2, 3, 4))
    tokens = np.array([[0, 1, 2], [3, 2, 1]])
    scaled = np.exp(logits / 0.7)
    expected = np.log(np.take_along_axis(scaled / scaled.sum(-1, keepdims=True), tokens[..., None], -1))[..., 0]
    got = token_logprobs(jnp.asarray(logits, jnp.float32), jnp.asarray(tokens, jnp.int32), 0.7)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_what_a_learner_can_replay():
    assert SamplingConfig().trainable and SamplingConfig(temperature=0.3).trainable
    for config in (SamplingConfig(0.0), SamplingConfig(top_k=5), SamplingConfig(top_p=0.9)):
        assert not config.trainable


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature >= 0; got -0.1"),
        ({"top_k": -1}, r"top_k >= 0 \(0: no filter\); got -1"),
        ({"top_p": 0.0}, r"0 < top_p <= 1 \(1: no filter\); got 0.0"),
        ({"top_p": 1.1}, r"0 < top_p <= 1 \(1: no filter\); got 1.1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)
