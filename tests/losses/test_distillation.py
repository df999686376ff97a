"""Divergences between dense and masked policy. Values and gradients: tests/learner/test_distill.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from smd_jax.losses.distillation import DistillConfig, divergence

DIRECTIONS = ["forward", "reverse", "published", "anchor"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_teacher_has_no_gradient(direction):
    logits = [jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).normal(0, 2, (2, 2, 3, 5))]
    dense, shadow = jax.grad(lambda d, s: divergence(d, s, direction).sum(), argnums=(0, 1))(*logits)
    learner, teacher = (dense, shadow) if direction == "published" else (shadow, dense)
    assert not np.asarray(teacher).any() and np.asarray(learner).any()


logits = hnp.arrays(np.float32, (1, 1, 4), elements=st.floats(-20, 20, width=32))


@settings(deadline=None, max_examples=30)
@given(dense=logits, shadow=logits, direction=st.sampled_from(DIRECTIONS))
def test_divergence_is_nonnegative_and_zero_at_equality(dense, shadow, direction):
    dense, shadow = jnp.asarray(dense), jnp.asarray(shadow)
    assert divergence(dense, shadow, direction).min() >= -1e-5
    np.testing.assert_array_equal(divergence(dense, dense, direction), np.zeros((1, 1)))


# --- invalid options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": -0.1}, "coefficient >= 0, because a negative one would drive the two policies apart; got -0.1"),
        ({"coef": float("nan")}, "expected a finite distillation coefficient >= 0.*; got nan"),
        ({"coef": float("inf")}, "expected a finite distillation coefficient >= 0.*; got inf"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)
