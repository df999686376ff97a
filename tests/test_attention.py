"""Attention against loops in numpy, forward and backward, and what happens to queries that see nothing."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.attention import attend, attend_and_observe
from smd_jax.masks import NEVER, KeyInterval
from smd_kernels import reference
from tests import numpy_decoder

BATCH, T, D = 2, 7, 4
HEADS = {"MHA": (2, 2), "GQA": (4, 2), "one kv head": (4, 1)}
SHAPES = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)


def inputs(heads: int, kv_heads: int, dtype: Any = jnp.float32, seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(BATCH, n, T, D)), dtype) for n in (heads, kv_heads, kv_heads))


def any_mask(kv_heads: int, seed: int = 1) -> np.ndarray:
    """Booleans of no particular kind; query 0 sees nothing anywhere, query 3 nothing in the first head."""
    mask = np.random.default_rng(seed).random((BATCH, kv_heads, T, T)) < 0.5
    mask[:, :, 0] = False
    mask[:, 0, 3] = False
    return mask


def in_numpy(q: Any, k: Any, v: Any, mask: np.ndarray) -> np.ndarray:
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    return np.stack([numpy_decoder.attention(*rows) for rows in zip(*wide, mask, strict=True)])


@SHAPES
@pytest.mark.parametrize("impl", ["reference", "xla", None])
def test_forward(impl: Any, heads: int, kv_heads: int):
    q, k, v = inputs(heads, kv_heads)
    mask = any_mask(kv_heads)
    np.testing.assert_allclose(attend(q, k, v, jnp.array(mask), impl), in_numpy(q, k, v, mask), atol=1e-6, rtol=1e-5)


def test_hand_worked():
    """Scores 0 and ln 3 weigh 1/4 and 3/4; a key that is not seen does not count."""
    q = jnp.array([[[[2.0, 0.0, 0.0, 0.0]]]])  # the two cancels 1 / sqrt(4)
    k = jnp.array([[[[0.0, 9.0, 0.0, 0.0], [np.log(3.0), 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]]]])
    v = jnp.array([[[[4.0, 0.0, 0.0, 0.0], [8.0, 4.0, 0.0, 0.0], [1e3, 1e3, 1e3, 1e3]]]])
    mask = jnp.array([[[[True, True, False]]]])
    for impl in ("reference", "xla"):
        np.testing.assert_allclose(attend(q, k, v, mask, impl)[0, 0, 0], [7.0, 3.0, 0.0, 0.0], rtol=1e-6)


def central_differences(f: Any, x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        gradient[index] = (f(moved[0]) - f(moved[1])) / (2 * step)
    return gradient


@SHAPES
@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_gradients(impl: Any, heads: int, kv_heads: int):
    """Against differences of the numpy loops, in one row."""
    arrays = [np.asarray(x[:1], np.float64) for x in inputs(heads, kv_heads)]
    mask = any_mask(kv_heads)[:1]
    weights = np.random.default_rng(2).normal(size=arrays[0].shape)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k, v, jnp.array(mask), impl) * jnp.asarray(weights, q.dtype))

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(jnp.asarray(x, jnp.float32) for x in arrays))
    for i in range(3):

        def moved(x: np.ndarray, i: int = i) -> float:
            q, k, v = (x if j == i else array for j, array in enumerate(arrays))
            return (in_numpy(q, k, v, mask) * weights).sum()

        expected = central_differences(moved, arrays[i])
        np.testing.assert_allclose(got[i], expected, atol=2e-5)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_query_that_sees_nothing_gives_zeros(impl: Any, scale: float):
    """Exactly, and it passes nothing back; also where scores would overflow an exponential."""
    q, k, v = (scale * x for x in inputs(4, 2))
    mask = any_mask(2)
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, jnp.array(mask), impl), q, k, v)
    blind = np.repeat(~mask.any(-1), 2, axis=1)
    assert blind.any() and not np.asarray(out)[blind].any() and np.isfinite(out).all()
    only_blind = jnp.where(jnp.array(blind)[..., None], jnp.ones_like(out), 0.0)
    for gradient in pull(only_blind):
        assert not np.asarray(gradient).any()
    for gradient in pull(jnp.ones_like(out)):
        assert np.isfinite(gradient).all()
    assert not np.asarray(pull(jnp.ones_like(out))[0])[blind].any()


def test_a_key_that_nobody_sees_does_not_matter():
    q, k, v = inputs(4, 2)
    mask = any_mask(2)
    mask[..., 4] = False
    plain = attend(q, k, v, jnp.array(mask))
    loud = attend(q, k.at[:, :, 4].set(1e30), v.at[:, :, 4].set(1e30), jnp.array(mask))
    np.testing.assert_array_equal(plain, loud)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("shared", [False, True])
def test_intervals_equal_their_booleans(impl: Any, shared: bool):
    q, k, v = inputs(4, 2)
    ends = np.random.default_rng(5).choice([0, 2, 3, 5, NEVER], size=(BATCH, 1 if shared else 2, T))
    interval = KeyInterval(jnp.array(ends, jnp.int32))
    visible = np.zeros((BATCH, 2, T, T), bool)
    for b, h, t, s in np.ndindex(visible.shape):
        visible[b, h, t, s] = s <= t < ends[b, 0 if shared else h, s]
    expected = attend(q, k, v, jnp.array(visible), impl)
    np.testing.assert_array_equal(attend(q, k, v, interval, impl), expected)
    np.testing.assert_array_equal(attend(q, k, v, interval.to_boolean(), impl), expected)


TOLERANCES: dict[Any, float] = {"reference": 2**-8, "xla": 2**-6}


def test_bfloat16():
    """Within the rounding of the inputs and of the products; the reference rounds only at the end."""
    q, k, v = inputs(4, 2, jnp.bfloat16)
    mask = any_mask(2)
    exact = in_numpy(q, k, v, mask)
    for impl, tolerance in TOLERANCES.items():
        out = attend(q, k, v, jnp.array(mask), impl)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance * np.abs(exact).max())


def test_float64_stays():
    with jax.enable_x64(True):
        q, k, v = inputs(4, 2, jnp.float64)
        mask = any_mask(2)
        for impl in ("reference", "xla"):
            out = attend(q, k, v, jnp.array(mask), impl)
            assert out.dtype == jnp.float64
            np.testing.assert_allclose(out, in_numpy(q, k, v, mask), atol=1e-14)


@SHAPES
def test_attention_received(heads: int, kv_heads: int):
    """Column sums of the softmax over queries and the group, by loops."""
    q, k, v = inputs(heads, kv_heads)
    mask = any_mask(kv_heads)
    out, received = attend_and_observe(q, k, v, jnp.array(mask))
    expected = np.zeros((BATCH, kv_heads, T))
    for b, h, t in np.ndindex(BATCH, heads, T):
        shared = h // (heads // kv_heads)
        seen = np.flatnonzero(mask[b, shared, t])
        scores = np.asarray(k[b, shared], np.float64)[seen] @ np.asarray(q[b, h, t], np.float64) / np.sqrt(D)
        expected[b, shared, seen] += numpy_decoder.softmax(scores)
    np.testing.assert_allclose(received, expected, atol=1e-6)
    np.testing.assert_allclose(out, in_numpy(q, k, v, mask), atol=1e-6)


def test_masked_softmax_is_differentiable_where_nothing_is_seen():
    gradient = jax.grad(lambda x: reference.masked_softmax(x, jnp.zeros((2, 3), bool)).sum())(jnp.full((2, 3), 1e30))
    assert not np.asarray(gradient).any()


def test_unknown_implementation():
    """Past the type checks that only tests have."""
    ask: Any = inspect.unwrap(attend)
    with pytest.raises(ValueError, match="None, 'reference' or 'xla'; got 'flash'"):
        ask(*inputs(2, 2), jnp.ones((1, 1, T, T), bool), "flash")
