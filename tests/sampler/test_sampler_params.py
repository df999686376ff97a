"""Parameters of the sampler: which leaves change, and that the decoder cannot tell the difference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.message.masks import dense_mask
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
from smd_jax.sampler.params import sampler_params
from smd_jax.testing import random_params, tiny_model_config

TOKENS = jnp.array([[1, 5, 2, 7], [3, 3, 8, 4]])
PLACES = jnp.broadcast_to(jnp.arange(4), TOKENS.shape)
MASK = dense_mask(jnp.ones(TOKENS.shape, bool))


def params_with_random_scales(config) -> dict:
    """Scales of one would be the same in every dtype."""
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def of(path, leaf):
        return leaf + 0.1 * jax.random.normal(next(keys), leaf.shape) if path[-1].key == "scale" else leaf

    return jax.tree_util.tree_map_with_path(of, random_params(config))


def test_matrices_and_biases_change_and_scales_do_not():
    config = tiny_model_config(vocab_size=16, qkv_bias=True, qk_norm=True, tie_embeddings=False)
    params = random_params(config)
    converted = sampler_params(Decoder(replace(config, dtype="bfloat16")), params)
    assert jax.tree.structure(converted) == jax.tree.structure(params)

    def check(path, before, after):
        name = path[-1].key
        assert after.dtype == (jnp.float32 if name == "scale" else jnp.bfloat16), path
        np.testing.assert_array_equal(after, before.astype(after.dtype))
        return name

    names = jax.tree.leaves(jax.tree_util.tree_map_with_path(check, params, converted))
    assert set(names) == {"scale", "kernel", "bias", "embedding"}


def test_what_has_the_dtype_already_is_not_copied():
    config = tiny_model_config(vocab_size=16)
    params = random_params(config)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, sampler_params(Decoder(config), params), params))


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_computes_the_same_to_the_last_bit(tied: bool):
    config = tiny_model_config(vocab_size=16, qkv_bias=True, qk_norm=True, tie_embeddings=tied, dtype="bfloat16")
    params = params_with_random_scales(config)
    logits = jax.jit(lambda params: apply_model(Decoder(config), params, TOKENS, PLACES, MASK))
    expected, got = logits(params), logits(sampler_params(Decoder(config), params))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)
