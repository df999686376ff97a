"""The families of dense language models that the decoder is, by their model type in transformers.

What they have in common, and where they differ:

                       llama   mistral   qwen2   qwen3   gemma3_text
    biases of q, k, v  a       -         always  a       a
    bias of the output a       -         -       a       a            a: with attention_bias
    biases of the MLP  m       -         -       -       -            m: with mlp_bias
    norms of q and k   -       -         -       yes     yes
    sliding windows    -       all       some    some    some         of the layers
    Gemma's norms, GeGLU, scaled embeddings, two bases of RoPE        gemma3_text alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smd_jax.config import ModelConfig

ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


@dataclass(frozen=True)
class Family:
    """What a model type of transformers fixes, and what it leaves to config.json.

    Attributes:
      architecture: transformers' class.
      always: fields of ModelConfig that are so in every model of the family; of the fields in `SET_BY_FAMILY` all
        others have ModelConfig's defaults.
      attention_bias, mlp_bias: whether config.json may ask for biases in attention (on q, k, v and the output), and in
        the MLP.
      windows: which layers may have a sliding window: none, all, or those that `layer_types` names.
      sizes: transformers' defaults of keys that are absent in config.json.
      num_kv_heads: the default of an absent num_key_value_heads; None: num_attention_heads.
      null_kv_heads: whether a num_key_value_heads of null means num_attention_heads.
      head_dim: where config.json gives none; None: hidden_size / num_attention_heads.
      tie_embeddings: where config.json says nothing.
      only: keys of config.json and the one value that the decoder can do; absent and null mean the same.
    """

    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    attention_bias: bool = False
    mlp_bias: bool = False
    windows: Literal["none", "all", "some"] = "none"
    sizes: Mapping[str, int] = field(default_factory=dict)
    num_kv_heads: int | None = None
    null_kv_heads: bool = True
    head_dim: int | None = None
    tie_embeddings: bool = False
    only: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})


def _sizes(vocab: int, hidden: int, mlp: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


FAMILIES: dict[ModelType, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        sizes=_sizes(32_000, 4096, 11_008, 32, 32, 2048),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        windows="all",
        sizes=_sizes(32_000, 4096, 14_336, 32, 32, 131_072),
        num_kv_heads=8,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qkv_bias": True},
        windows="some",
        sizes=_sizes(151_936, 4096, 22_016, 32, 32, 32_768),
        num_kv_heads=32,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        attention_bias=True,
        windows="some",
        sizes=_sizes(151_936, 4096, 22_016, 32, 32, 32_768),
        num_kv_heads=32,
        head_dim=128,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "qk_norm": True,
            "activation": "gelu_tanh",
            "norm_plus_one": True,
            "post_norms": True,
            "scale_embeddings": True,
        },
        attention_bias=True,
        windows="some",
        sizes=_sizes(262_208, 2304, 9216, 26, 8, 131_072),
        num_kv_heads=4,
        null_kv_heads=False,
        head_dim=256,
        tie_embeddings=True,
        only={
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
}
SET_BY_FAMILY: dict[str, Any] = {
    "qk_norm": False,
    "activation": "silu",
    "norm_plus_one": False,
    "post_norms": False,
    "scale_embeddings": False,
}


def model_type_of(config: ModelConfig, prefer: str | None = None) -> ModelType:
    """The transformers model type that expresses `config`; of several `prefer`, if it is one of them, or the first.

    Raises:
      ValueError: none does.
    """
    reasons = {model_type: _why_not(config, model_type) for model_type in FAMILIES}
    possible: list[ModelType] = [model_type for model_type in FAMILIES if reasons[model_type] is None]
    for model_type in possible:
        if model_type == prefer:
            return model_type
    if possible:
        return possible[0]
    listed = "; ".join(f"{model_type} {reason}" for model_type, reason in reasons.items())
    raise ValueError(f"expected the shape of a model type that is written for transformers; of those {listed}")


def _why_not(config: ModelConfig, model_type: ModelType) -> str | None:
    """Why no config.json of this model type says `config`, or None if one does."""
    family = FAMILIES[model_type]
    shape = vars(config)
    for name, expected in {**SET_BY_FAMILY, **family.always}.items():
        if shape[name] != expected:
            return f"has {name}={expected}; got {name}={shape[name]}"
    biases = (config.qkv_bias, config.o_bias)
    possible = {(True, True), (False, False)} if family.attention_bias else {("qkv_bias" in family.always, False)}
    if biases not in possible:
        return f"has (qkv_bias, o_bias) of {' or '.join(map(str, sorted(possible)))}; got {biases}"
    if config.mlp_bias and not family.mlp_bias:
        return "has no mlp_bias; got mlp_bias=True"
    kinds = set(config.sliding_windows)
    sizes = kinds - {None}
    if sizes and family.windows == "none":
        return f"has no sliding_windows; got {config.sliding_windows}"
    if len(kinds if family.windows == "all" else sizes) > 1:
        return f"has one sliding window in {family.windows} of its layers; got {config.sliding_windows}"
    if model_type != "gemma3_text" and (config.local_rope_theta, config.query_pre_attn_scalar) != (None, None):
        given = f"local_rope_theta={config.local_rope_theta}, query_pre_attn_scalar={config.query_pre_attn_scalar}"
        return f"has neither local_rope_theta nor query_pre_attn_scalar; got {given}"
    if model_type == "gemma3_text" and sizes and config.local_rope_theta is None:
        return "has local_rope_theta where layers have windows; got None"
    scalar = config.query_pre_attn_scalar
    if scalar is not None and scalar != int(scalar):
        return f"has a whole number for query_pre_attn_scalar; got {scalar}"
    # transformers checks it of these two.
    if model_type in ("llama", "gemma3_text") and config.hidden_size % config.num_heads:
        return f"has a hidden_size that is a multiple of num_heads; got {config.hidden_size} and {config.num_heads}"
    return None
