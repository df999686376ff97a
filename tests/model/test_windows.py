"""Sliding windows: the sampler records them as evictions, and every attention applies them."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from smd_jax.config import ModelConfig
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import tiny_model_config
from tests.tiny_update import spread_params
from tests.under_test import POLICIES, eviction_times, gap, left_padded

VOCAB, WIDTH, RESPONSE = 96, 12, 40
WINDOWS = (20, None, 6)  # above the budget, none, below the budget
CONFIG = replace(tiny_model_config(vocab_size=VOCAB, num_layers=3, tie_embeddings=False), sliding_windows=WINDOWS)
TWO_LAYERS = replace(CONFIG, num_layers=2, sliding_windows=(20, 6))
SIZES = RolloutConfig(max_new_tokens=RESPONSE, budget=12, buffer=8, eos_token_id=7)
PROMPTS = left_padded([12, 5, 9, 3], WIDTH, VOCAB)


@cache
def params(config: ModelConfig = CONFIG) -> Any:
    return spread_params(0, config)


@cache
def rollout_of(name: str, config: ModelConfig = CONFIG) -> Trajectory:
    arguments: Any = {"policy": POLICIES[name], "config": SIZES}
    return rollout(Decoder(config), params(config), PROMPTS, jax.random.key(3), **arguments)


@pytest.mark.slow
def test_a_learner_without_windows_is_another_policy():
    trajectory, plain = rollout_of("Dense"), replace(CONFIG, sliding_windows=())
    dense = trajectory.dense_mask()
    assert gap(Decoder(CONFIG), trajectory, dense, params()).max() <= 2e-5, "the model adds its windows to a dense mask"
    assert gap(Decoder(plain), trajectory, dense, params()).max() > 1e-2


@pytest.mark.slow
def test_the_mask_records_the_windows():
    """In a layer with a window no key is seen for longer, under any policy."""
    for name in ("Dense", "H2O"):
        evicted_at, valid = eviction_times(rollout_of(name)), np.asarray(rollout_of(name).valid)
        column = np.arange(WIDTH + RESPONSE)
        for layer, window in enumerate(WINDOWS):
            seen = np.where(valid[:, None], evicted_at[:, layer] - column, 1)
            assert seen.min() >= 1
            assert seen.max() == window if window else (evicted_at[:, layer] == NEVER).any()


def test_keys_outside_the_window_are_evicted_first():
    """With a budget above the window, no key inside the window is evicted."""
    evicted_at = eviction_times(rollout_of("Knorm"))[:, 2]  # budget 12 and 8 more slots, window 6
    valid = np.asarray(rollout_of("Knorm").valid)
    column = np.arange(WIDTH + RESPONSE)
    last = column == (column * valid).max(1, keepdims=True)  # the last token never entered the cache
    expected = np.where(valid & ~last, column + 6, 0)
    found = np.where((valid & ~last)[:, None], evicted_at, 0)
    np.testing.assert_array_equal(found, np.broadcast_to(expected[:, None], found.shape))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "xla", "interval", "segments", "portable"])
def test_every_implementation_applies_the_windows(impl: Any):
    trajectory, model = rollout_of("H2O", TWO_LAYERS), Decoder(TWO_LAYERS, impl=impl)
    assert gap(model, trajectory, params=params(TWO_LAYERS)).max() <= 2e-5
    if impl in ("interval", "portable"):
        plain = trajectory.mask.replace(segments=())  # without segments
        assert gap(model, trajectory, plain, params(TWO_LAYERS)).max() <= 2e-5


@pytest.mark.slow
def test_the_engine_matches_a_fixed_batch():
    whole = rollout_of("SnapKV", TWO_LAYERS)
    engine = Engine(Decoder(TWO_LAYERS), POLICIES["SnapKV"], SIZES, 3, prefill_rows=2)
    done = engine.run(params(TWO_LAYERS), PROMPTS, jax.random.key(3))
    np.testing.assert_array_equal(done.trajectory.tokens, whole.tokens)
    np.testing.assert_array_equal(eviction_times(done.trajectory), eviction_times(whole))
    assert gap(Decoder(TWO_LAYERS), done.trajectory, params=params(TWO_LAYERS)).max() <= 2e-5
