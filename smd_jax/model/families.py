"""The model families that the decoder supports, by model type of transformers.

A `Family` lists the keys of config.json and transformers' defaults for absent keys. `smd_jax.model.hf_config` reads and
writes config.json with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smd_jax.config import ModelConfig, YarnRope
from smd_jax.model.mixture import ALPHA
from smd_jax.model.tensor_table import Layout

ModelType = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "smollm3",
    "phi3",
    "granite",
    "ministral",
    "ministral3",
    "arcee",
    "ernie4_5",
    "seed_oss",
    "gemma",
    "gemma2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
]


@dataclass(frozen=True)
class LocalRope:
    """RoPE parameters of the layers with a window, which have no scaling.

    Attributes:
      key: of config.json for the base, outside `rope_parameters`.
      default: of the base; None: the base of the other layers.
    """

    key: str
    default: float | None = None


@dataclass(frozen=True)
class Windows:
    """Which layers of a family may have a sliding window.

    Attributes:
      layers: "all" of them or none; "some": those that `layer_types` names.
      default: window if `sliding_window` is absent; None: no window.
      flag: whether `use_sliding_window` turns windows on.
      pattern: without `layer_types`, every `pattern`-th layer has full attention and the others a window; None: all
        have a window.
      pattern_key: key of config.json for `pattern`.
      first_layer: whether `max_window_layers` is the first layer with a window (Qwen).
      without_rope: whether the layers without RoPE have the windows (SmolLM3).
    """

    layers: Literal["all", "some"]
    default: int | None = 4096
    flag: bool = False
    pattern: int | None = None
    pattern_key: str | None = None
    first_layer: bool = False
    without_rope: bool = False


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of config.json for the experts.

    Attributes:
      count: key of their number, and its default.
      per_token: default of num_experts_per_tok.
      size: key of their width, and its default.
      normalised: default of norm_topk_prob; None: no such key, the gates always sum to one.
      some_layers: whether `decoder_sparse_step` and `mlp_only_layers` may give layers an MLP (Qwen3).
      clamped: whether they have biases and `swiglu_limit` (gpt-oss).
    """

    count: tuple[str, int]
    per_token: int
    size: tuple[str, int]
    normalised: bool | None = None
    some_layers: bool = False
    clamped: bool = False


@dataclass(frozen=True)
class Family:
    """The fixed fields and the config.json keys of a model type of transformers. Defaults are transformers'.

    Attributes:
      architecture: class of transformers.
      sizes: defaults of the sizes.
      always: fields of ModelConfig that every model of the family has.
      biases: boolean fields of ModelConfig, and the key of each.
      flags: defaults of those keys, if not false.
      numbers: numeric fields of ModelConfig: the key and its default.
      windows: which layers may have a sliding window; None: no layer.
      local_rope: RoPE of the layers with a window, if it may differ (Gemma 3, OLMo 3).
      rope_layers: whether config.json may list layers without RoPE (SmolLM3).
      query_beta: whether queries are scaled by their position, under YaRN (Ministral 3).
      partial_rope: whether only a part of the channels may be rotated (Phi).
      experts: None for a family without experts.
      layout: of the tensors in a checkpoint.
      rope: default RoPE parameters.
      rope_theta, norm_eps, tie_embeddings: defaults.
      num_kv_heads: default of num_key_value_heads; None: num_attention_heads.
      null_kv_heads: whether num_key_value_heads = null means num_attention_heads.
      head_dim: default; None: hidden_size / num_attention_heads.
      only: keys of config.json and the values that the decoder supports. The first is written, and is the meaning of an
        absent key and of null.
      whole_heads: whether hidden_size must be a multiple of num_attention_heads.
      own_head_dim: whether head_dim may differ from hidden_size / num_attention_heads.
    """

    architecture: str
    sizes: Mapping[str, int]
    always: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    windows: Windows | None = None
    local_rope: LocalRope | None = None
    rope_layers: bool = False
    query_beta: bool = False
    partial_rope: bool = False
    experts: ExpertKeys | None = None
    layout: Layout = "split"
    rope: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    num_kv_heads: int | None = None
    null_kv_heads: bool = True
    head_dim: int | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: {"hidden_act": ("silu",)})
    whole_heads: bool = False
    own_head_dim: bool = True


