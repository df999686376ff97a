"""Adapters on models with sliding windows and on Gemma's: what is trained, what merging gives, and PEFT's format."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import replay
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.policy import LossConfig
from smd_jax.message.masks import dense_mask, positions
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LORA, TARGETS, base_params, by_module, merge_lora
from smd_jax.model.peft_format import load_peft, save_peft
from smd_jax.model.teacher_forced import apply_model
from smd_jax.model.weights import save_checkpoint
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import random_params
from tests.adapted import adapted, merged_in_float64
from tests.bitwise import assert_bitwise_equal
from tests.families import FAMILY_CONFIGS
from tests.under_test import left_padded

FAMILIES = ("mistral", "gemma3")
SIZES = RolloutConfig(12, budget=6, buffer=3)


@functools.cache
def params_of(family: str) -> dict[str, Any]:
    return adapted(random_params(FAMILY_CONFIGS[family]), size=1.0)


@functools.cache
def sampled(family: str) -> Any:
    """Prompts and responses longer than the window of 8, drawn with the adapters under a budget."""
    model = Decoder(FAMILY_CONFIGS[family])
    prompts = left_padded([12, 5, 9, 3], 12, model.config.vocab_size)
    return rollout(model, params_of(family), prompts, jax.random.key(3), policy=H2O(), config=SIZES)


def logprobs(family: str, params: Any) -> np.ndarray:
    return np.asarray(jitted_replay(Decoder(FAMILY_CONFIGS[family]), params, sampled(family)).logprobs)


jitted_replay = jax.jit(replay, static_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_merging_is_what_the_adapters_compute(family: str):
    params = params_of(family)
    with_adapters = logprobs(family, params)
    np.testing.assert_allclose(with_adapters, np.asarray(sampled(family).logprobs), atol=2e-5)
    np.testing.assert_allclose(with_adapters, logprobs(family, merge_lora(params)), atol=2e-5)
    np.testing.assert_allclose(with_adapters, logprobs(family, merged_in_float64(params)), atol=2e-5)
    assert np.abs(with_adapters - logprobs(family, base_params(params))).max() > 0.05, "the adapters must do something"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_adapters_alone(family: str):
    params = jax.tree.map(jnp.copy, params_of(family))
    before = jax.device_get(params)
    optimizer = optax.adam(1e-2)
    state = init_state(params, optimizer, jax.random.key(0))
    rows = sampled(family).tokens.shape[0]
    advantages = jnp.asarray([1.0, -1.0] * (rows // 2))
    batch = TrainBatch(sampled(family), advantages, sampled(family).logprobs)
    update = make_update(Decoder(FAMILY_CONFIGS[family]), optimizer, UpdateConfig(loss=LossConfig(beta=0.1)))
    state, metrics = update(state, batch)
    assert float(metrics["grad_norm"]) > 1e-3
    after = jax.device_get(state.params)
    assert_bitwise_equal(base_params(after), base_params(before))
    assert {path[-1] for path in by_module(state.params[LORA])} == set(TARGETS)
    pairs = zip(jax.tree.leaves(after[LORA]), jax.tree.leaves(before[LORA]), strict=True)
    assert min(np.abs(new - old).max() for new, old in pairs) > 1e-3, "every adapter is trained"


@pytest.mark.parametrize("family", FAMILIES)
def test_pefts_format_goes_round(family: str, tmp_path: Path):
    config = FAMILY_CONFIGS[family]
    save_peft(tmp_path, params_of(family), config)
    assert_bitwise_equal(load_peft(tmp_path, base_params(params_of(family)), config), params_of(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("default")  # PEFT's own, about what transformers is going to rename
def test_peft_opens_what_we_save(family: str, tmp_path: Path):
    """The same logits as ours past the window, and we open what PEFT saves."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config, params = FAMILY_CONFIGS[family], params_of(family)
    save_checkpoint(tmp_path / "base", base_params(params), config, dtype="float32")
    save_peft(tmp_path / "adapters", params, config, base_model=tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 40), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens).long()).logits.numpy()
        with model.disable_adapter():
            of_base = model(torch.from_numpy(tokens).long()).logits.numpy()
    valid = jnp.ones(tokens.shape, bool)
    for own in (params, merge_lora(params)):
        actual = apply_model(Decoder(config), own, jnp.asarray(tokens), positions(valid), dense_mask(valid))
        np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(expected - of_base).max() > 0.05, "the adapters must do something"
    model.save_pretrained(str(tmp_path / "again"))
    assert_bitwise_equal(load_peft(tmp_path / "again", base_params(params), config), params)
