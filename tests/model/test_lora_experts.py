"""Adapters of experts: forward pass, gradients, meshes, replay and PEFT's format."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import make_mesh, param_spec, shard_tree
from smd_jax.learner.state import TrainBatch
from smd_jax.message.masks import dense_mask, positions
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LORA, LoraConfig, add_lora, base_params, by_module, merge_lora
from smd_jax.model.peft_format import load_peft, save_peft
from smd_jax.model.teacher_forced import apply_model
from smd_jax.sampler.fixed_batch import rollout
from tests.adapted import adapted, merged_in_float64, scale_of
from tests.learner.test_routing_replay import CONFIG, PROMPTS, SIZES, params_of
from tests.model.test_family_logits import opened
from tests.tiny_update import metrics_and_gradients
from tests.under_test import POLICIES, gap

MODEL = Decoder(CONFIG)
MLP: Any = ("gate_proj", "up_proj", "down_proj")
SMALL = LoraConfig(rank=2, alpha=3.0, targets=MLP, rank_stabilised=True)

apply_jitted = jax.jit(apply_model, static_argnums=0)


@functools.cache
def params() -> Any:
    """Two layers with experts and one with an MLP, all with adapters."""
    return adapted(params_of(CONFIG))


def prompt_logits(params: Any) -> np.ndarray:
    valid = PROMPTS.valid
    logits = apply_jitted(MODEL, params, PROMPTS.tokens, positions(valid), dense_mask(valid))
    return np.asarray(logits)[np.asarray(valid)]


# --- forward pass


def test_forward_pass_equals_merged_weights():
    np.testing.assert_allclose(prompt_logits(params()), prompt_logits(merge_lora(params())), atol=2e-5)
    np.testing.assert_allclose(prompt_logits(params()), prompt_logits(merged_in_float64(params())), atol=2e-5)
    assert np.abs(prompt_logits(params()) - prompt_logits(base_params(params()))).max() > 0.5
    fresh = add_lora(params_of(CONFIG), LoraConfig(), jax.random.key(0))
    assert prompt_logits(fresh).tobytes() == prompt_logits(params_of(CONFIG)).tobytes()


def test_every_expert_has_its_own_adapters():
    pair = by_module(params()[LORA])["layers_0", "mlp", "experts", "up_proj"]
    assert pair["lora_A"].shape == (6, 32, 3) and pair["lora_B"].shape == (6, 3, 24)
    assert len(np.unique(np.asarray(pair["lora_A"])[:, 0, 0])) == 6
    assert np.abs(pair["lora_A"]).max() == pytest.approx(32**-0.5, rel=0.05)


@functools.cache
def sampled() -> Any:
    return rollout(MODEL, params(), PROMPTS, jax.random.key(3), policy=POLICIES["H2O"], config=SIZES)


@pytest.mark.slow
def test_sampler_and_learner_are_one_policy():
    assert gap(MODEL, sampled(), params=params()).max() <= 2e-5


@pytest.mark.slow
def test_gradients_match_merged_weights_by_the_chain_rule():
    """dL/dA = scale dL/dW B^T and dL/dB = scale A^T dL/dW, by expert; the base has none."""
    batch = TrainBatch(sampled(), jnp.asarray([1.0, -1.0, 0.5]), None)
    of_adapters, of_merged = (
        metrics_and_gradients(data=batch, model=MODEL, params=x)[1] for x in (params(), merge_lora(params()))
    )
    scale, path = scale_of(params()[LORA].config), ("layers_2", "mlp", "experts", "down_proj")
    pair, found = by_module(params()[LORA])[path], of_adapters[LORA].matrices
    for part in path:
        found = found[part]
    whole = np.asarray(of_merged["layers_2"]["mlp"]["experts"]["down_proj"], np.float64)
    expected_a = scale * whole @ np.asarray(pair["lora_B"], np.float64).swapaxes(1, 2)
    expected_b = scale * np.asarray(pair["lora_A"], np.float64).swapaxes(1, 2) @ whole
    np.testing.assert_allclose(found["lora_A"], expected_a, atol=2e-5 * np.abs(expected_a).max())
    np.testing.assert_allclose(found["lora_B"], expected_b, atol=2e-5 * np.abs(expected_b).max())
    assert np.abs(expected_a).max() > 1e-3 and set(of_adapters) == {LORA}


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_axis_splits_adapters_by_expert(tensor: int):
    """If four devices cannot share six experts, each has all."""
    mesh = make_mesh(data=1, fsdp=8 // tensor, tensor=tensor)
    with jax.set_mesh(mesh):
        sharded = shard_tree(params(), mesh)
        found = prompt_logits(sharded)
    a = sharded[LORA].matrices["layers_0"]["mlp"]["experts"]["up_proj"]["lora_A"]
    assert a.addressable_shards[0].data.shape == ((3, 8, 3) if tensor == 2 else (6, 16, 3))
    np.testing.assert_allclose(found, prompt_logits(params()), atol=2e-5)


@pytest.mark.parametrize("name", MLP)
def test_adapters_are_sharded_like_their_experts(name: str):
    mesh = make_mesh(2, 2, 2)
    experts = param_spec(("layers_0", "experts", name), (4, 8, 16), mesh)
    assert param_spec((LORA, "experts", name, "lora_A"), (4, 8, 2), mesh) == P(*experts[:2], None)
    assert param_spec((LORA, "experts", name, "lora_B"), (4, 2, 16), mesh) == P(experts[0], None, experts[2])


# --- PEFT's format

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
STORED = {"gate_up_proj": ".base_layer", "down_proj": ""}


def stored_weight(config: ModelConfig, params: Any, layer: int, name: str) -> np.ndarray:
    """Parameter of transformers: `[experts, in, out]` in gpt-oss, otherwise `[experts, out, in]`."""
    experts = {key: np.asarray(x, np.float64) for key, x in params[f"layers_{layer}"]["mlp"]["experts"].items()}
    if config.attention_sinks:
        pair = np.stack([experts["gate_proj"], experts["up_proj"]], -1)
        return experts[name] if name == "down_proj" else pair.reshape(*pair.shape[:2], -1)
    parts = ["down_proj"] if name == "down_proj" else ["gate_proj", "up_proj"]
    return np.concatenate([experts[part] for part in parts], -1).swapaxes(1, 2)


def delta(config: ModelConfig, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What `ParamWrapper.get_delta_weight` of PEFT computes, without the scale."""
    count = config.experts.count if config.experts is not None else 0
    pair = b.reshape(len(b), -1, count).astype(np.float64), a.reshape(count, -1, a.shape[-1])
    return np.einsum("ore,eri->eio" if config.attention_sinks else "ore,eri->eoi", *pair)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_adapters_match_pefts_formula(name: str, tmp_path: Path):
    """PEFT's formula in NumPy adds to each parameter what merging adds."""
    config, base = opened(name)
    params = adapted(base, SMALL)
    save_peft(tmp_path, params, config)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert content["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert content["target_modules"] == [] and content["rank_pattern"] == {"gate_up_proj": 4} and content["r"] == 2
    alphas = {"down_proj": content["lora_alpha"] / 2**0.5, "gate_up_proj": content["alpha_pattern"]["gate_up_proj"] / 2}
    tensors, merged = load_file(tmp_path / "adapter_model.safetensors"), merged_in_float64(params)
    for layer in range(config.num_layers):
        for parameter, inner in STORED.items():
            module = f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
            a, b = (tensors.pop(f"{module}.lora_{x}.weight") for x in "AB")
            added = stored_weight(config, merged, layer, parameter) - stored_weight(config, base, layer, parameter)
            np.testing.assert_allclose(alphas[parameter] * delta(config, a, b), added, atol=1e-6)
    assert not tensors


def write(directory: Path, tensors: dict[str, np.ndarray], **content: Any) -> None:
    save_file(tensors, directory / "adapter_model.safetensors")
    text = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": [], **content})
    (directory / "adapter_config.json").write_text(text)


def peft_adapters(config: ModelConfig, parameters: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Random adapters of rank 2 as PEFT trains them, with one A for gate and up."""
    assert config.experts is not None
    count, hidden, width = config.experts.count, config.hidden_size, config.experts.intermediate_size
    sides = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(config.num_layers):
        for name in parameters:
            inner = STORED[name] if len(parameters) > 1 else ""
            module, (width_in, width_out) = f"base_model.model.model.layers.{layer}.mlp.experts{inner}", sides[name]
            tensors[f"{module}.lora_A.weight"] = rng.normal(size=(2 * count, width_in)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.normal(size=(width_out, 2 * count)).astype(np.float32)
    return tensors


@pytest.mark.parametrize("parameters", [tuple(STORED), ("gate_up_proj",), ("down_proj",)])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_trained_by_peft_are_read(name: str, parameters: tuple[str, ...], tmp_path: Path):
    config, base = opened(name)
    tensors = peft_adapters(config, parameters)
    write(tmp_path, tensors, target_parameters=[f"experts.{parameter}" for parameter in parameters])
    params = load_peft(tmp_path, base, config)
    assert params[LORA].config.targets == tuple(
        part for part in MLP if ("down_proj" if part == "down_proj" else "gate_up_proj") in parameters
    )
    merged = merged_in_float64(params)
    for layer in range(config.num_layers):
        for parameter in parameters:
            inner = STORED[parameter] if len(parameters) > 1 else ""
            module = f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
            a, b = (tensors[f"{module}.lora_{x}.weight"] for x in "AB")
            added = stored_weight(config, merged, layer, parameter) - stored_weight(config, base, layer, parameter)
            np.testing.assert_allclose(1.5 * delta(config, a, b), added, atol=2e-6)


def renamed(tensors: dict[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


ROUTER = {"base_model.model.model.layers.0.mlp.gate.lora_A.weight": np.ones((2, 24), np.float32)}


@pytest.mark.parametrize(
    ("change", "parameters", "message"),
    [
        (dict, ["mlp.gate.weight"], r"target_parameters of mlp.experts.gate_up_proj, .* got \['mlp.gate.weight'\]"),
        (dict, None, r"target_parameters of mlp.experts.gate_up_proj, mlp.experts.down_proj in .*; got \[\]"),
        (dict, "all", "target_parameters of mlp.experts.gate_up_proj, .* got 'all'"),
        (dict, 5, "target_parameters of mlp.experts.gate_up_proj, .* got 5"),
        (lambda x: renamed(x, ".experts.lora", ".gate.lora"), tuple(STORED), "experts.lora_A.weight in .*; got none"),
        (lambda x: {k: v[:-1] for k, v in x.items()}, tuple(STORED), r"lora_A.weight of shape \[10, 24\].*\[9, 24\]"),
        (lambda x: x | ROUTER, tuple(STORED), "adapters of q_proj, .*; got down_proj, gate, gate_proj, up_proj"),
    ],
)
def test_invalid_files_are_refused(change: Any, parameters: Any, message: str, tmp_path: Path):
    config, base = opened("mixtral")
    write(tmp_path, change(peft_adapters(config, tuple(STORED))), target_parameters=parameters)
    with pytest.raises(ValueError, match=message):
        load_peft(tmp_path, base, config)


def test_joint_adapters_of_gate_and_up_are_refused(tmp_path: Path):
    config, base = opened("mixtral")
    save_peft(tmp_path, adapted(base, SMALL), config)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: tensor + np.float32(0.1) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    message = (
        "lora_B of model.layers.0.mlp.experts.base_layer in blocks, one for each of its 2 parts; got others: "
        r"PEFT trained gate and up as one matrix of rank 2 \* 2. Merge it there, or train target_parameters at rank 2"
    )
    with pytest.raises(ValueError, match=message):
        load_peft(tmp_path, base, config)
