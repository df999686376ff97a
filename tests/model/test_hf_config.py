"""config.json of every family: reading, writing and unsupported settings."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from smd_jax.config import Experts, LinearRope, ModelConfig, YarnRope
from smd_jax.model import hf_config
from smd_jax.model.decoder import Decoder
from smd_jax.model.families import FAMILIES
from smd_jax.model.hf_config import hf_config_from_model, model_config_from_hf, model_type_of
from smd_jax.model.weights import load_checkpoint, read_config
from smd_jax.testing import tiny_model_config
from tests.families import FAMILY_CONFIGS, GEMMA3, PLAIN

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SMALL_CONFIG = tiny_model_config(
    vocab_size=96, intermediate_size=48, num_kv_heads=4, max_positions=64, qkv_bias=False, tie_embeddings=False
)
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 2.0}

# The keys of the published files, with small sizes.
MISTRAL = SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "sliding_window": 16}
QWEN2 = SMALL | {"model_type": "qwen2", "num_key_value_heads": 4, "max_window_layers": 1, "sliding_window": 131072}
GEMMA = SMALL | {"model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 8, "num_key_value_heads": 1}
GEMMA |= {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000}
GEMMA |= {"sliding_window": 512, "sliding_window_pattern": 6}


def test_defaults_are_those_of_transformers():
    assert model_config_from_hf(SMALL) == SMALL_CONFIG
    assert model_config_from_hf(SMALL | {"model_type": "qwen3", "num_key_value_heads": 2}).head_dim == 128


def test_keys_of_other_classes_are_ignored():
    """As in transformers, which keeps them on the configuration but whose models ignore them."""
    foreign: dict[str, Any] = {"logits_scaling": 8.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 4}
    foreign |= {"no_rope_layers": None, "embedding_multiplier": None, "num_experts": 0}
    assert model_config_from_hf(SMALL | foreign) == model_config_from_hf(SMALL)


def test_mistral():
    expected = replace(SMALL_CONFIG, num_kv_heads=2, norm_eps=1e-5, sliding_windows=(16, 16))
    assert model_config_from_hf(MISTRAL) == expected
    # Null since v0.2.
    assert model_config_from_hf(MISTRAL | {"sliding_window": None}).sliding_windows == ()
    # Nemo's heads do not add up to its width.
    assert model_config_from_hf(MISTRAL | {"hidden_size": 40, "head_dim": 8}).head_dim == 8


def test_qwen2():
    assert model_config_from_hf(QWEN2).sliding_windows == (), "the window is not in use"
    used = QWEN2 | {"use_sliding_window": True, "sliding_window": 64}
    assert model_config_from_hf(used).sliding_windows == (None, 64)
    assert model_config_from_hf(used | {"layer_types": [SLIDING, FULL]}).sliding_windows == (64, None)


def test_gemma3():
    config = model_config_from_hf(GEMMA)
    assert config == replace(
        SMALL_CONFIG,
        num_layers=8,
        num_kv_heads=1,
        head_dim=256,
        rope_theta=1e6,
        local_rope_theta=1e4,
        qk_norm=True,
        activation="gelu_tanh",
        norm_plus_one=True,
        post_norms=True,
        scale_embeddings=True,
        tie_embeddings=True,
        sliding_windows=(*(512,) * 5, None, 512, 512),
    )
    assert model_config_from_hf(GEMMA | {"final_logit_softcapping": 30.0}) == replace(config, logit_softcap=30.0)
    assert Decoder(config).shape.window(5) is None and Decoder(config).shape.window(7) == 512
    # Keys of transformers 5; 27B has another query_pre_attn_scalar than head_dim.
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    near = {"rope_type": "default", "rope_theta": 1e4}
    newer = {key: value for key, value in GEMMA.items() if "rope" not in key}
    newer |= {"rope_parameters": {FULL: linear, SLIDING: near}, "query_pre_attn_scalar": 168}
    assert model_config_from_hf(newer) == replace(config, rope_scaling=LinearRope(8.0), query_pre_attn_scalar=168.0)
    older = GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 168}
    assert model_config_from_hf(older) == model_config_from_hf(newer)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        # A file of transformers 5, and a scaling that its user added.
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ],
)
def test_every_spelling_of_rope(rope: dict[str, Any]):
    config = model_config_from_hf(SMALL | rope)
    assert (config.rope_theta, config.rope_scaling) == (5e5, LinearRope(2.0))


def test_an_added_scaling_keeps_the_rotated_share():
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    scaling = {"type": "su", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    changed = {"rope_parameters": rope, "rope_scaling": scaling, "original_max_position_embeddings": 32}
    config = model_config_from_hf(SMALL | {"model_type": "phi3"} | changed)
    assert (config.rope_theta, config.rotary_dim) == (5e5, 4)


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("qwen2", {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}),
        ("qwen3", {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [1, 1, 2]}),
        ("qwen2", {"type": "yarn", "mrope_section": [1, 1, 2], "factor": 4}),
        ("mistral", {"type": "yarn", "factor": 16.0, "finetuned": True}),
        ("phi3", {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}),
        ("gpt_oss", {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False}),
        ("seed_oss", {"rope_type": "default"}),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}),
        ("olmo3", {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2, "beta_fast": 32.0}),
        ("ministral3", YARN | {"max_position_embeddings": 64, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}),
    ],
)
def test_rope_keys_of_published_files_are_accepted(model_type: str, rope: dict[str, Any]):
    sizes = {"num_key_value_heads": 4, "original_max_position_embeddings": 32}
    model_config_from_hf(SMALL | sizes | {"model_type": model_type, "rope_scaling": rope})


@pytest.mark.parametrize(
    "rope, expected",
    [
        ({"factor": 4.0}, YarnRope(4.0, 64)),
        ({"factor": None, "original_max_position_embeddings": 16}, YarnRope(4.0, 16)),
        ({"factor": 4.0, "attention_factor": 0.5, "beta_fast": 8}, YarnRope(4.0, 64, 8.0, attention_factor=0.5)),
        ({"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, YarnRope(4.0, 64, attention_factor=1.0)),
        ({"factor": 4.0, "truncate": None}, YarnRope(4.0, 64, truncate=False)),
    ],
)
def test_yarn(rope: dict[str, Any], expected: YarnRope):
    assert model_config_from_hf(SMALL | {"rope_scaling": {"type": "yarn", **rope}}).rope_scaling == expected


@pytest.mark.parametrize(("inner", "expected"), [({"original_max_position_embeddings": 32}, 32), ({}, 64)])
def test_nested_rope_has_its_own_original_context(inner: dict[str, int], expected: int):
    """As in transformers: the outer key counts only in families with one RoPE for all layers."""
    outer = {"model_type": "olmo3", "original_max_position_embeddings": 16}
    config = model_config_from_hf(SMALL | outer | {"rope_scaling": YARN | {"factor": 2.0} | inner})
    assert isinstance(config.rope_scaling, YarnRope) and config.rope_scaling.original_max_positions == expected


@pytest.mark.parametrize(("given", "expected"), [(32_768, 131_072), (40_960, 131_072), (262_144, 262_144)])
def test_yarn_lengthens_the_context(given: int, expected: int):
    """Qwen2.5's cards add the scaling to a file whose `max_position_embeddings` stays as it was."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = SMALL | {"max_position_embeddings": given, "rope_scaling": scaling}
    assert model_config_from_hf(config).max_positions == expected
    assert model_config_from_hf(config | {"rope_scaling": None}).max_positions == given


