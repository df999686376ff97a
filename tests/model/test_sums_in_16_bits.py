"""Gradients of parameters that many tokens share are summed in float32, with parameters or computation in bfloat16."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import Experts, ModelConfig
from smd_jax.learner.forward import replay
from smd_jax.message.masks import dense_mask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.testing import random_params, tiny_model_config

ROWS, PROMPT, COLUMNS, FREQUENT = 8, 8, 512, 5
DENSE = tiny_model_config(num_layers=1, vocab_size=64, max_positions=COLUMNS)


def gradients(config: ModelConfig, params: Any) -> Any:
    """Gradients of the mean log-probability of tokens of which half are the same."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((ROWS, COLUMNS)) < 0.5, FREQUENT, rng.integers(0, config.vocab_size, (ROWS, COLUMNS)))
    valid, logprobs = jnp.ones((ROWS, COLUMNS), bool), jnp.full((ROWS, COLUMNS - PROMPT), -4.0)
    mask = dense_mask(valid)
    trajectory = Trajectory(jnp.asarray(tokens, jnp.int32), valid, logprobs, jnp.ones(ROWS, bool), mask)
    advantages = jnp.linspace(0.2, 1.0, ROWS)[:, None]
    return jax.jit(jax.grad(lambda x: jnp.mean(advantages * replay(Decoder(config), x, trajectory).logprobs)))(params)


def error(found: jax.Array, expected: jax.Array) -> float:
    exact = np.asarray(expected, np.float64)
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_embedding_gradient_of_a_frequent_token(compute: Any):
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(DENSE))
    exact = gradients(DENSE, jax.tree.map(lambda x: x.astype(jnp.float32), stored))["embed"]["embedding"][FREQUENT]
    found = gradients(replace(DENSE, dtype=compute), stored)["embed"]["embedding"][FREQUENT]
    assert found.dtype == jnp.bfloat16
    assert error(found, exact) < 0.03, "0.3 if summed in bfloat16"


def test_bias_gradients_of_experts():
    experts = Experts(count=4, per_token=2, intermediate_size=32, bias=True, clamp=7.0)
    config = replace(DENSE, experts=experts)
    params = random_params(config)
    exact = jax.tree_util.tree_leaves_with_path(gradients(config, params))
    found = jax.tree.leaves(gradients(replace(config, dtype="bfloat16"), params))
    errors = {
        jax.tree_util.keystr(path[-1:], simple=True): error(leaf, expected)
        for (path, expected), leaf in zip(exact, found, strict=True)
        if jax.tree_util.keystr(path[-1:], simple=True) in ("gate_bias", "up_bias", "down_bias")
    }
    assert len(errors) == 3
    assert max(errors.values()) < 0.05, "0.5 if summed in bfloat16"
