"""Families beyond plain Llama: what their config.json means, sampler and learner under windows, reading onto a mesh.

Logits against transformers: tests/model/test_weights.py. Windows under every policy: tests/model/test_outside_model.py.
"""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import LinearRope, ModelConfig
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.learner.forward import replay
from smd_jax.message.masks import dense_mask, positions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model import stored_tensors
from smd_jax.model.decoder import Decoder
from smd_jax.model.families import model_type_of
from smd_jax.model.hf_config import FloatName, hf_config_from_model, model_config_from_hf
from smd_jax.model.teacher_forced import apply_model
from smd_jax.model.weights import load_checkpoint, save_checkpoint
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import random_params, write_random_checkpoint
from tests.families import FAMILY_CONFIGS, GEMMA3, PLAIN, sizes_of
from tests.under_test import POLICIES, left_padded

# --- config.json, as published

MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 26,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_mistral():
    config = model_config_from_hf(MISTRAL)
    sizes = sizes_of(32000, 4096, 14336, 32, 32, 8, 128, 32768)
    assert config == ModelConfig(**sizes, norm_eps=1e-5, sliding_windows=(4096,) * 32)
    # Since v0.2, null; an absent key is transformers' default.
    assert model_config_from_hf(MISTRAL | {"sliding_window": None}).sliding_windows == ()
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert model_config_from_hf(absent).sliding_windows == (4096,) * 32
    # Nemo's heads are no share of its width.
    assert model_config_from_hf(MISTRAL | {"hidden_size": 5120, "head_dim": 128}).head_dim == 128


def test_qwen2():
    assert model_config_from_hf(QWEN2).sliding_windows == (), "a size that is not in use"
    used = QWEN2 | {"use_sliding_window": True, "sliding_window": 64}
    assert model_config_from_hf(used).sliding_windows == (None,) * 26 + (64, 64)
    kinds = ["sliding_attention", "full_attention"] * 14
    assert model_config_from_hf(used | {"layer_types": kinds}).sliding_windows == (64, None) * 14


def test_gemma3():
    config = model_config_from_hf(GEMMA)
    assert config == ModelConfig(
        **sizes_of(262144, 1152, 6912, 26, 4, 1, 256, 32768),
        rope_theta=1e6,
        local_rope_theta=1e4,
        qk_norm=True,
        activation="gelu_tanh",
        norm_plus_one=True,
        post_norms=True,
        scale_embeddings=True,
        tie_embeddings=True,
        sliding_windows=(*((512,) * 5 + (None,)) * 4, 512, 512),
    )
    assert Decoder(config).shape.window(5) is None and Decoder(config).shape.window(25) == 512
    # Its keys as transformers 5 writes them; 27B divides scores by another number than head_dim.
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    near = {"rope_type": "default", "rope_theta": 1e4}
    newer = {key: value for key, value in GEMMA.items() if "rope" not in key}
    newer |= {"rope_parameters": {"full_attention": linear, "sliding_attention": near}, "query_pre_attn_scalar": 168}
    assert model_config_from_hf(newer) == replace(config, rope_scaling=LinearRope(8.0), query_pre_attn_scalar=168.0)
    older = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 168}
    assert model_config_from_hf(older) == model_config_from_hf(newer)


def test_every_family_is_written_as_what_it_is():
    found = {name: model_type_of(config) for name, config in FAMILY_CONFIGS.items()}
    assert found == {
        "llama-bias": "llama",
        "mistral": "mistral",
        "qwen2-window": "qwen2",
        "qwen3-bias-window": "qwen3",
        "gemma3": "gemma3_text",
        "gemma3-bias": "gemma3_text",
    }


def test_the_model_type_is_taken_over_where_it_fits(tmp_path: Path):
    """A Mistral without windows is a Llama, too."""
    write_random_checkpoint(tmp_path / "from", config=PLAIN)
    written = json.loads((tmp_path / "from" / "config.json").read_text())
    assert written["model_type"] == "llama"
    (tmp_path / "from" / "config.json").write_text(json.dumps(written | {"model_type": "mistral"}))
    for config, expected in ((PLAIN, "mistral"), (replace(PLAIN, qkv_bias=True), "qwen2")):
        save_checkpoint(tmp_path / "to", random_params(config), config, tokenizer_from=tmp_path / "from")
        assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == expected
        assert load_checkpoint(tmp_path / "to")[0] == config


