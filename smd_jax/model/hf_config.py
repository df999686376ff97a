"""Hugging Face's config.json <-> ModelConfig, for the dense families of `FAMILIES`.

What a config.json asks for and the decoder does not do is refused here: a silent difference would show up only as a
worse model. The defaults of absent keys are those of transformers' own configuration classes.
"""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp
from jax.typing import DTypeLike

from smd_jax.config import FloatName, ModelConfig, RopeScaling, YarnRope
from smd_jax.model.families import FAMILIES, SET_BY_FAMILY, Family, ModelType, model_type_of
from smd_jax.model.hf_fields import LARGEST, flag, names, number, shown, whole
from smd_jax.model.hf_rope import LAYER_TYPES, LOCAL_THETA, read_rope, read_two_ropes, rope_to_hf

_FLOAT_NAMES: dict[str, FloatName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
}


_ONLY_SUPPORTED: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
}
FULL, SLIDING = LAYER_TYPES
# transformers' own, of every family that has windows.
_DEFAULT_WINDOW = 4096
_GEMMA_PATTERN = 6  # every sixth layer sees all
_QWEN_WINDOW_LAYERS = 28  # layers from this one on have a window
_MOST_LAYERS = 4096


def float_name(dtype: DTypeLike) -> FloatName:
    """The name of a floating dtype that parameters may have.

    Raises:
      ValueError: another dtype.
    """
    name = jnp.dtype(dtype).name
    if name not in _FLOAT_NAMES:
        raise ValueError(f"parameters must be one of {', '.join(_FLOAT_NAMES)}; got dtype {name}")
    return _FLOAT_NAMES[name]


# Reading


def model_config_from_hf(config: dict[str, Any], dtype: FloatName = "float32") -> ModelConfig:
    """Reads a parsed config.json.

    Args:
      config: the parsed file, of a model_type in `FAMILIES`; rope as transformers 4 (`rope_theta`, `rope_scaling`) or
        transformers 5 (`rope_parameters`) spells it.
      dtype: the compute dtype to put into the result; the file's own says only how the weights are stored.

    Raises:
      ValueError: a value has the wrong type, or asks for something that the decoder does not do; names the key.
    """
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    _refuse_unsupported(config, model_type)
    head_dim = _head_dim(config, family)
    windows = _windows(config, model_type)
    local_theta = None
    if model_type == "gemma3_text":
        rope_theta, rope_scaling, local_theta = read_two_ropes(config)
    else:
        rope_theta, rope_scaling = read_rope(config)
    attention_bias = family.attention_bias and flag(config, "attention_bias", False)
    return ModelConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_num_layers(config),
        num_heads=_size(config, "num_attention_heads"),
        num_kv_heads=_num_kv_heads(config, family),
        head_dim=head_dim,
        max_positions=_max_positions(config, rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        # A Gemma without windows does not use its second base.
        local_rope_theta=local_theta if windows else None,
        norm_eps=number(config, "rms_norm_eps", 1e-6, zero=True),
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and flag(config, "mlp_bias", False),
        query_pre_attn_scalar=_query_scalar(config, head_dim) if model_type == "gemma3_text" else None,
        sliding_windows=windows,
        tie_embeddings=flag(config, "tie_word_embeddings", family.tie_embeddings),
        dtype=dtype,
        **{"qkv_bias": attention_bias, **SET_BY_FAMILY, **family.always},
    )


def _size(config: dict[str, Any], key: str) -> int:
    """A size of the model. Every size is read here, so that its default is the one of the family."""
    return whole(config, key, FAMILIES[_model_type(config)].sizes[key])


def _num_layers(config: dict[str, Any]) -> int:
    layers = _size(config, "num_hidden_layers")
    # Everything that is read has an entry for each layer: refused here, before the tensors can tell.
    if layers > _MOST_LAYERS:
        raise ValueError(f"expected num_hidden_layers as an integer from 1 to {_MOST_LAYERS}; got {layers}")
    return layers


def _num_kv_heads(config: dict[str, Any], family: Family) -> int:
    """transformers has a default for an absent key and, in most families, another meaning of null."""
    key = "num_key_value_heads"
    heads = _size(config, "num_attention_heads")
    if key not in config:
        return heads if family.num_kv_heads is None else family.num_kv_heads
    if config[key] is None and family.null_kv_heads:
        return heads
    return whole(config, key)


def _model_type(config: dict[str, Any]) -> ModelType:
    model_type = config.get("model_type")
    for known in FAMILIES:
        if model_type == known:
            return known
    raise ValueError(f"model_type must be one of {', '.join(FAMILIES)} (dense models of text); got {shown(model_type)}")


def _refuse_unsupported(config: dict[str, Any], model_type: ModelType) -> None:
    family = FAMILIES[model_type]
    supported = {**_ONLY_SUPPORTED, **family.only}
    # Qwen2's biases are fixed, and it does not read the key.
    if not family.attention_bias and model_type != "qwen2":
        supported["attention_bias"] = False
    if not family.mlp_bias:
        supported["mlp_bias"] = False
    for key, value in supported.items():
        got = config.get(key)
        if got is not None and got != value:
            raise ValueError(f"{model_type} with {key}={shown(got)} is not supported; only {key}={value!r} is")


def _head_dim(config: dict[str, Any], family: Family) -> int:
    if "head_dim" in config and (config["head_dim"] is not None or family.head_dim is not None):
        return whole(config, "head_dim")
    if family.head_dim is not None:
        return family.head_dim  # not derived from the hidden size
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, or head_dim given; got {hidden}, {heads}"
        )
    return hidden // heads


