"""Hugging Face's config.json <-> ModelConfig, for the families of `FAMILIES`.

What a config.json asks for and the decoder does not do is refused here: a silent difference would show up only as a
worse model. The defaults of absent keys are those of transformers' own configuration classes.
"""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp
from jax.typing import DTypeLike

from smd_jax.config import FloatName, LongRope, ModelConfig, RopeScaling, YarnRope
from smd_jax.model.families import FAMILIES, Family, ModelType, model_type_of
from smd_jax.model.hf_experts import EXPERT_KEYS, experts_to_hf, read_experts
from smd_jax.model.hf_fields import LARGEST, flag, number, shown, whole
from smd_jax.model.hf_rope import read_rope, rope_to_hf, stretched_positions
from smd_jax.model.hf_windows import read_windows, windows_to_hf

_FLOAT_NAMES: dict[str, FloatName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
}


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
      dtype: compute dtype of the result; the file's dtype is that of the stored weights.

    Raises:
      ValueError: a value has the wrong type or is not supported; names the key.
    """
    family = FAMILIES[_model_type(config)]
    _refuse_unsupported(config, family)
    head_dim = _head_dim(config, family)
    rope_layers = _rope_layers(config, family)
    windows = read_windows(config, family, _num_layers(config), rope_layers)
    rope = read_rope(config, family)
    if rope.rotated != 1 and not family.partial_rope:
        raise ValueError(
            f"{config['model_type']} with partial_rotary_factor={rope.rotated} is not supported; only "
            "partial_rotary_factor=1.0 is"
        )
    rotated = int(head_dim * rope.rotated)
    biases = {name: flag(config, key, family.flags.get(key, False)) for name, key in family.biases.items()}
    return ModelConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_num_layers(config),
        num_heads=_size(config, "num_attention_heads"),
        num_kv_heads=_num_kv_heads(config, family),
        head_dim=head_dim,
        max_positions=_max_positions(config, rope.scaling),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        # Gemma uses the second base only in layers with a window.
        local_rope_theta=rope.local_theta if windows else None,
        rope_layers=rope_layers,
        rotary_dim=None if rotated == head_dim else rotated,
        norm_eps=number(config, "rms_norm_eps", family.norm_eps, zero=True),
        sliding_windows=windows,
        tie_embeddings=flag(config, "tie_word_embeddings", family.tie_embeddings),
        dtype=dtype,
        experts=None if family.experts is None else read_experts(config, family.experts, _num_layers(config)),
        **{**family.always, **biases, **_numbers(config, family, head_dim)},
    )


def _size(config: dict[str, Any], key: str) -> int:
    """A size of the model, by default the family's."""
    return whole(config, key, FAMILIES[_model_type(config)].sizes[key])


def _num_layers(config: dict[str, Any]) -> int:
    layers = _size(config, "num_hidden_layers")
    # The fields below have an entry per layer, so a huge number is rejected first.
    if layers > _MOST_LAYERS:
        raise ValueError(f"expected num_hidden_layers as an integer from 1 to {_MOST_LAYERS}; got {layers}")
    return layers


def _num_kv_heads(config: dict[str, Any], family: Family) -> int:
    """An absent key and null differ: the family's default, and in most families num_attention_heads."""
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
    raise ValueError(f"model_type must be one of {', '.join(FAMILIES)} (models of text); got {shown(model_type)}")


def _refuse_quantised(config: dict[str, Any], family: Family) -> None:
    """Raises ValueError for quantised weights, except gpt-oss' own, see `smd_jax.model.mxfp4`."""
    given = config.get("quantization_config")
    own = family.layout == "gpt_oss"
    if given is None or (own and isinstance(given, dict) and given.get("quant_method") == "mxfp4"):
        return
    only = "quant_method 'mxfp4' or none" if own else "quantization_config=None"
    raise ValueError(f"{config['model_type']} with quantization_config={shown(given)} is not supported; only {only} is")


def _refuse_unsupported(config: dict[str, Any], family: Family) -> None:
    _refuse_quantised(config, family)
    supported: dict[str, tuple[Any, ...]] = {**family.only}
    if family.experts is None:
        supported |= dict.fromkeys(EXPERT_KEYS, (None,))
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 has fixed biases and does not read the key.
        if key not in family.biases.values() and "qkv_bias" not in family.always:
            supported[key] = (False,)
    if not family.partial_rope:
        supported["partial_rotary_factor"] = (1.0,)
    for key, values in supported.items():
        got = config.get(key)
        if got is not None and not any(got == value and type(got) is not bool or got is value for value in values):
            only = " or ".join(f"{key}={value!r}" for value in values)
            raise ValueError(f"{config['model_type']} with {key}={shown(got)} is not supported; only {only} is")


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