SMALL = {key: value for key, value in MISTRAL.items() if key not in ("model_type", "sliding_window", "hidden_act")}
SMALL |= {"num_hidden_layers": 2}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gemma3", {}, "one of llama, mistral, qwen2, .*got 'gemma3'"),
        ("mistral", {"attention_bias": True}, "mistral with attention_bias=True is not supported"),
        ("mistral", {"layer_types": [FULL, SLIDING]}, "windows in all layers or in none; got sliding_window=4096 and"),
        ("qwen3", {"mlp_bias": True}, "qwen3 with mlp_bias=True is not supported; only mlp_bias=False is"),
        ("llama", {"layer_types": [FULL, SLIDING]}, r"layer_types of llama must be full_attention; got \['sliding"),
        ("qwen2", {"layer_types": ["chunked_attention", FULL]}, r"full_attention or sliding_attention; got \['chunked"),
        ("qwen2", {"layer_types": [SLIDING, FULL]}, "needs a sliding_window that is in use; got .*use_sliding.*=None"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window as an integer from 1 to .*; got 0",
        ),
        ("gemma3_text", {"layer_types": [FULL]}, "each of 2 layers; got 1"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        ("gemma3_text", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar as a finite number > 0; got None"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear"}}, "full_attention and sliding.*got also rope_type"),
        (
            "gemma3_text",
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
            "plain RoPE in layers with a sliding window",
        ),
    ],
)
def test_what_a_family_does_not_do_is_refused(model_type: str, change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(SMALL | {"model_type": model_type} | change)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(PLAIN, sliding_windows=(8, 4)), "mistral has one sliding window in all of its layers; got"),
        (replace(PLAIN, mlp_bias=True, qk_norm=True), "qwen3 has mlp_bias=False; got mlp_bias=True"),
        (replace(GEMMA3, post_norms=False), "gemma3_text has post_norms=True; got post_norms=False"),
        (replace(GEMMA3, local_rope_theta=None), "gemma3_text has local_rope_theta where layers have windows"),
        (replace(GEMMA3, query_pre_attn_scalar=20.5), "gemma3_text has a whole number for query_pre_attn_scalar"),
        (replace(PLAIN, query_pre_attn_scalar=20.0), "llama has query_pre_attn_scalar=None; got .*=20.0"),
    ],
)
def test_what_no_model_type_expresses(config: ModelConfig, message: str):
    with pytest.raises(ValueError, match=message):
        hf_config_from_model(config, "float32")


def test_what_no_decoder_is():
    with pytest.raises(ValueError, match="expected sliding_windows beside local_rope_theta"):
        replace(GEMMA3, sliding_windows=())
    with pytest.raises(ValueError, match="expected query_pre_attn_scalar > 0, or None; got 0.0"):
        replace(GEMMA3, query_pre_attn_scalar=0.0)


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


@pytest.mark.parametrize(("mesh", "share"), [(None, 1.0), ((2, 2, 2), 0.5)])
@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_host_holds_no_more_than_a_tensor(
    tmp_path: Path,
    stored: FloatName,
    dtype: FloatName,
    mesh: tuple[int, int, int] | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
):
    """At most 1.2 times the largest, in the dtype in which it is loaded. Of a mesh that quarters it, two parts: JAX
    may not have let go of one when the next is read."""
    config = replace(PLAIN, vocab_size=4096, hidden_size=512, num_layers=1)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, stored), jax.eval_shape(lambda: random_params(config)))
    save_checkpoint(tmp_path, zeros, config, dtype=stored)
    devices = None if mesh is None else make_mesh(*mesh)
    monkeypatch.setattr(stored_tensors, "host_array", misaligned)
    tracemalloc.start()
    try:
        params = load_checkpoint(tmp_path, dtype=jnp.dtype(dtype), mesh=devices)[1]
        jax.block_until_ready(params)
        peak = tracemalloc.get_traced_memory()[1] / params["embed"]["embedding"].nbytes
    finally:
        tracemalloc.stop()
    assert share / 2 < peak < 1.2 * share


def misaligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory that an array on a CPU must copy, as one on a GPU would, and never shares."""
    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    raw = np.empty(size + 128, np.uint8)
    begin = -raw.ctypes.data % 64 + 16
    return raw[begin : begin + size].view(jnp.dtype(dtype)).reshape(shape)