def _query_scalar(config: dict[str, Any], head_dim: int) -> float | None:
    """None where it is head_dim, which every other family divides by."""
    scalar = number(config, "query_pre_attn_scalar", 256.0)
    return None if scalar == head_dim else scalar


def _max_positions(config: dict[str, Any], rope_scaling: RopeScaling | None) -> int:
    """The context. Under YaRN it may be longer than the file says: Qwen2.5's cards tell users to add `rope_scaling`
    with factor 4 to a file whose `max_position_embeddings` then stays at the 32,768 of before."""
    given = _size(config, "max_position_embeddings")
    if not isinstance(rope_scaling, YarnRope):
        return given
    # The larger, because a file may give either context, the trained or the stretched one.
    return max(given, min(int(rope_scaling.factor * rope_scaling.original_max_positions), LARGEST))


def _windows(config: dict[str, Any], model_type: ModelType) -> tuple[int | None, ...]:
    """The window of every layer; empty if none has one."""
    layers = _num_layers(config)
    window = _window(config, model_type)
    kinds = names(config, "layer_types") or _layer_types(config, model_type, window)
    possible = (FULL,) if FAMILIES[model_type].windows == "none" else LAYER_TYPES
    unknown = sorted(set(kinds) - set(possible))
    if unknown:
        raise ValueError(f"layer_types of {model_type} must be {' or '.join(possible)}; got {shown(unknown)}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types must name the kind of each of {layers} layers; got {len(kinds)}")
    # transformers' Mistral does not read the key: where it says something else, another model is meant.
    if model_type == "mistral" and kinds != _layer_types(config, model_type, window):
        raise ValueError(
            f"mistral has windows in all layers or in none; got sliding_window={window} and {shown(kinds)}"
        )
    if SLIDING not in kinds:
        return ()
    if window is None:
        raise ValueError(
            f"{model_type} with layers of {SLIDING!r} needs a sliding_window that is in use; got "
            f"sliding_window={shown(config.get('sliding_window'))}, "
            f"use_sliding_window={shown(config.get('use_sliding_window'))}"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _window(config: dict[str, Any], model_type: ModelType) -> int | None:
    """The size of the windows, None if there are none."""
    if FAMILIES[model_type].windows == "none":
        return None
    # Qwen's files give a size also where it is not used.
    if model_type in ("qwen2", "qwen3") and not flag(config, "use_sliding_window", False):
        return None
    # Null turns windows off; an absent key leaves them at the default.
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return whole(config, "sliding_window", _DEFAULT_WINDOW)


def _layer_types(config: dict[str, Any], model_type: ModelType, window: int | None) -> list[str]:
    """The kind of every layer where the file does not name it: older files have a rule for each family."""
    layers = range(_num_layers(config))
    if model_type == "gemma3_text":
        pattern = whole(config, "sliding_window_pattern", _GEMMA_PATTERN)
        return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in layers]
    if window is None:
        return [FULL for _ in layers]
    # All layers of a Mistral; of a Qwen those from a certain one on.
    first = 0 if model_type == "mistral" else whole(config, "max_window_layers", _QWEN_WINDOW_LAYERS, 0)
    return [SLIDING if layer >= first else FULL for layer in layers]


# Writing


def hf_config_from_model(config: ModelConfig, dtype: FloatName, model_type: str | None = None) -> dict[str, Any]:
    """The config.json of `config`, with weights stored as `dtype`, for transformers 4 and 5 alike.

    Args:
      model_type: the one to write where several express `config` (Llama and Mistral do, without windows and biases).

    Raises:
      ValueError: no model type of transformers expresses `config`.
    """
    chosen = model_type_of(config, model_type)
    return {
        "architectures": [FAMILIES[chosen].architecture],
        "model_type": chosen,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        **_family_keys(config, chosen),
        "torch_dtype": dtype,
        "dtype": dtype,
        # Llama's defaults of 1 and 2 would be wrong for most tokenizers: say that we do not know.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _family_keys(config: ModelConfig, model_type: ModelType) -> dict[str, Any]:
    """What every family has keys of its own for: rope, activation, biases, windows."""
    rope = rope_to_hf(config.rope_scaling)
    # transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters` and reads all.
    ropes = {
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }
    biases = {"attention_bias": config.o_bias}
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_layers)]
    window = next((window for window in config.sliding_windows if window is not None), None)
    if model_type == "llama":
        return ropes | {"hidden_act": "silu", **biases, "mlp_bias": config.mlp_bias}
    if model_type == "mistral":
        return ropes | {"hidden_act": "silu", "sliding_window": window}
    if model_type == "gemma3_text":
        local_theta = LOCAL_THETA if config.local_rope_theta is None else config.local_rope_theta
        scalar = config.head_dim if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar
        ropes["rope_parameters"] = {
            "full_attention": ropes["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
        return {
            **ropes,
            **biases,
            "rope_local_base_freq": local_theta,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": int(scalar),
            "sliding_window": _DEFAULT_WINDOW if window is None else window,
            "layer_types": kinds,
        }
    qwen: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": window is not None, "sliding_window": window}
    if model_type == "qwen3":
        qwen |= biases
    if window is None:
        return ropes | qwen
    # Older readers know no `layer_types`, but this: the layers from here on have a window.
    first = kinds.index(SLIDING)
    return ropes | qwen | {"layer_types": kinds, "max_window_layers": first}
