"""Divergences between dense and masked policy: values, who gets the gradient, and which rows.

The estimates from sampled tokens are averaged here over all tokens, with the weights of the policy that draws them:
then they must be what the table in `sampled_divergence` says, against closed forms in NumPy.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from smd_jax.losses.distillation import (
    DistillConfig,
    choose,
    divergence,
    kl_divergence,
    sampled_divergence,
    spread,
    teacher_rows,
)

DIRECTIONS = ["forward", "reverse", "published", "anchor"]
ESTIMATORS = ["k1", "k2", "k3"]
RNG = np.random.default_rng(0)
DENSE, SHADOW = (jnp.asarray(RNG.normal(0, 2, (2, 3, 5)), jnp.float32) for _ in range(2))


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum(-1, keepdims=True)


def numpy_kl(p_logits, q_logits) -> np.ndarray:
    p, q = softmax(p_logits), softmax(q_logits)
    return (p * np.log(p / q)).sum(-1)


def test_by_hand():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL(p ‖ q) = 1/2 log 2 - 1/4 log 2
    p, q = jnp.log(jnp.array([0.5, 0.25, 0.25])), jnp.log(jnp.array([0.25, 0.25, 0.5]))
    np.testing.assert_allclose(kl_divergence(p, q), np.log(2) / 4, rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(p + 7, q - 3), np.log(2) / 4, rtol=1e-5)  # logits need no normalisation
    p, q = jnp.log(jnp.array([0.75, 0.25])), jnp.log(jnp.array([0.5, 0.5]))
    np.testing.assert_allclose(kl_divergence(p, q), 0.75 * np.log(1.5) + 0.25 * np.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(q, p), -0.5 * np.log(0.75), rtol=1e-6)


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


@settings(deadline=None)
@given(dense=logits, shadow=logits, direction=st.sampled_from(DIRECTIONS))
def test_never_negative_and_zero_at_equality(dense, shadow, direction):
    dense, shadow = jnp.asarray(dense), jnp.asarray(shadow)
    assert divergence(dense, shadow, direction).min() >= -1e-5
    np.testing.assert_array_equal(divergence(dense, dense, direction), np.zeros((1, 1)))


# --- estimates from the sampled tokens


def of_token(direction, estimator, dense: float, shadow: float) -> tuple[float, float, float]:
    """Value, and slopes by log d and log s, of a token with these log-probabilities."""

    def one(dense, shadow):
        return sampled_divergence(dense[None, None], shadow[None, None], direction, estimator)[0, 0]

    value, (by_dense, by_shadow) = jax.value_and_grad(one, argnums=(0, 1))(jnp.float32(dense), jnp.float32(shadow))
    return float(value), float(by_dense), float(by_shadow)


L = np.log(2)


@pytest.mark.parametrize(
    ("direction", "estimator", "value", "slope"),
    [  # rho = (1/2) / (1/4) = 2
        ("reverse", "k1", -L, -L),
        ("reverse", "k2", L**2 / 2, -L),
        ("reverse", "k3", 1 - L, -1),
        ("forward", "k1", 2 * L, -2),
        ("forward", "k2", L**2 / 2, -L),
        ("forward", "k3", 2 * L - 1, -1),
        ("anchor", "k1", 2 * L, -2),
        ("anchor", "k2", L**2 / 2, -L),
        ("anchor", "k3", 2 * L - 1, -1),
        ("published", "k1", 2 * L, 2 * L + 2),
        ("published", "k2", L**2 / 2, L),
        ("published", "k3", 2 * L - 1, 2 * L),
    ],
)
def test_one_token_by_hand(direction, estimator, value, slope):
    got, of_dense, of_shadow = of_token(direction, estimator, np.log(0.5), np.log(0.25))
    np.testing.assert_allclose(got, value, rtol=1e-5)
    learner, teacher = (of_dense, of_shadow) if direction == "published" else (of_shadow, of_dense)
    np.testing.assert_allclose(learner, slope, rtol=1e-5)
    assert teacher == 0


def numpy_references() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Divergence `[2, 3]` and its gradient by the learner's logits `[2, 3, 5]`; s is fixed where d learns."""
    d, s = softmax(DENSE), softmax(SHADOW)
    log = np.log(d / s)
    forward, reverse = (d * log).sum(-1), -(s * log).sum(-1)
    return {
        "KL(s ‖ d)": (reverse, s * (-log - reverse[..., None])),
        "KL(d ‖ s)": (forward, s - d),
        "KL(d ‖ s) by d": (forward, d * (log - forward[..., None])),
        "E[log²]/2 by d": ((s * log**2).sum(-1) / 2, s * log - d * (s * log).sum(-1, keepdims=True)),
    }


