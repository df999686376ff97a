"""Families beyond plain Llama: sampler and learner under windows, reading onto a mesh.

Logits against transformers: tests/model/test_weights.py. Windows under every policy: tests/model/test_outside_model.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.learner.forward import replay
from smd_jax.message.masks import dense_mask, positions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.hf_config import FloatName
from smd_jax.model.teacher_forced import apply_model
from smd_jax.model.weights import load_checkpoint, save_checkpoint
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import random_params
from tests.families import FAMILY_CONFIGS, GEMMA3, PLAIN
from tests.under_test import POLICIES, left_padded

# --- sampler, learner and dense decoding under windows

# One window above the budget and one below; rows of 12, 5 and 3 tokens, responses longer than both windows.
WINDOWED = {
    "gemma3": replace(GEMMA3, vocab_size=96, num_layers=2, sliding_windows=(6, None)),
    "mistral": replace(PLAIN, vocab_size=96, num_layers=1, sliding_windows=(20,)),
}
PROMPTS = left_padded([12, 5, 3], 12, 96)
SIZES = RolloutConfig(32, budget=12, buffer=8)

replay_jitted = jax.jit(replay, static_argnums=0)
apply_jitted = jax.jit(apply_model, static_argnums=0)


@cache
def moved_params(config: ModelConfig) -> Any:
    """No two alike, and sharp enough that it matters which keys are seen."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + np.float32(0.25) * rng.normal(size=x.shape).astype(np.float32), random_params(config)
    )


def gap(model: Decoder, params: Any, trajectory: Trajectory, mask: Any = None) -> float:
    """Largest |log p_sampler - log p_learner| of the response tokens."""
    scores = replay_jitted(model, params, trajectory if mask is None else trajectory.replace(mask=mask))
    difference = np.asarray(scores.logprobs) - np.asarray(trajectory.logprobs)
    return float(np.abs(difference)[np.asarray(trajectory.response_mask)].max())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), [("gemma3", "H2O"), ("gemma3", "Dense"), ("mistral", "SnapKV")])
def test_identity_under_windows(family: str, policy: str):
    config = WINDOWED[family]
    model, params = Decoder(config), moved_params(config)
    trajectory = rollout(model, params, PROMPTS, jax.random.key(3), policy=POLICIES[policy], config=SIZES)
    assert int(trajectory.lengths().min()) == 32
    assert gap(model, params, trajectory) <= 2e-5
    if policy != "H2O":  # two are enough to show that another learner is another policy
        mask = trajectory.dense_mask()
        learner = model if POLICIES[policy].evicts else Decoder(replace(config, sliding_windows=(999, None)))
        assert gap(learner, params, trajectory, mask) > 1e-2


def test_a_decoder_over_eight_devices():
    """Biases are added once, whatever is split."""
    config = replace(FAMILY_CONFIGS["qwen3-bias-window"], mlp_bias=True, num_layers=1, sliding_windows=(8,))
    params, batch = moved_params(config), left_padded([12, 12, 5, 3], 12, 96)
    mask, places = dense_mask(batch.valid), positions(batch.valid)
    expected = apply_jitted(Decoder(config), params, batch.tokens, places, mask)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        found = apply_jitted(Decoder(config), shard_tree(params, mesh), batch.tokens, places, mask)
    there = np.asarray(batch.valid)
    np.testing.assert_allclose(np.asarray(found)[there], np.asarray(expected)[there], atol=2e-5)


# --- files onto a mesh


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_parameters_are_read_onto_the_mesh(tmp_path: Path, stored: FloatName, dtype: FloatName):
    config = FAMILY_CONFIGS["qwen3-bias-window"]
    save_checkpoint(tmp_path, moved_params(config), config, dtype=stored, max_shard_bytes=20_000)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    found_config, found = load_checkpoint(tmp_path, dtype=jnp.dtype(dtype), mesh=mesh)
    expected_config, whole = load_checkpoint(tmp_path, dtype=jnp.dtype(dtype))
    expected = shard_tree(whole, mesh)
    assert found_config == expected_config == replace(config, dtype=dtype)
    chex.assert_trees_all_equal(found, expected, strict=True)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, expected)
    kernel = found["layers_0"]["attention"]["q_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16, 16)
