"""PEFT's format: names, shapes and fields, round trips, and invalid files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smd_jax.config import Experts
from smd_jax.model.lora import LORA, LoraConfig, base_params, by_module, merge_lora
from smd_jax.model.peft_format import CONFIG_FILE, TENSOR_FILE, check_peft, load_peft, save_peft
from smd_jax.model.value_head import add_value_head
from smd_jax.testing import random_params, tiny_model_config
from tests.adapted import SMALL, adapted
from tests.bitwise import assert_bitwise_equal
from tests.model.test_family_logits import GOLDEN, opened

CONFIG = tiny_model_config()
PARAMS = adapted(random_params(CONFIG))


def saved(directory: Path, params: Any = PARAMS, **options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    save_peft(directory, params, CONFIG, **options)
    return json.loads((directory / CONFIG_FILE).read_text()), load_file(directory / TENSOR_FILE)


def test_names_shapes_and_fields(tmp_path: Path):
    config, tensors = saved(tmp_path, base_model="models/base")
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, TENSOR_FILE]
    assert len(tensors) == 2 * 7 * CONFIG.num_layers
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    # PEFT stores torch.nn.Linear's [out, in].
    pair = PARAMS[LORA].matrices["layers_1"]["attention"]["k_proj"]
    np.testing.assert_array_equal(tensors[f"{name}.lora_A.weight"], np.asarray(pair["lora_A"]).T)
    np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], np.asarray(pair["lora_B"]).T)
    assert tensors[f"{name}.lora_A.weight"].shape == (3, 32)
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, 3)
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 2, True)
    assert config["base_model_name_or_path"] == "models/base"
    assert set(config["target_modules"]) == {path[-1] for path in by_module(PARAMS[LORA])}
    assert (config["bias"], config["lora_dropout"], config["fan_in_fan_out"]) == ("none", 0.0, False)


@pytest.mark.parametrize(
    "config", [SMALL, LoraConfig(rank=2, alpha=3.5, targets=("q_proj", "down_proj"))], ids=["all", "some"]
)
def test_a_round_trip(tmp_path: Path, config: LoraConfig):
    params = adapted(base_params(PARAMS), config)
    (tmp_path / "README.md").write_text("mine")
    save_peft(tmp_path, add_value_head(params, CONFIG), CONFIG)
    save_peft(tmp_path, params, CONFIG)  # over the first
    loaded = load_peft(tmp_path, base_params(PARAMS), CONFIG)
    assert loaded[LORA].config == config
    assert_bitwise_equal(loaded, params)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_bfloat16_files_are_read_as_float32(tmp_path: Path):
    save_peft(tmp_path, PARAMS, CONFIG, dtype="bfloat16")
    loaded = load_peft(tmp_path, base_params(PARAMS), CONFIG)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), PARAMS[LORA])
    assert_bitwise_equal(jax.device_get(loaded[LORA]), jax.device_get(rounded))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, r"expected peft_type 'LORA' in .*; got 'IA3'"),
        ({"use_dora": True}, "expected plain LoRA in .*; got use_dora True"),
        ({"bias": "all"}, "expected plain LoRA in .*; got bias 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "expected plain LoRA in .*; got rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, r"expected plain LoRA in .*; got modules_to_save \['lm_head'\]"),
        ({"r": 4}, r"lora_A.weight of shape \[4, 32\] in .*; got \[3, 32\]"),
        ({"r": None}, r"expected r as an integer, and lora_alpha, in .*adapter_config.json; got {'r': None"),
        ({"lora_alpha": float("nan")}, "adapter_config.json: expected a finite alpha > 0; got nan"),
        ({"use_rslora": "false"}, "(?s)adapter_config.json: .*rank_stabilised"),
        ({"alpha_pattern": {"q_proj": 2}}, "expected plain LoRA in .*; got alpha_pattern"),
        ({"use_bdlora": {"nblocks": 2}}, "expected plain LoRA in .*; got use_bdlora"),
        (
            {"kasa_config": {}, "arrow_config": {"top_k": 3}},
            "LoRA in .*; got kasa_config {}, arrow_config {'top_k': 3}$",
        ),
        ({"an_option_of_a_later_peft": 1}, "expected plain LoRA in .*; got an_option_of_a_later_peft 1"),
        ({"init_lora_weights": "pissa"}, "expected an init_lora_weights in .* unchanged; got 'pissa'. PEFT converts"),
        ({"init_lora_weights": "olora"}, "got 'olora'"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    config, _ = saved(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "mica", "orthogonal"])
def test_options_without_effect_are_accepted(tmp_path: Path, init: object):
    """Every option that PEFT 0.21 writes, at its default."""
    config, _ = saved(tmp_path)
    others = {"alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "corda_config": None, "eva_config": None}
    others |= {"ensure_weight_tying": False, "exclude_modules": None, "kasa_config": None, "layer_replication": None}
    others |= {"layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_bias": False}
    others |= {"lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core"}
    others |= {"modules_to_save": None, "monteclora_config": None, "peft_version": "0.21.2", "qalora_group_size": 16}
    others |= {"rank_pattern": {}, "revision": None, "target_parameters": None, "trainable_token_indices": None}
    others |= {"use_bdlora": None, "use_dora": False, "use_qalora": False, "velora_config": None}
    others |= {"alora_invocation_tokens": None, "init_lora_weights": init}
    others |= {"lora_dtype": None, "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6}  # of ms-swift
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | others))
    assert_bitwise_equal(load_peft(tmp_path, base_params(PARAMS), CONFIG), PARAMS)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | others | {"use_rslora": None}))
    assert load_peft(tmp_path, base_params(PARAMS), CONFIG)[LORA].config.rank_stabilised is False


def test_invalid_tensors_are_refused(tmp_path: Path):
    _, tensors = saved(tmp_path)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / TENSOR_FILE)
    with pytest.raises(ValueError, match=rf"expected {name} in .*, because its target has adapters in every layer"):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)
    save_file(tensors | {"base_model.model.model.embed_tokens.weight": tensors[name]}, tmp_path / TENSOR_FILE)
    with pytest.raises(ValueError, match="expected adapters of whole layers in .*; got .*embed_tokens.weight, too"):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)
    save_file({"base_model.model.lm_head.lora_A.weight": tensors[name]}, tmp_path / TENSOR_FILE)
    with pytest.raises(ValueError, match="expected adapters of q_proj, .*; got lm_head"):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)
    (tmp_path / TENSOR_FILE).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)


def test_a_missing_config_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=rf"expected adapters with {CONFIG_FILE} in"):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)


def test_invalid_parameters_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected parameters with adapters \(smd\.model\.add_lora\)"):
        save_peft(tmp_path / "a", base_params(PARAMS), CONFIG)
    with pytest.raises(ValueError, match=r"in every layer of the config; got others at layers_2/attention/k_proj"):
        save_peft(tmp_path / "a", PARAMS, tiny_model_config(num_layers=3))
    for factor, options in ((jnp.nan, {}), (1e9, {"dtype": "float16"})):
        wide: Any = jax.tree.map(lambda x: x * factor, PARAMS)  # noqa: B023
        with pytest.raises(ValueError, match=r"expected finite weights; got NaN or infinity in .*lora_A"):
            save_peft(tmp_path / "a", wide, CONFIG, **options)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "a").exists()
    save_peft(tmp_path / "b", PARAMS, CONFIG)
    with pytest.raises(ValueError, match="expected the parameters of a base; got some with adapters"):
        load_peft(tmp_path / "b", PARAMS, CONFIG)


def test_matrices_are_stored_as_in_the_model_type_of_the_base(tmp_path: Path):
    """This Phi's config is also a Mistral's, which stores q, k and v as three matrices."""
    config, base = opened("phi3")
    params, hub = adapted(base), "microsoft/Phi-3-mini-4k-instruct"
    save_peft(tmp_path, params, config, base_model=hub, base_directory=GOLDEN / "phi3")
    content = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert content["base_model_name_or_path"] == hub
    assert set(content["target_modules"]) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert_bitwise_equal(load_peft(tmp_path, base, config), params)
    some = LoraConfig(targets=("up_proj",))
    message = "expected base_directory, .* because phi3 stores gate_up_proj, qkv_proj as one matrix .*; got none"
    with pytest.raises(ValueError, match=message):
        save_peft(tmp_path / "unknown", params, config, base_model=hub)
    with pytest.raises(ValueError, match="expected base_directory"):
        check_peft(config, some)
    assert not (tmp_path / "unknown").exists()
    check_peft(config, LoraConfig(targets=("o_proj", "down_proj")))  # stored alike
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "mistral"}')
    save_peft(tmp_path / "mistral", params, config, base_model=hub, base_directory=tmp_path / "base")
    assert "q_proj" in json.loads((tmp_path / "mistral" / CONFIG_FILE).read_text())["target_modules"]
    check_peft(config, some, tmp_path / "base")
    with pytest.raises(ValueError, match="adapters on all of gate_proj, up_proj or on none.*got up_proj"):
        check_peft(config, some, GOLDEN / "phi3")
    with pytest.raises(FileNotFoundError, match="expected a checkpoint with config.json in"):
        save_peft(tmp_path / "none", params, config, base_directory=tmp_path)
    assert not (tmp_path / "none").exists()


def fused_adapter(directory: Path, **options: Any) -> dict[str, np.ndarray]:
    """Writes PEFT's files for a Phi whose q, k and v are one matrix; returns the tensors."""
    rng = np.random.default_rng(0)
    widths = {"qkv_proj": CONFIG.head_dim * (CONFIG.num_heads + 2 * CONFIG.num_kv_heads)}
    tensors = {}
    for layer in range(CONFIG.num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(3, CONFIG.hidden_size)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(size=(widths["qkv_proj"], 3)).astype(np.float32)
    save_file(tensors, directory / TENSOR_FILE)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["qkv_proj"], **options}
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    return tensors