@pytest.mark.parametrize(
    ("direction", "estimator", "value", "gradient"),
    [
        ("reverse", "k1", "KL(s ‖ d)", "KL(s ‖ d)"),
        ("reverse", "k2", "E[log²]/2 by d", "KL(s ‖ d)"),
        ("reverse", "k3", "KL(s ‖ d)", "KL(d ‖ s)"),
        ("forward", "k1", "KL(d ‖ s)", "KL(d ‖ s)"),
        ("forward", "k2", "E[log²]/2 by d", "KL(s ‖ d)"),
        ("forward", "k3", "KL(d ‖ s)", "KL(d ‖ s)"),
        ("anchor", "k1", "KL(d ‖ s)", "KL(d ‖ s)"),
        ("anchor", "k2", "E[log²]/2 by d", "KL(s ‖ d)"),
        ("anchor", "k3", "KL(d ‖ s)", "KL(d ‖ s)"),
        ("published", "k1", "KL(d ‖ s)", "KL(d ‖ s) by d"),
        ("published", "k2", "E[log²]/2 by d", "E[log²]/2 by d"),
        ("published", "k3", "KL(d ‖ s)", "KL(d ‖ s) by d"),
    ],
)
def test_on_average_over_the_tokens(direction, estimator, value, gradient):
    def average(dense_logits, shadow_logits):
        dense, shadow = (jax.nn.log_softmax(x).reshape(6, 5) for x in (dense_logits, shadow_logits))
        draws = jax.lax.stop_gradient(jnp.exp(shadow))  # sampling has no gradient
        return jnp.sum(draws * sampled_divergence(dense, shadow, direction, estimator), axis=-1)

    references = numpy_references()
    assert all(np.abs(a[1] - b[1]).max() > 0.1 for a, b in itertools.combinations(references.values(), 2))
    np.testing.assert_allclose(average(DENSE, SHADOW).reshape(2, 3), references[value][0], rtol=1e-4)
    dense, shadow = jax.grad(lambda d, s: average(d, s).sum(), argnums=(0, 1))(DENSE, SHADOW)
    learner, teacher = (dense, shadow) if direction == "published" else (shadow, dense)
    np.testing.assert_allclose(learner, references[gradient][1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(teacher, np.zeros(DENSE.shape))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("log_ratio", [-1e6, -30.0, 30.0, 1e6])
def test_nothing_overflows(direction, estimator, log_ratio):
    dense, shadow = min(0.0, log_ratio), min(0.0, -log_ratio)
    value, *slopes = of_token(direction, estimator, dense, shadow)
    assert all(np.isfinite([value, *slopes])) and max(map(abs, (value, *slopes))) < 2e10
    slope = slopes[0] if direction == "published" else slopes[1]
    if (direction, estimator) == ("published", "k1"):  # rho (1 + log rho) is negative below rho = 1/e
        assert np.sign(slope) == np.sign(log_ratio)
    elif (direction, estimator) in {("forward", "k1"), ("anchor", "k1")}:
        assert slope < 0  # a token that the teacher may say is always raised
    else:  # towards the teacher's probability
        assert np.sign(slope) == np.sign(log_ratio) * (1 if direction == "published" else -1)


logprob = st.floats(-25, 0, width=32)


@settings(deadline=None)
@given(dense=logprob, shadow=logprob, direction=st.sampled_from(DIRECTIONS))
def test_k2_and_k3_are_never_negative(dense, shadow, direction):
    for estimator in ("k2", "k3"):
        value, *_ = of_token(direction, estimator, dense, shadow)
        assert value >= -1e-5
        assert of_token(direction, estimator, dense, dense) == (0, 0, 0)


@pytest.mark.parametrize(("direction", "third"), [("reverse", 1 / 6), ("forward", 1 / 3), ("published", 1 / 3)])
def test_k3_is_accurate_where_the_policies_are_close(direction, third):
    dense = np.float32(-0.9997)
    x = float(dense) + 1  # rho = e^x: the values are x²/2 + third * x³ + …
    value, *_ = of_token(direction, "k3", float(dense), -1.0)
    np.testing.assert_allclose(value, x**2 / 2 + third * x**3, rtol=1e-3)


# --- which rows


@pytest.mark.parametrize(
    ("rows", "fraction", "expected"),
    [(8, 1.0, 8), (8, 0.5, 4), (8, 0.125, 1), (1, 1.0, 1), (6, 1 / 3, 2), (10, 0.3, 3)],
)
def test_number_of_teacher_rows(rows, fraction, expected):
    assert teacher_rows(rows, fraction) == expected


@pytest.mark.parametrize(("rows", "fraction"), [(8, 0.3), (8, 0.01), (1, 0.5), (3, 1e-9)])
def test_a_fraction_that_is_no_whole_number_of_rows(rows, fraction):
    with pytest.raises(ValueError, match=rf"rows of a microbatch to be a whole number >= 1; got {fraction} \* {rows}"):
        teacher_rows(rows, fraction)


@pytest.mark.parametrize(
    ("start", "size", "count", "expected"),
    [(0, 8, 4, [0, 2, 4, 6]), (3, 8, 4, [3, 5, 7, 1]), (0, 7, 3, [0, 2, 4]), (6, 7, 3, [6, 1, 3]), (9, 2, 2, [1, 0])],
)
def test_spread_by_hand(start, size, count, expected):
    assert spread(jnp.int32(start), size, count).tolist() == expected


def test_spread_over_very_many():
    # 100,000 * 99,999 does not fit into 32 bits
    assert len(set(spread(jnp.int32(5), 100_000, 99_999).tolist())) == 99_999


def test_every_row_has_its_turn_equally_often():
    chosen = jax.jit(lambda step: choose(DistillConfig(fraction=2 / 3), step, 3))
    assert sorted(row for step in range(3) for row in chosen(jnp.int32(step)).tolist()) == [0, 0, 1, 1, 2, 2]


# --- the configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": -0.1}, "coefficient >= 0, because a negative one would drive the two policies apart; got -0.1"),
        ({"coef": float("nan")}, "expected a finite distillation coefficient >= 0.*; got nan"),
        ({"coef": float("inf")}, "expected a finite distillation coefficient >= 0.*; got inf"),
        ({"fraction": 0.0}, "expected 0 < distill_fraction <= 1; got 0.0"),
        ({"fraction": 1.5}, "expected 0 < distill_fraction <= 1; got 1.5"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)
