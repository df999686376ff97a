"""A model from outside of the library: what sampler, learner, engine and mesh ask of a model is the protocol alone.

Three layers, of which the first has a window above the budget, the second none, the third one below it; without the
second where it doesn't matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from smd_jax.devices.sharding import make_mesh, param_spec, shard_batch, shard_tree
from smd_jax.eviction.policies import H2O
from smd_jax.message.masks import NEVER, dense_mask, positions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.teacher_forced import apply_model
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import rollout
from tests.numpy_outside import outside_logits
from tests.outside_model import OutsideModel
from tests.under_test import POLICIES, eviction_times, gap, left_padded

VOCAB, WIDTH, RESPONSE = 96, 12, 40
MODEL = OutsideModel(vocab_size=VOCAB, windows=(20, None, 6))
TWO_LAYERS = replace(MODEL, windows=(20, 6))
LENGTHS = [12, 5, 9, 3]
SIZES = RolloutConfig(RESPONSE, budget=12, buffer=8, eos_token_id=7)
PROMPTS = left_padded(LENGTHS, WIDTH, VOCAB)


@cache
def params(model: OutsideModel = MODEL) -> Any:
    """Sharper than at initialisation, so that it matters which keys are seen. In float32 for every model."""
    init = jax.jit(replace(model, dtype="float32").init)
    return jax.tree.map(lambda x: np.float32(1.5) * np.asarray(x), init(jax.random.key(1)))


@cache
def rolled(name: str, config: RolloutConfig = SIZES, model: OutsideModel = MODEL) -> Trajectory:
    return rollout(model, params(model), PROMPTS, jax.random.key(3), policy=POLICIES[name], config=config)


def largest_gap(trajectory: Trajectory, mask: Any = None, model: OutsideModel = MODEL) -> float:
    return gap(model, trajectory, mask, params(replace(model, attention=AttentionConfig()))).max()


# --- the model


def test_forward_against_numpy():
    trajectory = rolled("H2O")
    visible = np.asarray(trajectory.mask.to_boolean())
    apply = jax.jit(apply_model, static_argnums=0)
    logits = np.asarray(apply(MODEL, params(), trajectory.tokens, trajectory.positions, trajectory.mask))
    wide = jax.tree.map(np.float64, params())
    for row in (0, 3):
        there = np.asarray(trajectory.valid[row])
        tokens, places = np.asarray(trajectory.tokens[row]), np.asarray(trajectory.positions[row])
        expected = outside_logits(MODEL, wide, tokens, places, visible[row])
        np.testing.assert_allclose(logits[row][there], expected[there], atol=5e-5)


# --- sampler and learner are one policy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["H2O", "Pyramid of H2O"])
def test_identity(name: str):
    """By attention, and with budgets of its own. (Dense, SnapKV and Knorm: below.)"""
    trajectory = rolled(name)
    assert int(trajectory.lengths().max()) == RESPONSE
    assert largest_gap(trajectory) <= 2e-5
    assert largest_gap(trajectory, trajectory.dense_mask()) > 1e-2


@pytest.mark.slow
def test_a_learner_without_windows_is_another_policy():
    trajectory = rolled("Dense")
    assert largest_gap(trajectory, trajectory.dense_mask()) <= 2e-5, "the dense mask of a trajectory knows of no window"
    assert largest_gap(trajectory, trajectory.dense_mask(), replace(MODEL, windows=(None,) * 3)) > 1e-2


def test_the_mask_says_what_the_windows_hid():
    """Whatever the policy kept: in the layers with a window no key is seen for longer than that."""
    for name in ("Dense", "H2O"):
        evicted_at, valid = eviction_times(rolled(name)), np.asarray(rolled(name).valid)
        column = np.arange(WIDTH + RESPONSE)
        for layer, window in enumerate(MODEL.windows):
            seen = np.where(valid[:, None], evicted_at[:, layer] - column, 1)
            assert seen.min() >= 1
            assert seen.max() == window if window else (evicted_at[:, layer] == NEVER).any()


def test_keys_outside_the_window_go_first():
    """With a budget above the window nothing that a query could see is evicted."""
    evicted_at = eviction_times(rolled("Knorm"))[:, 2]  # budget 12 and 8 more slots, window 6
    valid = np.asarray(rolled("Knorm").valid)
    column = np.arange(WIDTH + RESPONSE)
    last = column == (column * valid).max(1, keepdims=True)  # the last token never entered the cache
    expected = np.where(valid & ~last, column + 6, 0)
    found = np.where((valid & ~last)[:, None], evicted_at, 0)
    np.testing.assert_array_equal(found, np.broadcast_to(expected[:, None], found.shape))


# --- every implementation of attention honours windows


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "xla", "interval", "segments", "portable"])
def test_every_implementation_gives_the_same(impl: Any):
    trajectory = rolled("H2O", model=TWO_LAYERS)
    model = replace(TWO_LAYERS, attention=AttentionConfig(impl=impl))
    assert largest_gap(trajectory, model=model) <= 2e-5
    if impl in ("interval", "portable"):
        plain = trajectory.mask.replace(segments=())  # says nothing of the segments, nor of windows
        assert largest_gap(trajectory, plain, model) <= 2e-5


def test_windows_of_a_dense_mask_against_booleans():
    valid = jnp.arange(60)[None] >= jnp.array([0, 13])[:, None]
    tokens = jax.random.randint(jax.random.key(0), (2, 60), 0, VOCAB)
    mask = dense_mask(valid)
    booleans = [jnp.asarray(np.tri(60, k=0) - np.tri(60, k=-(w or 99)), bool) for w in MODEL.windows]
    explicit = jnp.stack(booleans)[None, :, None] & mask.to_boolean()
    apply = jax.jit(apply_model, static_argnums=0)
    found = apply(MODEL, params(), tokens, positions(valid), mask)
    expected = apply(replace(MODEL, windows=(None,) * 3), params(), tokens, positions(valid), explicit)
    there = np.asarray(valid)
    np.testing.assert_allclose(np.asarray(found)[there], np.asarray(expected)[there], atol=2e-5)


# --- the update, the engine, the mesh


@pytest.mark.slow
def test_the_engine_gives_what_a_batch_gives():
    whole, engine = rolled("SnapKV", model=TWO_LAYERS), Engine(TWO_LAYERS, POLICIES["SnapKV"], SIZES, 3, prefill_rows=2)
    done = engine.run(params(TWO_LAYERS), PROMPTS, jax.random.key(3))
    np.testing.assert_array_equal(done.trajectory.tokens, whole.tokens)
    np.testing.assert_array_equal(eviction_times(done.trajectory), eviction_times(whole))
    assert largest_gap(done.trajectory, model=TWO_LAYERS) <= 2e-5


def test_its_parameters_are_sharded_by_a_rule_for_names_that_nobody_knows():
    mesh = make_mesh(data=2, fsdp=4)
    assert param_spec(("blocks", "block0", "wq"), (32, 32), mesh) == P("fsdp", None)
    assert param_spec(("blocks", "block0", "wo"), (30, 32), mesh) == P(None, "fsdp")
    assert param_spec(("blocks", "block0", "geglu"), (2, 32, 48), mesh) == P(None, None, "fsdp")
    assert param_spec(("last",), (32,), mesh) == P()
    assert param_spec(("value_head", "kernel"), (32, 1), mesh) == P()


@pytest.mark.slow
def test_sharded_over_eight_devices():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    whole, model = rolled("H2O", model=TWO_LAYERS), TWO_LAYERS
    with jax.set_mesh(mesh):
        placed = shard_tree(params(model), mesh)
        assert placed["blocks"]["block0"]["wq"].addressable_shards[0].data.shape == (16, 32)
        sharded = rollout(model, placed, shard_batch(PROMPTS, mesh), jax.random.key(3), policy=H2O(), config=SIZES)
        assert gap(model, sharded, params=placed).max() <= 2e-5
    np.testing.assert_array_equal(sharded.tokens, whole.tokens)