def _numbers(config: dict[str, Any], family: Family, head_dim: int) -> dict[str, float | None]:
    """The fields of `family.numbers`."""
    found = {name: _number(config, name, *key) for name, key in family.numbers.items()}
    # ModelConfig has None if scores are divided by sqrt(head_dim).
    return {name: None if name == "query_pre_attn_scalar" and x == head_dim else x for name, x in found.items()}


def _number(config: dict[str, Any], name: str, key: str, default: float | None) -> float | None:
    # Null turns a soft cap off, and is invalid for a multiplier.
    off = name.endswith("softcap") and key in config and config[key] is None
    return None if off else number(config, key, default)


def _rope_layers(config: dict[str, Any], family: Family) -> tuple[bool, ...]:
    """Whether each layer has RoPE; empty if all have."""
    if not family.rope_layers:
        return ()
    layers = _num_layers(config)
    given = config.get("no_rope_layers")
    if given is None:
        interval = whole(config, "no_rope_layer_interval", 4)
        given = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(given, list) or not all(type(has) is int and has in (0, 1) for has in given):
        raise ValueError(f"expected no_rope_layers as a list of 0 (no RoPE) and 1, or null; got {shown(given)}")
    if len(given) != layers:
        raise ValueError(f"expected no_rope_layers for each of {layers} layers; got {len(given)}")
    return () if all(given) else tuple(map(bool, given))


def _max_positions(config: dict[str, Any], rope_scaling: RopeScaling | None) -> int:
    """The context length. Under YaRN it may exceed `max_position_embeddings`: Qwen2.5's cards tell users to add
    `rope_scaling` with factor 4 and leave `max_position_embeddings` at 32,768. Under LongRoPE it is the original
    context, for which transformers uses the short factors."""
    given = _size(config, "max_position_embeddings")
    if isinstance(rope_scaling, LongRope):
        return min(given, rope_scaling.original_max_positions)
    if not isinstance(rope_scaling, YarnRope):
        return given
    # The larger of both, because a file may have the original or the extended length.
    return max(given, min(int(rope_scaling.factor * rope_scaling.original_max_positions), LARGEST))


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
        "max_position_embeddings": _written_positions(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        **_rope_keys(config, FAMILIES[chosen]),
        **_family_keys(config, FAMILIES[chosen]),
        "torch_dtype": dtype,
        "dtype": dtype,
        # None, because Llama's defaults of 1 and 2 would be wrong for most tokenizers.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _written_positions(config: ModelConfig) -> int:
    if isinstance(config.rope_scaling, LongRope):
        return max(config.max_positions, stretched_positions(config.rope_scaling))
    return config.max_positions


def _rope_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    """RoPE's keys: transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters` and
    reads all."""
    rope = rope_to_hf(config.rope_scaling)
    new = {**rope, "rope_theta": config.rope_theta}
    keys: dict[str, Any] = {"rope_scaling": None if config.rope_scaling is None else rope}
    if config.rotary_dim is not None:
        share = config.rotary_dim / config.head_dim
        if int(config.head_dim * share) != config.rotary_dim:
            # transformers takes the whole part of the product, which rounding may have made one less.
            share = (config.rotary_dim + 0.5) / config.head_dim
        keys["partial_rotary_factor"] = new["partial_rotary_factor"] = share
    if isinstance(config.rope_scaling, LongRope):
        keys["original_max_position_embeddings"] = config.rope_scaling.original_max_positions
    if family.local_rope is None:
        return {**keys, "rope_parameters": new}
    default = config.rope_theta if family.local_rope.default is None else family.local_rope.default
    theta = default if config.local_rope_theta is None else config.local_rope_theta
    near = {"rope_type": "default", "rope_theta": theta}
    if family.local_rope.key != "rope_theta":
        keys[family.local_rope.key] = theta
    return {**keys, "rope_parameters": {"full_attention": new, "sliding_attention": near}}


def _family_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that not every family has: activation, biases, multipliers, layers without RoPE, windows."""
    keys: dict[str, Any] = {key: values[0] for key, values in family.only.items() if values[0] not in (None, False)}
    keys |= {key: getattr(config, name) for name, key in family.biases.items()}
    for name, (key, _) in family.numbers.items():
        value = getattr(config, name)
        if name == "query_pre_attn_scalar":
            value = int(config.head_dim if value is None else value)
        keys[key] = value
    if family.rope_layers:
        keys["no_rope_layers"] = [int(config.has_rope(layer)) for layer in range(config.num_layers)]
    return keys | windows_to_hf(config, family) | experts_to_hf(config, family)
