"""GAE and the critic's loss: by hand, against TRL (golden/ppo.json), and with junk in the padding."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.losses.value import ValueConfig, explained_variance, gae, terminal_rewards, value_loss, whiten
from tests import paths

GOLDEN = json.loads((paths.GOLDEN / "ppo.json").read_text(encoding="utf-8"))
INPUTS = {name: np.array(x) for name, x in GOLDEN["inputs"].items()}
MASK = np.arange(6)[None] < INPUTS["lengths"][:, None]
JUNK = np.array([np.nan, np.inf, -np.inf, 1e30])


def f32(x) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def with_junk(x, mask, roll: int = 0):
    """`x` inside the mask, NaN and infinity outside."""
    return f32(np.where(mask, x, np.roll(np.resize(JUNK, mask.shape), roll)))


def plain_gae(rewards, values, gamma, lam):
    """One response without padding, by the double sum: A_t = sum over k of (gamma lam)^k delta_{t+k}."""
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    count = len(deltas)
    return np.array([sum((gamma * lam) ** k * deltas[t + k] for k in range(count - t)) for t in range(count)])


# --- GAE


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda case: f"gamma {case['gamma']}, lam {case['lam']}")
def test_gae_matches_trl(case):
    rewards, values = with_junk(INPUTS["rewards"], MASK), with_junk(INPUTS["old_values"], MASK, 1)
    advantages, returns = gae(rewards, values, jnp.asarray(MASK), case["gamma"], case["lam"])
    np.testing.assert_allclose(advantages, case["advantages"], atol=2e-6)
    np.testing.assert_allclose(returns, case["returns"], atol=2e-6)


@st.composite
def padded_batches(draw):
    """Masks with holes anywhere, a seed, and one of a few pairs of gamma and lam, so that few programs compile."""
    rows = st.lists(st.booleans(), min_size=7, max_size=7)
    masks = draw(st.lists(rows, min_size=3, max_size=3))
    return masks, draw(st.integers(0, 2**16)), draw(st.sampled_from([(1.0, 0.95), (0.7, 0.5), (0.0, 1.0)]))


jitted_gae = jax.jit(gae, static_argnums=(3, 4))


@settings(deadline=None, max_examples=60)
@given(padded_batches())
def test_masked_columns_have_no_effect(batch):
    mask, seed, (gamma, lam) = np.array(batch[0]), *batch[1:]
    rewards, values = np.random.default_rng(seed).normal(size=(2, *mask.shape)).astype(np.float32)
    arrays = with_junk(rewards, mask, seed), with_junk(values, mask, seed + 1)
    advantages, returns = map(np.asarray, jitted_gae(*arrays, jnp.asarray(mask), gamma, lam))
    for row, inside in enumerate(mask):
        expected = plain_gae(rewards[row, inside].astype(np.float64), values[row, inside], gamma, lam)
        np.testing.assert_allclose(advantages[row, inside], expected, atol=2e-5)
        np.testing.assert_allclose(returns[row, inside], expected + values[row, inside], atol=2e-5)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_bfloat16_inputs_give_float32():
    half = jnp.ones((1, 2), jnp.bfloat16)
    advantages, returns = gae(half, half, jnp.ones((1, 2), bool))
    assert advantages.dtype == returns.dtype == jnp.float32


# --- rewards at the end


def test_the_last_token_gets_the_reward():
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    got = terminal_rewards(jnp.array([2.0, -1.0, 0.5, 7.0]), mask)
    np.testing.assert_array_equal(got, [[0, 0, 0, 2], [0, -1, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]])


def test_nan_reward_stays_in_its_row():
    mask = jnp.array([[1, 1], [1, 0], [0, 0]], bool)
    rewards = terminal_rewards(jnp.array([1.0, 2.0, jnp.nan]), mask)
    advantages, _ = gae(rewards, jnp.zeros((3, 2)), mask, 1.0, 1.0)
    np.testing.assert_array_equal(advantages, [[1, 1], [2, 0], [0, 0]])


# --- whitening


def test_whitening_matches_trl():
    advantages = with_junk(np.array(GOLDEN["gae"][0]["advantages"]), MASK)
    np.testing.assert_allclose(whiten(advantages, jnp.asarray(MASK)), GOLDEN["whitened"], atol=5e-6)


@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_of_at_most_one_token_is_zero(tokens):
    mask = jnp.arange(4)[None] < tokens
    np.testing.assert_array_equal(whiten(f32([[5.0, 1.0, 2.0, 3.0]]), mask), np.zeros((1, 4)))


# --- explained variance

TOKENS = np.array([[1, 1, 1, 1, 0]], bool)
RETURNS = np.array([[0.0, 1.0, 2.0, 3.0, np.nan]])  # variance 1.25
explained = functools.partial(explained_variance, returns=f32(RETURNS), mask=jnp.asarray(TOKENS))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0, 1, 2, 3, 9]], 1.0),
        ([[5, 6, 7, 8, 9]], 1.0),  # a critic that is off by a constant
        ([[4, 4, 4, 4, np.inf]], 0.0),
        ([[0, -1, -2, -3, 9]], -3.0),  # the differences 0, 2, 4, 6 have variance 5
        ([[0, 0, 2, 2, 9]], 0.8),  # the differences 0, 1, 0, 1 have variance 1/4
    ],
)
def test_explained_variance_by_hand(values, expected):
    np.testing.assert_allclose(explained(f32(values)), expected, atol=1e-4)


def test_explained_variance_is_finite_without_variance():
    assert np.isfinite(explained_variance(f32([[1.0, 2.0]]), f32([[1.0, 1.0]]), jnp.ones((1, 2), bool)))
    assert np.isfinite(explained(f32(RETURNS), mask=jnp.zeros((1, 5), bool)))


# --- the critic's loss


def test_value_loss_without_clipping():
    now, old, returns = f32([[2.0, -1.0]]), f32([[0.0, 0.0]]), f32([[3.0, 3.0]])
    loss, clipped = value_loss(now, old, returns, f32([[0.5, 0.5]]), ValueConfig(clip_range=None))
    assert float(loss) == 0.5 * (0.5 * 1 + 0.5 * 16)
    assert clipped.dtype == bool and not clipped.any()


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: f"clip {case['cliprange_value']:g}")
def test_value_loss_matches_trl(case):
    now, old, returns = (with_junk(INPUTS[x], MASK) for x in ("values", "old_values", "returns"))
    weights = f32(MASK / MASK.sum())
    config = ValueConfig(clip_range=case["cliprange_value"])
    (loss, clipped), grad = jax.value_and_grad(value_loss, has_aux=True)(now, old, returns, weights, config)
    np.testing.assert_allclose(loss, case["value"], rtol=1e-5)
    np.testing.assert_allclose(grad, case["value_grad"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(clipped.sum() / MASK.sum(), case["clipfrac"], rtol=1e-6)
    assert not np.asarray(clipped)[~MASK].any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("coef", 0.0, "expected a finite coef > 0, because the critic must learn; got 0.0"),
        ("coef", float("nan"), "expected a finite coef > 0"),
        ("coef", float("inf"), "expected a finite coef > 0"),
        ("clip_range", 0.0, "expected clip_range > 0, or None for no bound; got 0.0"),
        ("clip_range", -0.2, "expected clip_range > 0, or None for no bound; got -0.2"),
    ],
)
def test_invalid_options_raise(field, value, message):
    with pytest.raises(ValueError, match=message):
        ValueConfig(**{field: value})
