"""Parameters of the sampler: which leaves are cast, and bitwise equal logits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import Experts, ModelConfig
from smd_jax.message.masks import dense_mask
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
from smd_jax.sampler.static import sampler_params
from smd_jax.testing import random_params, tiny_model_config

TOKENS = jnp.array([[1, 5, 2, 7], [3, 3, 8, 4]])
POSITIONS = jnp.broadcast_to(jnp.arange(4), TOKENS.shape)
MASK = dense_mask(jnp.ones(TOKENS.shape, bool))


def params_with_random_vectors(config) -> dict:
    """Scales of one and biases of zero would be the same in every dtype."""
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def add_noise(path, leaf):
        matrices = ("kernel", "embedding", "gate_proj", "up_proj", "down_proj")
        return leaf if path[-1].key in matrices else leaf + 0.1 * jax.random.normal(next(keys), leaf.shape)

    return jax.tree_util.tree_map_with_path(add_noise, random_params(config))


def test_matrices_and_biases_are_cast_and_scales_are_not():
    config = tiny_model_config(vocab_size=16, num_layers=1, qkv_bias=True, qk_norm=True, tie_embeddings=False)
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
    # Leaves that have the dtype are not copied.
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, sampler_params(Decoder(config), params), params))


TIED = tiny_model_config(vocab_size=16, num_layers=1, qkv_bias=True, qk_norm=True, dtype="bfloat16")
EXPERTS = Experts(count=4, per_token=2, intermediate_size=8, bias=True, clamp=7.0)
CONFIGS = {
    "biases and a head": replace(TIED, tie_embeddings=False, o_bias=True, mlp_bias=True),
    "gpt-oss": replace(TIED, qk_norm=False, o_bias=True, attention_sinks=True, experts=EXPERTS),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_bitwise_equal(config: ModelConfig):
    params = params_with_random_vectors(config)
    logits = jax.jit(lambda params: apply_model(Decoder(config), params, TOKENS, POSITIONS, MASK))
    expected, got = logits(params), logits(sampler_params(Decoder(config), params))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)