def _sizes(vocab: int, hidden: int, mlp: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


ATTENTION_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
ALL_BIASES = {**ATTENTION_BIASES, "mlp_bias": "mlp_bias"}
QWEN_WINDOWS = Windows("some", flag=True, first_layer=True)
GEMMA = {"activation": "gelu_tanh", "norm_plus_one": True, "scale_embeddings": True}
OLMO = {"qk_norm": True, "qk_norm_over": "all", "pre_norms": False, "post_norms": True}
# ModelConfig has None if scores are divided by sqrt(head_dim).
QUERY_SCALAR = {"query_pre_attn_scalar": ("query_pre_attn_scalar", 256.0)}

FAMILIES: dict[ModelType, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _sizes(32_000, 4096, 11_008, 32, 32, 2048),
        biases=ALL_BIASES,
        whole_heads=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _sizes(32_000, 4096, 14_336, 32, 32, 131_072),
        windows=Windows("all"),
        num_kv_heads=8,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _sizes(151_936, 4096, 22_016, 32, 32, 32_768),
        {"qkv_bias": True},
        windows=QWEN_WINDOWS,
        num_kv_heads=32,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _sizes(151_936, 4096, 22_016, 32, 32, 32_768),
        {"qk_norm": True},
        biases=ATTENTION_BIASES,
        windows=QWEN_WINDOWS,
        num_kv_heads=32,
        head_dim=128,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _sizes(262_208, 2304, 9216, 26, 8, 131_072),
        {**GEMMA, "qk_norm": True, "post_norms": True},
        biases=ATTENTION_BIASES,
        numbers=QUERY_SCALAR,
        windows=Windows("some", pattern=6, pattern_key="sliding_window_pattern"),
        local_rope=LocalRope("rope_local_base_freq", 1e4),
        rope_theta=1e6,
        num_kv_heads=4,
        null_kv_heads=False,
        head_dim=256,
        tie_embeddings=True,
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,),
        },
        whole_heads=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _sizes(50_304, 4096, 11_008, 32, 32, 2048),
        OLMO,
        biases=ATTENTION_BIASES,
        norm_eps=1e-5,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _sizes(50_304, 4096, 11_008, 32, 32, 2048),
        OLMO,
        biases=ATTENTION_BIASES,
        windows=Windows("some", pattern=4),
        local_rope=LocalRope("rope_theta"),
        rope_theta=5e5,
        norm_eps=1e-5,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _sizes(128_256, 2048, 11_008, 36, 16, 32_768),
        biases=ALL_BIASES,
        windows=Windows("some", default=None, flag=True, without_rope=True),
        rope_layers=True,
        rope_theta=2e6,
        num_kv_heads=4,
        tie_embeddings=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _sizes(32_064, 3072, 8192, 32, 32, 4096),
        windows=Windows("all", default=None),
        partial_rope=True,
        layout="fused",
        norm_eps=1e-5,
        own_head_dim=False,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        _sizes(32_000, 4096, 11_008, 32, 32, 2048),
        biases=ALL_BIASES,
        numbers={
            "attention_multiplier": ("attention_multiplier", 1.0),
            "embedding_multiplier": ("embedding_multiplier", 1.0),
            "residual_multiplier": ("residual_multiplier", 1.0),
            "logits_divisor": ("logits_scaling", 1.0),
        },
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        _sizes(32_000, 4096, 14_336, 32, 32, 131_072),
        windows=Windows("some"),
        num_kv_heads=8,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        _sizes(131_072, 4096, 14_336, 34, 32, 262_144),
        windows=Windows("all", default=None),
        query_beta=True,
        rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=128,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        _sizes(32_000, 2560, 18_432, 32, 32, 4096),
        {"activation": "relu2", "gated_mlp": False},
        biases=ALL_BIASES,
        norm_eps=1e-5,
        only={"hidden_act": ("relu2",)},
        whole_heads=True,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        _sizes(103_424, 1024, 3072, 18, 16, 131_072),
        {"rope_interleaved": True},
        biases=dict.fromkeys(ALL_BIASES, "use_bias"),
        rope_theta=5e5,
        norm_eps=1e-5,
        num_kv_heads=2,
        head_dim=128,
        tie_embeddings=True,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _sizes(155_136, 4096, 27_648, 64, 80, 524_288),
        biases={**ALL_BIASES, "o_bias": "attention_out_bias"},
        flags={"attention_bias": True},
        num_kv_heads=8,
        head_dim=128,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _sizes(256_000, 3072, 24_576, 28, 16, 8192),
        GEMMA,
        biases=ATTENTION_BIASES,
        num_kv_heads=16,
        null_kv_heads=False,
        head_dim=256,
        tie_embeddings=True,
        # Early files say gelu and mean the tanh approximation.
        only={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False,),
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _sizes(256_000, 2304, 9216, 26, 8, 8192),
        {**GEMMA, "post_norms": True},
        biases=ATTENTION_BIASES,
        numbers={
            **QUERY_SCALAR,
            "attention_softcap": ("attn_logit_softcapping", 50.0),
            "logit_softcap": ("final_logit_softcapping", 30.0),
        },
        windows=Windows("some", pattern=2),
        num_kv_heads=4,
        null_kv_heads=False,
        head_dim=256,
        tie_embeddings=True,
        only={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
        whole_heads=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _sizes(32_000, 4096, 14_336, 32, 32, 131_072),
        windows=Windows("all", default=None),
        experts=ExpertKeys(("num_local_experts", 8), 2, ("intermediate_size", 14_336)),
        layout="mixtral",
        rope_theta=1e6,
        norm_eps=1e-5,
        num_kv_heads=8,
        only={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _sizes(151_936, 2048, 6144, 24, 32, 32_768),
        {"qk_norm": True},
        biases=ATTENTION_BIASES,
        windows=Windows("all", flag=True),
        experts=ExpertKeys(("num_experts", 128), 8, ("moe_intermediate_size", 768), normalised=False, some_layers=True),
        num_kv_heads=4,
        null_kv_heads=False,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _sizes(201_088, 2880, 2880, 36, 64, 131_072),
        {"attention_sinks": True},
        biases=ATTENTION_BIASES,
        flags={"attention_bias": True},
        windows=Windows("some", default=128, pattern=2),
        experts=ExpertKeys(("num_local_experts", 128), 4, ("intermediate_size", 2880), clamped=True),
        layout="gpt_oss",
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rope_theta=150_000.0,
        norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=64,
        only={"hidden_act": ("silu",), "swiglu_alpha": (ALPHA,)},
    ),
}

