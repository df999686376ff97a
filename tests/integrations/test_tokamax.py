"""Masks for and from tokamax, against its own reference. Needs tokamax (Python 3.12 or later)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

base = pytest.importorskip("tokamax._src.ops.attention.base", reason="tokamax needs Python 3.12 or later")

from smd_jax.integrations.tokamax import from_tokamax, to_tokamax  # noqa: E402
from smd_jax.message.masks import KeyInterval, ShadowMask, windowed  # noqa: E402
from smd_kernels.reference import attention  # noqa: E402

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 4, 2, 12, 8


def random_interval() -> KeyInterval:
    """Random evictions after each key's own query; the first key of every row is padding."""
    lives = jax.random.randint(jax.random.key(0), (BATCH, KV_HEADS, LENGTH), 1, LENGTH)
    return KeyInterval((jnp.arange(LENGTH)[None, None] + lives).astype(jnp.int32).at[:, :, 0].set(0))


def test_masks_round_trip():
    mask = to_tokamax(random_interval(), HEADS)
    expected = jnp.repeat(random_interval().to_boolean(), HEADS // KV_HEADS, axis=1)
    np.testing.assert_array_equal(mask.as_array(LENGTH, LENGTH), expected)
    back = from_tokamax(mask, LENGTH)
    np.testing.assert_array_equal(back.evicted_at, jnp.repeat(random_interval().evicted_at, HEADS // KV_HEADS, axis=1))


def test_a_mask_of_all_layers_is_refused():
    with pytest.raises(TypeError, match="ShadowMask"):
        to_tokamax(ShadowMask(random_interval().evicted_at[:, None]), HEADS)


@pytest.mark.parametrize("window", [None, 5])
def test_windows(window):
    mask = base.Mask(causal_mask=base.CausalMask(window_size=window))
    result = from_tokamax(mask, LENGTH).to_boolean()
    np.testing.assert_array_equal(result[0, 0], np.squeeze(mask.as_array(LENGTH, LENGTH)))
    dense = KeyInterval(jnp.full((1, 1, LENGTH), 99, jnp.int32))
    np.testing.assert_array_equal(result, windowed(dense, window).to_boolean())


@pytest.fixture(autouse=True)
def _allow_rank_promotion():
    """tokamax adds arrays of different ranks, which our tests forbid."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_attention_equals_that_of_tokamax():
    import tokamax

    q = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, HEADS, SIZE))
    k, v = jax.random.normal(jax.random.key(2), (2, BATCH, LENGTH, KV_HEADS, SIZE))
    booleans = to_tokamax(random_interval(), HEADS).as_array(LENGTH, LENGTH)
    theirs = tokamax.dot_product_attention(q, k, v, mask=booleans, implementation="xla")
    visible = random_interval().to_boolean()
    ours = attention(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), visible).swapaxes(1, 2)
    sees = booleans.any(axis=-1).swapaxes(1, 2)  # tokamax gives the mean of all values where a query sees no key
    np.testing.assert_allclose(theirs[sees], ours[sees], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda: base.Mask(jnp.ones((1, 1, 4, 4), bool)), "got bool_mask"),
        (lambda: base.Mask(k_end=jnp.ones((1, 1, 4), int), is_causal=True), "got k_end"),
        (lambda: base.Mask(q_end=jnp.ones((1, 1, 4), int)), "expected a causal mask with offset 0; got None"),
        (lambda: base.Mask(causal_mask=base.CausalMask(offset=1)), "offset 0; got CausalMask"),
        (lambda: base.Mask(q_end=jnp.ones((1, 1, 3), int), is_causal=True), r"the shape \[batch, heads, 4\]"),
    ],
)
def test_other_masks_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        from_tokamax(mask(), 4)
    with pytest.raises(ValueError, match="expected num_heads to be a multiple of 2 KV heads; got 3"):
        to_tokamax(random_interval(), 3)
