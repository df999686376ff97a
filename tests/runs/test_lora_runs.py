"""Runs with LoRA adapters: GRPO and PPO, checkpoints without the base, bitwise resumes."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.policy import LossConfig
from smd_jax.model.lora import LORA, LoraConfig, add_lora, base_params
from smd_jax.model.value_head import VALUE_HEAD, add_value_head
from smd_jax.runs import checkpoint
from smd_jax.runs.frozen_base import BASE, fingerprint, with_base, without_base
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.train.ppo import PPOLoop
from tests.adapted import SMALL
from tests.bitwise import assert_bitwise_equal
from tests.toy_loop import CONFIG, MODEL, TASK, TOKENIZER, new_loop, optimizer, run, share_programs, warm_params
from tests.train.test_ppo import CONFIG as PPO

WITH_KL = dataclasses.replace(CONFIG, update=UpdateConfig(loss=LossConfig(beta=0.1)))


def new_state(config: LoraConfig = SMALL, value_head: bool = False, base: Any = None) -> TrainState:
    params = add_lora(jax.tree.map(jnp.copy, warm_params() if base is None else base), config, jax.random.key(9))
    params = add_value_head(params, MODEL.config) if value_head else params
    return shard_tree(init_state(params, optimizer(), jax.random.key(1)), make_mesh())


@functools.cache
def uninterrupted_run() -> TrainState:
    return run(new_loop(WITH_KL), new_state(), 3)[0]


def start(directory: Path, steps: int, state: TrainState | None = None, resume: bool = False) -> TrainState:
    state = new_state() if state is None else state
    return train(new_loop(WITH_KL), state, RunConfig(steps=steps), directory, config=WITH_KL, resume=resume)


@pytest.mark.slow
def test_a_run_resumes_bitwise_from_checkpoints_without_the_base(tmp_path: Path):
    start(tmp_path, 2)
    meta = (tmp_path / "checkpoints" / "2").rglob("metadata")
    assert all("embedding" not in file.read_text(errors="ignore") for file in meta), "expected no base weights"
    resumed = start(tmp_path, 3, resume=True)
    assert_bitwise_equal(jax.device_get(resumed), jax.device_get(uninterrupted_run()))
    assert_bitwise_equal(jax.device_get(base_params(resumed.params)), jax.device_get(warm_params()))


@pytest.mark.slow
def test_another_base_is_refused(tmp_path: Path):
    start(tmp_path, 1)
    other = jax.tree.map(jnp.copy, warm_params())
    kernel = other["layers_0"]["mlp"]["up_proj"]["kernel"]
    # Swapping two numbers keeps the sum.
    other["layers_0"]["mlp"]["up_proj"]["kernel"] = kernel.at[0, 0].set(kernel[0, 1]).at[0, 1].set(kernel[0, 0])
    with pytest.raises(ValueError, match=r"expected the base.*differs in layers_0/mlp/up_proj/kernel$"):
        start(tmp_path, 2, new_state(base=other), resume=True)
    rescaled = dataclasses.replace(SMALL, alpha=5.0)
    with pytest.raises(ValueError, match=r"expected adapters scaled by 1\.15.*got 2\.88"):
        start(tmp_path, 2, new_state(rescaled), resume=True)


def test_a_fingerprint_is_the_same_on_every_mesh():
    params = {"a": jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "b": jnp.ones(3, jnp.bfloat16)}
    bits = np.arange(64, dtype=np.float32).view(np.uint32).astype(np.uint64)
    weighted = (bits * (2 * np.arange(64, dtype=np.uint64) + 1)).sum()
    expected = np.array([bits.sum() % 2**32, weighted % 2**32])
    np.testing.assert_array_equal(fingerprint(params)[0], expected)
    np.testing.assert_array_equal(fingerprint(shard_tree(params, make_mesh(2, 2, 2))), fingerprint(params))
    assert fingerprint(params)[1].tolist() == [3 * 0x3F80, 9 * 0x3F80]


def test_a_state_without_adapters_is_saved_whole():
    state = init_state(warm_params(), optimizer(), jax.random.key(0))
    assert without_base(state).params is state.params is with_base(state, state).params


def test_a_checkpoint_has_adapters_value_head_and_a_fingerprint_of_the_base(tmp_path: Path):
    state = new_state(value_head=True)
    saved = without_base(state)
    assert saved.params.keys() == {LORA, VALUE_HEAD, BASE}
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(1, saved, config=None)
    restored = checkpoint.restore(tmp_path, without_base(state), config=None).state
    assert_bitwise_equal(jax.device_get(with_base(restored, state)), jax.device_get(state))


@pytest.mark.slow
def test_ppo_trains_adapters_and_the_critic():
    loop = PPOLoop(MODEL, TASK, TOKENIZER, optimizer(), PPO)
    share_programs(loop)
    before = jax.device_get(new_state(value_head=True).params)
    state, metrics = run(loop, new_state(value_head=True), 1)
    after = jax.device_get(state.params)
    assert metrics[0]["sampling/sampling_logp_difference/max"] < 2e-5
    assert np.abs(after[VALUE_HEAD]["kernel"]).max() > 0
    assert_bitwise_equal({n: after[n] for n in warm_params()}, {n: before[n] for n in warm_params()})
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (after[LORA], before[LORA])), strict=True))