# Values of the fields in which families differ, for families that do not set them.
NEUTRAL: dict[str, Any] = {
    "qk_norm": False,
    "qk_norm_over": "head",
    "activation": "silu",
    "norm_plus_one": False,
    "pre_norms": True,
    "post_norms": False,
    "scale_embeddings": False,
    "gated_mlp": True,
    "rope_interleaved": False,
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_divisor": 1.0,
    "attention_softcap": None,
    "logit_softcap": None,
    "attention_sinks": False,
    "rope_layers": (),
    "rotary_dim": None,
    "local_rope_theta": None,
}


_SHOWN_FAMILIES = 4


def model_type_of(config: ModelConfig, prefer: str | None = None) -> ModelType:
    """The model type of transformers that fits `config`; of several, `prefer` or the first.

    Raises:
      ValueError: none fits; the message names the closest ones.
    """
    reasons = {model_type: _reasons(config, family) for model_type, family in FAMILIES.items()}
    possible: list[ModelType] = [model_type for model_type in FAMILIES if not reasons[model_type]]
    for model_type in possible:
        if model_type == prefer:
            return model_type
    if possible:
        return possible[0]
    closest = sorted(reasons, key=lambda model_type: len(reasons[model_type]))[:_SHOWN_FAMILIES]
    listed = "; ".join(f"{model_type} {reasons[model_type][0]}" for model_type in closest)
    raise ValueError(f"expected the shape of a model type that is written for transformers; of the closest {listed}")


