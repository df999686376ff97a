"""The model families that the decoder supports, by model type of transformers.

transformers' configuration classes know the keys of config.json and their defaults. A `Family` adds facts that are only
in the modeling code of transformers. `smd_jax.model.hf_config` reads and writes config.json with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smd_jax.model.mixture import ALPHA
from smd_jax.model.tensor_table import Layout


@dataclass(frozen=True)
class Family:
    """A model type of transformers, beyond the keys of its config.json.

    Attributes:
      architecture: class of transformers.
      always: fields of ModelConfig that every model of the family has.
      biases: boolean fields of ModelConfig, and the key of each.
      windows: which layers may have a sliding window: "all" (all or none) or "some"; None: no layer.
      partial_rope: whether only a part of the channels may be rotated (Phi).
      query_beta: whether queries are scaled by their position, under YaRN (Ministral 3).
      experts: whether layers have experts.
      layout: of the tensors in a checkpoint.
      only: keys of config.json and their supported values. The first value is written; null is allowed.
    """

    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    windows: Literal["all", "some"] | None = None
    partial_rope: bool = False
    query_beta: bool = False
    experts: bool = False
    layout: Layout = "split"
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"hidden_act": ("silu",)})


ATTENTION_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
ALL_BIASES = {**ATTENTION_BIASES, "mlp_bias": "mlp_bias"}
GEMMA = {"activation": "gelu_tanh", "norm_plus_one": True, "scale_embeddings": True}
OLMO = {"qk_norm": True, "qk_norm_over": "all", "pre_norms": False, "post_norms": True}

# By model type.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", biases=ALL_BIASES),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, windows="some"),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, ATTENTION_BIASES, windows="some"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**GEMMA, "qk_norm": True, "post_norms": True},
        ATTENTION_BIASES,
        windows="some",
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),  # transformers does not apply it
            "use_bidirectional_attention": (False,),
        },
    ),
    "olmo2": Family("Olmo2ForCausalLM", OLMO, ATTENTION_BIASES),
    "olmo3": Family("Olmo3ForCausalLM", OLMO, ATTENTION_BIASES, windows="some"),
    "smollm3": Family("SmolLM3ForCausalLM", biases=ALL_BIASES, windows="some"),
    "phi3": Family("Phi3ForCausalLM", windows="all", partial_rope=True, layout="fused"),
    "granite": Family("GraniteForCausalLM", biases=ALL_BIASES),
    "ministral": Family("MinistralForCausalLM", windows="some"),
    "ministral3": Family("Ministral3ForCausalLM", windows="all", query_beta=True),
    "arcee": Family(
        "ArceeForCausalLM",
        {"activation": "relu2", "gated_mlp": False},
        ALL_BIASES,
        only={"hidden_act": ("relu2",)},
    ),
    "ernie4_5": Family("Ernie4_5ForCausalLM", {"rope_interleaved": True}, dict.fromkeys(ALL_BIASES, "use_bias")),
    "seed_oss": Family("SeedOssForCausalLM", biases={**ALL_BIASES, "o_bias": "attention_out_bias"}),
    "gemma": Family(
        "GemmaForCausalLM",
        GEMMA,
        ATTENTION_BIASES,
        # Early files say gelu and mean the tanh approximation.
        only={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False,),
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**GEMMA, "post_norms": True},
        ATTENTION_BIASES,
        windows="some",
        only={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        windows="all",
        experts=True,
        layout="mixtral",
        only={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"qk_norm": True}, ATTENTION_BIASES, windows="all", experts=True),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"attention_sinks": True},
        ATTENTION_BIASES,
        windows="some",
        experts=True,
        layout="gpt_oss",
        only={"hidden_act": ("silu",), "swiglu_alpha": (ALPHA,)},
    ),
}
