"""Coefficients by optimizer step: values by hand, up and down, traced, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.losses.schedules import CoefSchedule

HALF = 0.5 * (1 + np.cos(np.pi / 4))  # a quarter of the way along half a wave: 0.854 of the start is left


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (CoefSchedule(1.0, 0.0, 4), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (CoefSchedule(0.0, 0.4, 4), [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
        (CoefSchedule(0.3, 0.1, 1), [0.3, 0.1, 0.1, 0.1, 0.1, 0.1]),
        (CoefSchedule(1.0, 0.0, 4, "cosine"), [1.0, HALF, 0.5, 1 - HALF, 0.0, 0.0]),
        (CoefSchedule(0.0, 2.0, 4, "cosine"), [0.0, 2 - 2 * HALF, 1.0, 2 * HALF, 2.0, 2.0]),
        (CoefSchedule(0.2, 0.2, 4, "cosine"), [0.2] * 6),
    ],
)
def test_by_hand(schedule, expected):
    at = jax.jit(schedule.at)
    got = [at(jnp.int32(step)) for step in range(6)]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    assert got[0].shape == () and got[0].dtype == jnp.float32


def test_a_schedule_is_a_static_argument():
    assert hash(CoefSchedule(1.0, 0.0, 4)) == hash(CoefSchedule(1.0, 0.0, 4))
    assert CoefSchedule(1.0, 0.0, 4) != CoefSchedule(1.0, 0.0, 5)


@pytest.mark.parametrize("steps", [0, -3])
def test_a_schedule_without_steps(steps):
    with pytest.raises(ValueError, match=f"expected steps >= 1 from start to end; got {steps}"):
        CoefSchedule(1.0, 0.0, steps)


def test_an_unknown_shape():
    schedule = CoefSchedule(1.0, 0.0, 4)
    object.__setattr__(schedule, "shape", "square")  # behind the type checker, which users do not have
    with pytest.raises(ValueError, match="expected shape to be one of linear, cosine; got 'square'"):
        schedule.__post_init__()