def test_model_types_of_written_configs():
    found = {name: model_type_of(config) for name, config in FAMILY_CONFIGS.items()}
    assert found == {
        "llama-bias": "llama",
        "mistral": "mistral",
        "qwen2-window": "qwen2",
        "qwen3-bias-window": "qwen3",
        "gemma3": "gemma3_text",
        "gemma3-bias": "gemma3_text",
    }
    assert model_type_of(PLAIN, "mistral") == "mistral", "without windows it equals a Llama"
    assert model_type_of(replace(PLAIN, qkv_bias=True), "mistral") == "qwen2"
    scaled = replace(PLAIN, rope_scaling=YarnRope(4.0, 4, attention_factor=1.0, query_beta=0.5))
    assert (model_type_of(scaled), model_type_of(PLAIN, "ministral3")) == ("ministral3", "llama")
    # A Mistral's heads need not add up to its width.
    assert model_type_of(replace(PLAIN, hidden_size=30)) == "mistral"


# --- unsupported

# Settings of training and memory, and token ids.
IRRELEVANT_FIELDS = {
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "pretraining_tp"),
    *("use_cache", "output_router_logits", "bos_token_id", "eos_token_id", "pad_token_id"),
}
# transformers converts them to a list by layer.
CONVERTED_FIELDS = {
    *("no_rope_layer_interval", "_sliding_window_pattern", "original_max_position_embeddings"),
    *("max_window_layers", "use_sliding_window"),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_transformers_is_read(model_type: str, monkeypatch: pytest.MonkeyPatch):
    """A field of transformers' class that is not read would be ignored silently."""
    read_fields = set[str]()

    class Watched:
        def __init__(self, config: Any) -> None:
            self.config = config

        def __getattr__(self, key: str) -> Any:
            read_fields.add(key)
            return getattr(self.config, key)

    parse = hf_config._parsed
    monkeypatch.setattr(hf_config, "_parsed", lambda content: Watched(parse(content)))
    model_config_from_hf({"model_type": model_type})
    fields = AutoConfig.for_model(model_type).to_dict().keys() - PretrainedConfig().to_dict().keys()
    assert fields - read_fields - FAMILIES[model_type].only.keys() <= IRRELEVANT_FIELDS | CONVERTED_FIELDS


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("deepseek_v3", {}, "expected model_type of llama, .*models of text.*; got 'deepseek_v3'"),
        ("mistral3", {}, "got 'mistral3'$"),
        ("mistral3", {"text_config": {}}, "got 'mistral3'. docs/models.md says how to save its text model"),
        (None, {}, "expected model_type of .*; got None"),
        ("llama", {"vocab_size": None}, "'vocab_size'.* expected int, got NoneType"),
        ("llama", {"rms_norm_eps": "1e-6"}, "'rms_norm_eps'.* expected float, got str"),
        *(("llama", {"rms_norm_eps": eps}, "expected a finite norm_eps >= 0") for eps in (-1.0, math.inf, math.nan)),
        *(("llama", {"rope_theta": base}, "expected a finite rope_theta > 0") for base in (0, -1, math.inf, math.nan)),
        *(("llama", {"rope_theta": base}, "expected rope_theta as a number; got") for base in ("7", True)),
        ("llama", {"vocab_size": 2**31}, "expected vocab_size of at most 2147483647; got 2147483648"),
        ("llama", {"hidden_size": 30}, r"hidden size \(30\) is not a multiple"),
        ("llama", {"num_hidden_layers": 100_000}, "expected num_hidden_layers from 1 to 4096; got 100000"),
        ("llama", {"num_key_value_heads": 3}, "num_heads to be a multiple of num_kv_heads; got 4 and 3"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8 is not supported; only num_local_experts=None or"),
        ("llama", {"is_causal": False}, "is_causal=False is not supported; only is_causal=True is"),
        ("llama", {"per_layer_config": {"1": {"hidden_act": "gelu"}}}, "only per_layer_config=None is"),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": 0}, "a window of sliding_windows.*got 0"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only hidden_act='silu' is"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} .*; only .*=None is"),
        (
            "llama",
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            "rope_type of default, .*; got 'ntk'",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "Missing required keys .*'linear': {'factor'}"),
        ("llama", {"rope_scaling": "yarn"}, "'rope_parameters' with value 'yarn'"),
        *(
            (
                "llama",
                {"rope_scaling": rope},
                f"expected no keys of a scaling for rope_type 'default'; got .*{key}.*yarn",
            )
            for key, rope in (("factor", {"factor": 4.0}), ("rope_typ", {"rope_typ": "yarn"}))
        ),
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "same; got 'dynamic'"),
        ("llama", {"rope_scaling": YARN | {"original_max_position": 8}}, "rope_type 'yarn'; got {'original_max_pos"),
        ("qwen3", {"rope_scaling": YARN | {"attn_factor": 0.8}}, "got {'attn_factor': 0.8}. transformers ignores"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9}}, "factor .*; got {'alpha': 9}"),
        ("qwen2", {"rope_parameters": {FULL: {}, SLIDING: {}}}, "'default'; got {'full_attention'"),
        ("gemma3_text", {"rope_parameters": YARN}, "as {'full_attention': .*; got {'rope_type': 'yarn', .* outside of"),
        ("olmo3", {"rope_parameters": {"rope_theta": 7.0}}, "got {'rope_theta': 7.0} outside of both"),
        ("gemma3_text", {"rope_scaling": {FULL: YARN}}, "for rope_type 'default'; got {'full_attention'"),
        ("llama", {"layer_types": [FULL, SLIDING]}, r"llama has full_attention in all layers; got \['full"),
        ("mistral", {"layer_types": [FULL, FULL]}, "mistral has sliding_attention in all layers; got"),
        ("mistral", {"attention_bias": True}, "mistral with attention_bias=True is not supported"),
        ("qwen2", {"layer_types": [SLIDING, FULL]}, "needs a sliding_window that is in use; got .*use_sliding.*=None"),
        ("qwen2", {"layer_types": ["chunked_attention", FULL]}, r"full_attention, sliding_attention; got \['chunked"),
        ("qwen3", {"mlp_bias": True}, "qwen3 with mlp_bias=True is not supported; only mlp_bias=False is"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
            "expected rope_type 'yarn'",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3_text", {"rope_parameters": {FULL: YARN, SLIDING: YARN}}, "plain RoPE in layers with a sliding window"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "expected a finite attention_softcap > 0; got 0"),
        ("phi3", {"partial_rotary_factor": 0.4}, "expected rotary_dim as an even number"),
        ("mixtral", {"num_experts_per_tok": 9}, "per_token <= count 8; got 9"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported; only .*=0.0 is"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha=2.0 is not supported; only swiglu_alpha=1.702 is"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "only quant_method 'mxfp4' or none is"),
        ("ministral3", {"rope_parameters": YARN}, "expected llama_4_scaling_beta > 0 in rope_parameters of ministral3"),
    ],
)
def test_unsupported_configs_are_refused(model_type: str | None, change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        model_config_from_hf(SMALL | {"model_type": model_type} | change)
    assert len(str(caught.value)) < 600


def test_neutral_rope_keys_are_accepted():
    """Early files with YaRN have them."""
    given = SMALL | {"model_type": "llama"}
    plain = model_config_from_hf(given | {"rope_scaling": YARN})
    neutral = {"attn_factor": 1, "extrapolation_factor": 1.0}
    assert model_config_from_hf(given | {"rope_scaling": YARN | neutral}) == plain


def test_unsupported_configs_are_refused_before_tensors_are_read(tmp_path: Path):
    """The tensor file is invalid; the error names config.json and the field."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"hidden_act": "gelu"}))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    for read in (load_checkpoint, read_config):
        with pytest.raises(ValueError, match="config.json: .*hidden_act='gelu' is not supported"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(PLAIN, sliding_windows=(8, 4)), r"mistral has sliding_windows=\(8, 8\)"),
        (replace(PLAIN, qkv_bias=True, qk_norm=True), "qwen3 has qkv_bias=False"),
        (replace(PLAIN, mlp_bias=True, qk_norm=True), "qwen3 has mlp_bias=False"),
        (replace(GEMMA3, post_norms=False), "gemma has .*qk_norm=False"),
        (replace(GEMMA3, local_rope_theta=None), "gemma3_text has local_rope_theta=1000000.0"),
        (replace(GEMMA3, query_pre_attn_scalar=20.5), "gemma3_text has query_pre_attn_scalar=20"),
        (replace(GEMMA3, hidden_size=30), r"gemma3_text has no such config.json: .*hidden size \(30\) is"),
    ],
)
def test_configs_without_a_model_type_are_refused(config: ModelConfig, message: str):
    with pytest.raises(ValueError, match=message):
        hf_config_from_model(config, "float32")


def test_invalid_model_configs_are_refused():
    with pytest.raises(ValueError, match="expected sliding_windows with local_rope_theta"):
        replace(GEMMA3, sliding_windows=())
    with pytest.raises(ValueError, match="expected a finite query_pre_attn_scalar > 0; got 0.0"):
        replace(GEMMA3, query_pre_attn_scalar=0.0)
    with pytest.raises(ValueError, match="RoPE of all channels in all layers with query_beta; got rotary_dim=4"):
        replace(PLAIN, rope_scaling=YarnRope(4.0, 4, query_beta=0.5), rotary_dim=4)
    with pytest.raises(ValueError, match="expected a finite query_beta >= 0; got -1.0"):
        YarnRope(4.0, 4, query_beta=-1.0)
    for wrong in ({"activation": "relu2"}, {"gated_mlp": False}):
        with pytest.raises(ValueError, match="expected activation 'silu' or 'gelu_tanh' and gated_mlp with experts"):
            replace(PLAIN, experts=Experts(count=4, per_token=2, intermediate_size=8), **wrong)
