"""Divergences between dense and masked policy: values, and who gets the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from smd_jax.losses.distillation import DistillConfig, divergence

DIRECTIONS = ["forward", "reverse", "published", "anchor"]
RNG = np.random.default_rng(0)
DENSE, SHADOW = (jnp.asarray(RNG.normal(0, 2, (2, 3, 5)), jnp.float32) for _ in range(2))


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum(-1, keepdims=True)


def numpy_kl(p_logits, q_logits) -> np.ndarray:
    p, q = softmax(p_logits), softmax(q_logits)
    return (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_direction_against_numpy(direction):
    first, second = (SHADOW, DENSE) if direction == "reverse" else (DENSE, SHADOW)
    expected = numpy_kl(first, second)
    np.testing.assert_allclose(divergence(DENSE, SHADOW, direction), expected, rtol=1e-5)
    assert np.abs(expected - numpy_kl(second, first)).max() > 0.1, "the arguments must not be exchangeable"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_who_gets_the_gradient(direction):
    dense, shadow = jax.grad(lambda d, s: divergence(d, s, direction).sum(), argnums=(0, 1))(DENSE, SHADOW)
    learner, teacher = (dense, shadow) if direction == "published" else (shadow, dense)
    np.testing.assert_array_equal(teacher, np.zeros(DENSE.shape))
    if direction in ("forward", "anchor"):  # d KL(p ‖ q) / d logits of q
        expected = softmax(SHADOW) - softmax(DENSE)
    else:  # d KL(p ‖ q) / d logits of p = p (log p - log q - KL)
        first, second = (SHADOW, DENSE) if direction == "reverse" else (DENSE, SHADOW)
        p, q = softmax(first), softmax(second)
        expected = p * (np.log(p / q) - numpy_kl(first, second)[..., None])
    np.testing.assert_allclose(learner, expected, rtol=1e-4, atol=1e-6)


logits = hnp.arrays(np.float32, (1, 1, 4), elements=st.floats(-20, 20, width=32))


@settings(deadline=None, max_examples=30)
@given(dense=logits, shadow=logits, direction=st.sampled_from(DIRECTIONS))
def test_never_negative_and_zero_at_equality(dense, shadow, direction):
    dense, shadow = jnp.asarray(dense), jnp.asarray(shadow)
    assert divergence(dense, shadow, direction).min() >= -1e-5
    np.testing.assert_array_equal(divergence(dense, dense, direction), np.zeros((1, 1)))


# --- the configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": -0.1}, "coefficient >= 0, because a negative one would drive the two policies apart; got -0.1"),
        ({"coef": float("nan")}, "expected a finite distillation coefficient >= 0.*; got nan"),
        ({"coef": float("inf")}, "expected a finite distillation coefficient >= 0.*; got inf"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)
