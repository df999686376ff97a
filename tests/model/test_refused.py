"""Unsupported fields are refused by name before a tensor is read, and no field that changes a model is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from smd_jax.model.families import FAMILIES, ModelType
from smd_jax.model.hf_config import model_config_from_hf
from smd_jax.model.weights import load_checkpoint, read_config

# Of training, of memory, and ids of tokens.
NOT_OF_THE_FUNCTION = {
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "pretraining_tp"),
    *("use_cache", "output_router_logits", "bos_token_id", "eos_token_id", "pad_token_id"),
}
# Read only where another key does not say the same: a list by layer, or plain RoPE.
SAID_OTHERWISE = {
    "smollm3": {"no_rope_layer_interval"},
    "gemma3_text": {"_sliding_window_pattern"},
    "phi3": {"original_max_position_embeddings"},
    "qwen2": {"max_window_layers"},
    "qwen3": {"max_window_layers"},
    "qwen3_moe": {"max_window_layers"},
}


class Watched(dict[str, Any]):
    """A config.json that knows which of its keys were asked for."""

    def __init__(self, content: dict[str, Any]):
        super().__init__(content)
        self.asked: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_transformers_is_read(model_type: ModelType):
    """A field that transformers' class has and we do not ask for would be ignored without a word."""
    windows = FAMILIES[model_type].windows
    given = {"use_sliding_window": True, "sliding_window": 8} if windows is not None and windows.flag else {}
    content = Watched(AutoConfig.for_model(model_type, **given).to_dict())
    model_config_from_hf(content)
    unread = content.keys() - content.asked - PretrainedConfig().to_dict().keys()
    assert unread <= NOT_OF_THE_FUNCTION | SAID_OTHERWISE.get(model_type, set())


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("deepseek_v3", {}, "model_type must be one of llama, .*gpt_oss .*; got 'deepseek_v3'"),
        ("qwen2_moe", {}, "model_type must be one of .*; got 'qwen2_moe'"),
        ("mistral3", {}, "model_type must be one of .*models of text.*; got 'mistral3'"),
        ("gemma3", {}, "model_type must be one of .*models of text.*; got 'gemma3'"),
        ("granitemoe", {}, "model_type must be one of .*; got 'granitemoe'"),
        (None, {}, "model_type must be one of .*; got None"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported; only .*=0.0 is"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only hidden_act='silu' is"),
        ("mixtral", {"head_dim": "8"}, "expected head_dim as an integer from 1 to .*; got '8'"),
        ("qwen3_moe", {"norm_topk_prob": None}, "expected norm_topk_prob as true or false; got None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "expected decoder_sparse_step as an integer from 1 .*; got 0"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "expected mlp_only_layers as a list of integers, or null; got 1"),
        ("qwen3_moe", {"num_experts_per_tok": 200}, "num_experts_per_tok <= num_experts 128; got 200"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha=2.0 is not supported; only swiglu_alpha=1.702 is"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "only quant_method 'mxfp4' or none is"),
        ("mistral", {"quantization_config": {"quant_method": "fp8"}}, "only quantization_config=None is"),
        ("gemma2", {"final_logit_softcapping": -1}, "expected final_logit_softcapping as .*; got -1"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("granite", {"logits_scaling": 0}, "expected logits_scaling as a finite number > 0; got 0"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "expected no_rope_layers as a list of 0 .* and 1, .*; got"),
        ("phi3", {"partial_rotary_factor": 2.0}, "expected rotary_dim as an even number from 2 to head_dim 8"),
        ("llama", {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, "got also llama_4_scaling_beta"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8 is not supported; only num_local_experts=None is"),
    ],
)
def test_before_a_tensor_is_read(model_type: str | None, change: dict[str, Any], message: str, tmp_path: Path):
    """The weights are no safetensors at all; the error is about the field, and names the file."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": model_type} | change))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    for read in (load_checkpoint, read_config):
        with pytest.raises(ValueError, match=f"config.json: .*{message}"):
            read(tmp_path)
