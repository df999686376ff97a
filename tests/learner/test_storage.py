"""bfloat16 parameters without float32 masters: unbiased rounding, and unchanged other dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import init_state
from smd_jax.learner.step import take_step
from smd_jax.learner.storage import PARAMS, REFERENCE, rounded, stochastic_round, stored, widened
from smd_jax.learner.update import make_update
from smd_jax.testing import count_compilations
from tests.bigram_update import MODEL, batch, params_of
from tests.bitwise import assert_bitwise_equal

KEY = jax.random.key(0)


@pytest.mark.parametrize("value", [1.0 + 1 / 512, 1.0 + 1 / 8192, -3.1, 1e-20, 65504.0, -1e30])
def test_stochastic_rounding_is_unbiased_between_neighbours(value):
    exact = np.float32(value)
    below = (np.array(exact).view(np.uint32) & 0xFFFF0000).view(np.float32)  # the neighbour towards 0
    beyond = ((np.array(exact).view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    draws = np.asarray(stochastic_round(jnp.full(40_000, exact), KEY), np.float64)
    assert set(draws) == {float(below), float(beyond)}
    share = (np.float64(exact) - below) / (np.float64(beyond) - below)
    # Four standard deviations of the mean.
    assert abs((draws == beyond).mean() - share) < 4 * np.sqrt(share * (1 - share) / draws.size)


def test_bfloat16_values_and_nan_do_not_change():
    values = jnp.asarray([0.0, -0.0, 1.0, -1.5, 3.0e38, jnp.inf, -jnp.inf, 2.0**-140], jnp.bfloat16)
    for seed in range(8):
        again = stochastic_round(values.astype(jnp.float32), jax.random.key(seed))
        np.testing.assert_array_equal(np.asarray(again).view(np.uint16), np.asarray(values).view(np.uint16))
    # NaN stays NaN, also where rounding its lower half carries.
    lower = jnp.asarray(0x7F800001, jnp.uint32) + jnp.arange(0, 0x007FFFFF, 0x1000, jnp.uint32)
    assert bool(jnp.isnan(stochastic_round(jax.lax.bitcast_convert_type(lower, jnp.float32), KEY)).all())


def test_rounding_depends_only_on_step_leaf_and_purpose():
    wide = {"a": jnp.full(256, 1 + 1 / 512), "b": jnp.full(256, 1 + 1 / 512)}
    like = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)

    def draw(step=0, what=PARAMS):
        return rounded(wide, like, KEY, jnp.int32(step), what)

    assert_bitwise_equal(draw(), draw())
    one = draw()
    for other in (draw(step=1)["a"], draw(what=REFERENCE)["a"], one["b"]):
        assert bool((other != one["a"]).any())


def test_other_dtypes_are_not_rounded():
    tree = {"wide": jnp.full(3, 1.1), "half": jnp.full(3, 1.1, jnp.float16), "int": jnp.arange(3)}
    assert {name: str(x.dtype) for name, x in widened(tree).items()} == {
        "wide": "float32",
        "half": "float32",
        "int": "int32",
    }
    assert_bitwise_equal(rounded(widened(tree), tree, KEY, jnp.int32(0), PARAMS), tree)


def test_only_matrices_are_stored_in_bfloat16():
    narrow = stored({"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3), "up_bias": jnp.ones((2, 3))}, jnp.bfloat16)
    assert narrow["kernel"].dtype == jnp.bfloat16
    assert narrow["scale"].dtype == narrow["up_bias"].dtype == jnp.float32, "also the biases of experts"


def test_bfloat16_step_is_a_rounded_float32_step():
    optimizer = optax.adamw(1e-2)
    narrow = stored(params_of(0), jnp.bfloat16)
    grads = stored(params_of(1), jnp.bfloat16)
    step = jax.jit(lambda state: take_step(state, optimizer, grads)[0])
    wide = step(init_state(widened(narrow), optimizer, KEY))
    after = step(init_state(narrow, optimizer, KEY))
    assert_bitwise_equal(after.opt_state, wide.opt_state)
    for new, exact in zip(jax.tree.leaves(after.params), jax.tree.leaves(wide.params), strict=True):
        assert new.dtype == jnp.bfloat16
        difference = jnp.abs(new.astype(jnp.float32) - exact)
        assert bool((difference <= 2.0**-7 * jnp.abs(exact)).all())
        assert bool((new != exact.astype(jnp.bfloat16)).any()), "rounding to nearest would lose small steps"


def test_optimizer_that_stores_the_initial_parameters():
    """An update donates parameters and optimizer state, and no buffer can be donated twice."""
    optimizer = optax.contrib.prodigy()
    state, _ = make_update(MODEL, optimizer, UpdateConfig())(init_state(params_of(0), optimizer, KEY), batch())
    assert int(state.step) == 1


def test_bfloat16_update_keeps_dtypes_and_compiles_once():
    """Gradients are bfloat16, or float32 when summed over microbatches."""
    optimizer = optax.adamw(1e-2)
    for microbatch_size in (None, 4):
        update = make_update(MODEL, optimizer, UpdateConfig(microbatch_size=microbatch_size))
        state = init_state(stored(params_of(0), jnp.bfloat16), optimizer, jax.random.key(0))
        with count_compilations() as counts:
            for _ in range(2):
                state, metrics = update(state, batch())
        assert counts["update"] == 1
        assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"bfloat16"}
        assert {str(x.dtype) for x in jax.tree.leaves(state.opt_state)} == {"float32", "int32"}
        assert all(np.isfinite(value) for value in metrics.values())