def _reasons(config: ModelConfig, family: Family) -> list[str]:
    """Why no config.json of this family describes `config`; empty if one does."""
    several = (
        _why_not_biases(config, family),
        _why_not_windows(config, family),
        _why_not_query_beta(config, family),
        _why_not_sizes(config, family),
        _why_not_experts(config, family),
    )
    return [*_differing_fields(config, family), *(reason for reason in several if reason is not None)]


def _differing_fields(config: ModelConfig, family: Family) -> list[str]:
    open_fields = {*family.numbers, *family.biases}
    open_fields |= {"rope_layers"} if family.rope_layers else set()
    open_fields |= {"rotary_dim"} if family.partial_rope else set()
    open_fields |= {"local_rope_theta"} if family.local_rope else set()
    return [
        f"has {name}={expected}; got {name}={getattr(config, name)}"
        for name, expected in {**NEUTRAL, **family.always}.items()
        if name not in open_fields and getattr(config, name) != expected
    ]


def _why_not_biases(config: ModelConfig, family: Family) -> str | None:
    by_key: dict[str, dict[str, bool]] = {}
    for name, key in family.biases.items():
        by_key.setdefault(key, {})[name] = getattr(config, name)
    for key, values in by_key.items():
        if len(set(values.values())) > 1:
            return f"has one {key} for {', '.join(values)}; got {values}"
    return None


def _why_not_windows(config: ModelConfig, family: Family) -> str | None:
    kinds = set(config.sliding_windows)
    sizes = kinds - {None}
    if sizes and family.windows is None:
        return f"has no sliding_windows; got {config.sliding_windows}"
    if family.windows is not None and len(kinds if family.windows.layers == "all" else sizes) > 1:
        return f"has one sliding window in {family.windows.layers} of its layers; got {config.sliding_windows}"
    local = family.local_rope
    if sizes and local and config.local_rope_theta is None and (local.default or config.rope_scaling):
        return "has local_rope_theta where layers have windows; got None"
    return None


def _why_not_query_beta(config: ModelConfig, family: Family) -> str | None:
    beta = config.rope_scaling.query_beta if isinstance(config.rope_scaling, YarnRope) else 0
    if family.query_beta and not beta:
        return f"has YarnRope with query_beta > 0; got {config.rope_scaling}"
    return f"has queries of one scale; got query_beta={beta}" if beta and not family.query_beta else None


def _why_not_sizes(config: ModelConfig, family: Family) -> str | None:
    scalar = config.query_pre_attn_scalar
    if scalar is not None and scalar != int(scalar):
        return f"has a whole number for query_pre_attn_scalar; got {scalar}"
    if "attention_multiplier" in family.numbers and config.attention_multiplier is None:
        return "has an attention_multiplier; got None"
    heads = config.num_heads
    if family.whole_heads and config.hidden_size % heads:
        return f"has a hidden_size that is a multiple of num_heads; got {config.hidden_size} and {heads}"
    if not family.own_head_dim and config.head_dim * heads != config.hidden_size:
        return f"has head_dim = hidden_size / num_heads; got {config.head_dim}, {config.hidden_size} and {heads}"
    return None


def _why_not_experts(config: ModelConfig, family: Family) -> str | None:
    experts, keys = config.experts, family.experts
    if experts is None or keys is None:
        return None if experts is None and keys is None else f"has {'no ' * (keys is None)}experts; got {experts}"
    if keys.clamped != (experts.clamp is not None) or keys.clamped != experts.bias:
        return f"has a clamp and biases of experts: {keys.clamped}; got clamp={experts.clamp}, bias={experts.bias}"
    if keys.normalised is None and not experts.normalised:
        return "has gates that sum to one; got normalised=False"
    if experts.layers and not keys.some_layers:
        return f"has experts in every layer; got {experts.layers}"
    if keys.size[0] == "intermediate_size" and experts.intermediate_size != config.intermediate_size:
        return f"has experts of intermediate_size {config.intermediate_size}; got {experts.intermediate_size}"
    return None
