"""Hugging Face's config.json <-> ModelConfig, for the Llama 2/3, Qwen2/2.5 and Qwen3 dense families.

What a config.json asks for and the decoder does not do is refused here: a silent difference would show up only as a
worse model. The defaults of absent keys are those of transformers' own configuration classes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from jax import numpy as jnp
from jax.typing import DTypeLike

from smd_jax.config import FloatName, LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope

ModelType = Literal["llama", "qwen2", "qwen3"]

_FLOAT_NAMES: dict[str, FloatName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
}
_ARCHITECTURES: dict[ModelType, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# The one value that the decoder can do; absent and null mean the same to transformers.
_ONLY_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
}
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def float_name(dtype: DTypeLike) -> FloatName:
    """The name of a floating dtype that parameters may have.

    Raises:
      ValueError: another dtype.
    """
    name = jnp.dtype(dtype).name
    if name not in _FLOAT_NAMES:
        raise ValueError(f"parameters must be one of {', '.join(_FLOAT_NAMES)}; got dtype {name}")
    return _FLOAT_NAMES[name]


def model_config_from_hf(config: dict[str, Any], dtype: FloatName = "float32") -> ModelConfig:
    """Reads a parsed config.json.

    Args:
      config: the parsed file, of model_type llama, qwen2 or qwen3; rope as transformers 4 (`rope_theta`,
        `rope_scaling`) or transformers 5 (`rope_parameters`) spells it.
      dtype: the compute dtype to put into the result; the file's own says only how the weights are stored.

    Raises:
      ValueError: a key is missing, or asks for something that the decoder does not do.
    """
    model_type = _model_type(config)
    _refuse_unsupported(config, model_type)
    num_heads = _required(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads")
    rope_theta, rope_scaling = _rope(config)
    return ModelConfig(
        vocab_size=_required(config, "vocab_size"),
        hidden_size=_required(config, "hidden_size"),
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=num_heads,
        # Absent or null: every query head has a KV head of its own.
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=_head_dim(config, model_type),
        max_positions=_max_positions(config, rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tie_embeddings=config.get("tie_word_embeddings", False),
        dtype=dtype,
    )


def model_type_of(config: ModelConfig) -> ModelType:
    """The transformers model type that expresses `config`.

    Raises:
      ValueError: none does.
    """
    if config.sliding_windows:
        raise ValueError(
            f"expected a model without sliding windows, which is all that config.json is written for here; got "
            f"sliding_windows={config.sliding_windows}"
        )
    if config.qkv_bias and config.qk_norm:
        raise ValueError(
            "no Hugging Face model type of Llama, Qwen2 and Qwen3 has both q/k/v biases and q/k norms; "
            "expected qkv_bias or qk_norm or neither, got both"
        )
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    if config.hidden_size % config.num_heads:
        raise ValueError(
            "transformers expects a Llama's hidden_size to be a multiple of num_heads; "
            f"got {config.hidden_size} and {config.num_heads}"
        )
    return "llama"


def hf_config_from_model(config: ModelConfig, dtype: FloatName) -> dict[str, Any]:
    """The config.json of `config`, with weights stored as `dtype`, for transformers 4 and 5 alike.

    Raises:
      ValueError: no model type of transformers expresses `config`.
    """
    model_type = model_type_of(config)
    rope = _rope_to_hf(config.rope_scaling)
    family: dict[str, Any] = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen2": {"use_sliding_window": False, "sliding_window": None},
        "qwen3": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    }[model_type]
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # transformers 4 reads the first two, transformers 5 writes the third and reads all.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
        # Llama's defaults of 1 and 2 would be wrong for most tokenizers: say that we do not know.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **family,
    }


def _model_type(config: dict[str, Any]) -> ModelType:
    model_type = config.get("model_type")
    for known in _ARCHITECTURES:
        if model_type == known:
            return known
    raise ValueError(f"model_type must be one of {', '.join(_ARCHITECTURES)} (dense models); got {model_type!r}")


def _refuse_unsupported(config: dict[str, Any], model_type: ModelType) -> None:
    supported = dict(_ONLY_SUPPORTED)
    if model_type != "qwen2":  # Qwen2's q/k/v biases are fixed; in the others this key also gives o_proj a bias.
        supported["attention_bias"] = False
    for key, value in supported.items():
        got = config.get(key)
        if got is not None and got != value:
            raise ValueError(f"{model_type} with {key}={got!r} is not supported; only {key}={value!r} is")
    # Newer files name the kind of every layer; absent, all are full attention.
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"layer_types must all be 'full_attention'; got {sorted(layer_types)}")


def _required(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ValueError(f"config.json must give {key} as an integer; got {value!r}")
    return value


def _head_dim(config: dict[str, Any], model_type: ModelType) -> int:
    if config.get("head_dim") is not None:
        return _required(config, "head_dim")
    if model_type == "qwen3":
        return 128  # Qwen3Config's default, whatever the hidden size
    hidden = _required(config, "hidden_size")
    heads = _required(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, or head_dim given; got {hidden}, {heads}"
        )
    return hidden // heads


def _max_positions(config: dict[str, Any], rope_scaling: RopeScaling | None) -> int:
    """The context. Under YaRN it may be longer than the file says: Qwen2.5's cards tell users to add `rope_scaling`
    with factor 4 to a file whose `max_position_embeddings` then stays at the 32,768 of before."""
    given = _required(config, "max_position_embeddings")
    if not isinstance(rope_scaling, YarnRope):
        return given
    # The larger, because a file may give either context, the trained or the stretched one.
    return max(given, int(rope_scaling.factor * rope_scaling.original_max_positions))


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base of the frequencies and their scaling. As in transformers 5, `rope_scaling` comes before
    `rope_parameters`."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    # Older files say `type` where newer ones say `rope_type`.
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    partial = rope.pop("partial_rotary_factor", None)
    if rope_type not in _ROPE_KEYS:
        raise ValueError(f"rope type must be one of {', '.join(_ROPE_KEYS)}; got {rope_type!r}")
    if partial is not None and partial != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0 or absent; got {partial!r}")
    unknown = sorted(set(rope) - set(_ROPE_KEYS[rope_type]))
    if unknown:
        known = ", ".join(_ROPE_KEYS[rope_type]) or "no further keys"
        raise ValueError(f"rope type {rope_type!r} takes {known}; got also {', '.join(unknown)}")
    return float(theta), _rope_scaling(rope_type, rope, config)


def _rope_scaling(rope_type: str, rope: dict[str, Any], config: dict[str, Any]) -> RopeScaling | None:
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearRope(factor=_rope_number(rope, "factor", rope_type))
    # A length outside the dictionary wins, and the context length stands in for an absent one, as in transformers.
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = int(original or _required(config, "max_position_embeddings"))
    if rope_type == "llama3":
        return Llama3Rope(
            factor=_rope_number(rope, "factor", rope_type),
            low_freq_factor=_rope_number(rope, "low_freq_factor", rope_type),
            high_freq_factor=_rope_number(rope, "high_freq_factor", rope_type),
            original_max_positions=original,
        )
    if rope.get("truncate") is False:
        raise ValueError("yarn with truncate=False is not supported; only truncate=True is")
    # An absent factor is the ratio of the two contexts.
    factor = float(rope.get("factor") or _required(config, "max_position_embeddings") / original)
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _rope_number(rope: dict[str, Any], key: str, rope_type: str) -> float:
    value = rope.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"rope type {rope_type!r} needs a number {key}; got {value!r}")
    return float(value)


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float | None:
    """Explicit, or from DeepSeek's two mscales, or None where the default `0.1 ln(factor) + 1` holds."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    # Nothing is stretched, so scores keep their size.
    if factor <= 1:
        return 1.0
    mscale = rope.get("mscale")
    mscale_all_dim = rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return None


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearRope():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Rope():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnRope():
            yarn = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            given = scaling.attention_factor is not None
            return {**yarn, "attention_factor": scaling.attention_factor} if given else yarn