def test_adapters_of_a_fused_matrix_are_split(tmp_path: Path):
    """q, k and v get its A, and their rows of its B."""
    tensors = fused_adapter(tmp_path)
    merged = merge_lora(load_peft(tmp_path, base_params(PARAMS), CONFIG))
    name = "base_model.model.model.layers.1.self_attn.qkv_proj"
    added = 2 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    after, before = merged["layers_1"]["attention"], PARAMS["layers_1"]["attention"]
    found = [np.asarray(after[part]["kernel"] - before[part]["kernel"]).T for part in ("q_proj", "k_proj", "v_proj")]
    np.testing.assert_allclose(np.concatenate(found), added, atol=1e-5)


@pytest.mark.parametrize("pattern", [{"qkv_proj": 6}, {"qkv_proj": 9, "o_proj": 2}, [3]])
def test_ranks_of_single_matrices_are_refused(tmp_path: Path, pattern: Any):
    fused_adapter(tmp_path, rank_pattern=pattern)
    with pytest.raises(ValueError, match=r"expected rank_pattern to be {'qkv_proj': 9} or empty; got"):
        load_peft(tmp_path, base_params(PARAMS), CONFIG)


def test_adapters_of_a_dense_layer_beside_experts(tmp_path: Path):
    """The dense layer's gate_proj is a separate matrix, although experts store theirs as gate_up_proj."""
    experts = Experts(count=4, per_token=2, intermediate_size=8, layers=(False, True))
    config = replace(CONFIG, experts=experts)
    shapes = {"q_proj": (32, 32), "gate_proj": (32, 64)}
    modules = {"layers.0.self_attn.q_proj": "q_proj", "layers.1.self_attn.q_proj": "q_proj"}
    tensors = {}
    for module, name in (modules | {"layers.0.mlp.gate_proj": "gate_proj"}).items():
        fan_in, fan_out = shapes[name]
        prefix = f"base_model.model.model.{module}"
        tensors |= {f"{prefix}.lora_A.weight": np.ones((3, fan_in), np.float32)}
        tensors |= {f"{prefix}.lora_B.weight": np.ones((fan_out, 3), np.float32)}
    save_file(tensors, tmp_path / TENSOR_FILE)
    content = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(shapes)}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(content))
    loaded = load_peft(tmp_path, random_params(config), config)[LORA]
    assert loaded.config.targets == ("q_proj", "gate_proj")
    assert loaded.matrices["layers_0"]["mlp"]["gate_proj"]["lora_B"].shape == (3, 64)
