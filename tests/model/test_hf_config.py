"""config.json of every family: what is read, what is written again, and what is refused."""

from typing import Any

import pytest

from smd_jax.config import LinearRope, ModelConfig, YarnRope
from smd_jax.model.hf_config import hf_config_from_model, model_config_from_hf
from tests.families import sizes_of
from tests.model.test_weights import every_config

SMALL = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@every_config
def test_config_round_trip(config: ModelConfig):
    assert model_config_from_hf(hf_config_from_model(config, "bfloat16")) == config


def test_defaults_are_those_of_transformers():
    assert model_config_from_hf(SMALL) == ModelConfig(
        **sizes_of(96, 32, 48, 2, 4, 4, 8, 64),
        rope_theta=1e4,
        norm_eps=1e-6,
    )
    qwen3 = model_config_from_hf(SMALL | {"model_type": "qwen3", "num_key_value_heads": 2})
    assert qwen3.head_dim == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_in_every_spelling(rope: dict[str, Any]):
    config = model_config_from_hf(SMALL | rope)
    assert (config.rope_theta, config.rope_scaling) == (5e5, LinearRope(2.0))


@pytest.mark.parametrize(
    "rope, expected",
    [
        ({"factor": 4.0}, YarnRope(4.0, 64)),
        ({"factor": 4.0, "original_max_position_embeddings": 16}, YarnRope(4.0, 16)),
        ({"factor": None, "original_max_position_embeddings": 16}, YarnRope(4.0, 16)),
        ({"factor": 4.0, "attention_factor": 0.5, "beta_fast": 8}, YarnRope(4.0, 64, 8.0, attention_factor=0.5)),
        ({"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, YarnRope(4.0, 64, attention_factor=1.0)),
        ({"factor": 1.0}, YarnRope(1.0, 64, attention_factor=1.0)),
    ],
)
def test_yarn(rope: dict[str, Any], expected: YarnRope):
    assert model_config_from_hf(SMALL | {"rope_scaling": {"type": "yarn", **rope}}).rope_scaling == expected


@pytest.mark.parametrize(("given", "expected"), [(32_768, 131_072), (40_960, 131_072), (262_144, 262_144)])
def test_yarn_lengthens_the_context(given: int, expected: int):
    """Qwen2.5's cards add the scaling to a file whose `max_position_embeddings` stays as it was."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = SMALL | {"max_position_embeddings": given, "rope_scaling": scaling}
    assert model_config_from_hf(config).max_positions == expected
    assert model_config_from_hf(config | {"rope_scaling": None}).max_positions == given


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba"}, "one of llama, mistral, qwen2, .*got 'mamba'"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "expected num_experts as an integer from 1 to .*; got 0"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 5}, "expected one number of experts; got"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok <= num_local_experts 8; got 9"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1]}, "expected a layer with experts; got"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "gptq"}},
            "quantization_config={'quant_method': 'gptq'} is not supported; only quant_method 'mxfp4' or none is",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "only quantization_config=None is"),
        ({"model_type": "gpt_oss", "swiglu_limit": -1}, "expected swiglu_limit as a finite number > 0; got -1"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "expected no_rope_layers for each of 2 layers; got 1"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.4}, "expected rotary_dim as an even number"),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": 0},
            "expected attn_logit_softcapping as a finite .*; got 0",
        ),
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only hidden_act='silu' is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor.*0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "one of default, linear, dynamic, .*; got 'ntk'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "expected short_factor as a list of .*; got None"),
        ({"rope_scaling": {"type": "linear"}}, "expected factor as a finite number > 0; got None"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "expected low_freq_factor as a finite number > 0; got None",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}}, "got also finetuned"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "got also full_attention"),
        ({"vocab_size": None}, "expected vocab_size as an integer from 1 to 2147483647; got None"),
        ({"hidden_size": 30}, "hidden_size must be a multiple of num_attention_heads.*got 30, 4"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(SMALL | change)
