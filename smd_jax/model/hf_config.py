"""Hugging Face's config.json <-> ModelConfig, for the families of `FAMILIES`.

transformers' configuration class of a model type reads every spelling of its keys, fills in defaults and checks types.
Unsupported settings are refused here: a silent difference would only show as a worse model. A configuration is written
as the first model type whose config.json reads back as the same.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, get_args

from jax import numpy as jnp
from jax.typing import DTypeLike

from smd_jax.config import (
    DynamicRope,
    Experts,
    FloatName,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    check_choice,
    check_instance,
)
from smd_jax.model.families import FAMILIES, Family
from smd_jax.model.stored_tensors import shown

FULL, SLIDING = "full_attention", "sliding_attention"
LARGEST = 2**31 - 1  # a larger size does not fit the int32 indices and positions of the decoder
_MOST_LAYERS = 4096

# Fields of ModelConfig and their keys. Not every family has those of the second table.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_SCALES = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attention_multiplier": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_EXPERT_COUNT = ("num_experts", "num_local_experts")  # transformers 4 has one in each family, 5 reads both
_QUERY_BETA = "llama_4_scaling_beta"
_ROPES: dict[str, type[RopeScaling]] = {
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}
# Names of their fields that are not the keys of transformers.
_ROPE_KEYS = {"original_max_positions": "original_max_position_embeddings", "query_beta": _QUERY_BETA}
# Keys that every kind may have. Sections of multimodal models do not change positions of text.
_ROPE_ANYWHERE = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("mrope_section", "mrope_interleaved"),
}
_ROPE_EXTRA = {"yarn": {"mscale", "mscale_all_dim", "finetuned"}}  # the last is a note in early files
# `type` and `rope_type` of published files: Qwen2-VL, and Phi-3, whose class renames both.
_OTHER_TYPES = {("mrope", "default"), ("su", "longrope"), ("yarn", "longrope")}
# Keys that are read elsewhere or not at all; transformers would check their values against torch or the vocabulary.
_NOT_PARSED = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")


def float_name(dtype: DTypeLike) -> FloatName:
    """The name of a floating dtype that parameters may have.

    Raises:
      ValueError: another dtype.
    """
    name: Any = jnp.dtype(dtype).name
    check_choice("the dtype of parameters", name, get_args(FloatName))
    return name


# Reading


def model_config_from_hf(config: Mapping[str, Any], dtype: FloatName = "float32") -> ModelConfig:
    """Reads a parsed config.json.

    Args:
      config: the parsed file, of a model_type in `FAMILIES`.
      dtype: compute dtype of the result; the file's dtype is that of the stored weights.

    Raises:
      ValueError: a value has the wrong type or is not supported; names the key.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = ". docs/models.md says how to save its text model" if "text_config" in config else ""
        raise ValueError(
            f"expected model_type of {', '.join(FAMILIES)} (models of text); got {shown(model_type)}{hint}"
        )
    _refuse_unsupported(config, FAMILIES[model_type])
    try:
        return _read(_parsed(config), config, FAMILIES[model_type], dtype)
    except (TypeError, LookupError, ArithmeticError) as error:  # of the checks of transformers and of ModelConfig
        raise ValueError(f"expected a config.json of {model_type}; got one with {error!s:.300}") from error


def _parsed(content: Mapping[str, Any]) -> Any:
    """The configuration object of transformers, whose checks may raise ValueError, TypeError and LookupError."""
    # Imported here, because it takes seconds.
    from smd_jax.text.hugging_face import CONFIG_MAPPING, StrictDataclassError, errors_only

    # A copy, because transformers changes its argument.
    fields = copy.deepcopy({key: value for key, value in content.items() if key not in _NOT_PARSED})
    fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    original = fields.get("original_max_position_embeddings")
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.get(key)
        # transformers ignores the outer key in families whose parameters are nested by kind of layer.
        if isinstance(rope, dict) and original is not None and not _has_nested_rope(fields["model_type"]):
            rope["original_max_position_embeddings"] = original
    _keep_rope_theta(fields)
    try:
        with errors_only():
            return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())[:400]) from error


def _keep_rope_theta(fields: dict[str, Any]) -> None:
    """Copies RoPE's base to a `rope_scaling` that a user added to a file of transformers 5.

    transformers reads `rope_scaling` in place of `rope_parameters`, and would take the default base.
    """
    added, given = fields.get("rope_scaling"), fields.get("rope_parameters")
    if isinstance(added, dict) and added and isinstance(given, dict):
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in given and fields.get(key) is None:
                added.setdefault(key, given[key])


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    supported: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None,), **family.only}
    if not family.experts:
        supported |= dict.fromkeys(_EXPERT_COUNT, (None, 0))
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 has fixed biases and does not read the key.
        if key not in family.biases.values() and "qkv_bias" not in family.always:
            supported[key] = (False,)
    for key, values in supported.items():
        got = config.get(key)
        if got is not None and not any(got == value and type(got) is not bool or got is value for value in values):
            only = " or ".join(f"{key}={value!r}" for value in values)
            raise ValueError(f"{config['model_type']} with {key}={shown(got)} is not supported; only {only} is")
    given = config.get("quantization_config")
    own = family.layout == "gpt_oss"  # `smd_jax.model.stored_tensors`
    if given is not None and not (own and isinstance(given, dict) and given.get("quant_method") == "mxfp4"):
        only = "quant_method 'mxfp4' or none" if own else "quantization_config=None"
        raise ValueError(
            f"{config['model_type']} with quantization_config={shown(given)} is not supported; only {only} is"
        )


def _read(hf: Any, content: Mapping[str, Any], family: Family, dtype: FloatName) -> ModelConfig:
    """`hf` is the configuration object of transformers, `content` the file."""
    # The fields below have an entry per layer, so a huge number is rejected first.
    if not 0 < hf.num_hidden_layers <= _MOST_LAYERS:
        raise ValueError(f"expected num_hidden_layers from 1 to {_MOST_LAYERS}; got {hf.num_hidden_layers}")
    if not hf.num_attention_heads:
        raise ValueError("expected num_attention_heads >= 1; got 0")
    for key in (*_SIZES.values(), "head_dim", "max_position_embeddings"):
        if type(size := getattr(hf, key, None)) is int and size > LARGEST:
            raise ValueError(f"expected {key} of at most {LARGEST}; got {shown(size)}")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    # transformers keeps keys that its class does not have, and its models do not read them.
    known = _defaults(hf.model_type)
    keys = {**_SIZES, **_SCALES, **family.biases}
    fields = {name: getattr(hf, key) for name, key in keys.items() if key in known}
    fields = {name: float(x) if name in _SCALES and type(x) is int else x for name, x in fields.items()}
    if fields.get("query_pre_attn_scalar") == head_dim:
        fields["query_pre_attn_scalar"] = None  # scores are divided by sqrt(head_dim)
    windows = _read_windows(hf, content, family)
    rope = _read_rope(hf, family, head_dim)
    if not windows:
        rope["local_rope_theta"] = None  # only used in layers with a window
    scaling, max_positions = rope["rope_scaling"], hf.max_position_embeddings
    if isinstance(scaling, LongRope):
        # The original context, for which transformers uses the short factors.
        max_positions = min(max_positions, scaling.original_max_positions)
    elif isinstance(scaling, YarnRope):
        # The larger of both, because a file may have the original or the extended length: Qwen2.5's cards tell users to
        # add `rope_scaling` with factor 4 and leave `max_position_embeddings` at 32,768.
        max_positions = max(max_positions, min(int(scaling.factor * scaling.original_max_positions), LARGEST))
    rope_layers = tuple(map(bool, hf.no_rope_layers)) if "no_rope_layers" in known else ()
    return ModelConfig(
        **{**fields, **rope, **family.always},
        head_dim=head_dim,
        max_positions=max_positions,
        rope_layers=() if all(rope_layers) else rope_layers,
        sliding_windows=windows,
        dtype=dtype,
        experts=_read_experts(hf, family) if family.experts else None,
    )


def _read_rope(hf: Any, family: Family, head_dim: int) -> dict[str, Any]:
    """RoPE's fields of ModelConfig."""
    by_kind = hf.rope_parameters if _has_nested_rope(hf.model_type) else None
    rope = hf.rope_parameters if by_kind is None else by_kind[FULL]
    own = {_QUERY_BETA, "max_position_embeddings"} if family.query_beta else set[str]()
    for each in [rope] if by_kind is None else [rope, by_kind[SLIDING]]:
        _check_rope_keys(each, own)
    if by_kind is not None:
        # transformers ignores keys next to the two kinds of layers; these say the same as the kinds.
        same = {"rope_type": "default", "type": "default", "rope_theta": rope["rope_theta"]}
        beside = {key: x for key, x in by_kind.items() if key not in (FULL, SLIDING) and x not in (None, same.get(key))}
        if beside:
            raise ValueError(
                f"expected rope_parameters of {hf.model_type} as {{{FULL!r}: ..., {SLIDING!r}: ...}}; got "
                f"{shown(beside)} outside of both"
            )
    if not family.query_beta:
        rope = {key: value for key, value in rope.items() if key != _QUERY_BETA}  # transformers ignores it
    elif not rope.get(_QUERY_BETA):
        raise ValueError(f"expected {_QUERY_BETA} > 0 in rope_parameters of {hf.model_type}; got {shown(rope)}")
    theta, scaling = _read_theta(rope), _read_scaling(rope, hf.max_position_embeddings)
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1 and not family.partial_rope:
        raise ValueError(f"{hf.model_type} with partial_rotary_factor={share} is not supported; only 1.0 is")
    if family.query_beta and not isinstance(scaling, YarnRope):
        raise ValueError(f"expected rope_type 'yarn' in rope_parameters of {hf.model_type}; got {shown(rope)}")
    local_theta = None
    if by_kind is not None:
        if _read_scaling(by_kind[SLIDING], hf.max_position_embeddings) is not None:
            raise ValueError(f"expected plain RoPE in layers with a sliding window; got {shown(by_kind[SLIDING])}")
        local = _read_theta(by_kind[SLIDING])
        local_theta = None if scaling is None and local == theta else local
    rotated = int(head_dim * share)
    rotary_dim = None if rotated == head_dim else rotated
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local_theta, "rotary_dim": rotary_dim}


def _check_rope_keys(rope: Mapping[str, Any], own: Set[str]) -> None:
    """Raises ValueError for keys that transformers drops: a mistyped or foreign key is another model elsewhere.

    Args:
      own: keys that only the family has.
    """
    kind, old = rope.get("rope_type", "default"), rope.get("type")
    if old not in (None, kind) and (old, kind) not in _OTHER_TYPES:
        raise ValueError(f"expected rope_type and type to be the same; got {shown(kind)} and {shown(old)}")
    if kind not in _ROPES and kind != "default":
        return  # refused by `_read_scaling`
    fields = {_key(field) for field in dataclasses.fields(_ROPES[kind])} if kind in _ROPES else set[str]()
    known = _ROPE_ANYWHERE | _ROPE_EXTRA.get(kind, set()) | fields | own
    neutral = {"factor": 1, "attn_factor": 1, "extrapolation_factor": 1}  # these values change nothing
    unknown = {key: x for key, x in rope.items() if key not in known and x is not None and x != neutral.get(key)}
    if not unknown:
        return
    hint = ""
    if "attn_factor" in unknown:
        hint = ". transformers ignores attn_factor. To keep its model write 0.1 ln(factor) + 1 as attention_factor, or "
        hint += "this times attn_factor"
    elif kind == "default":
        hint = f". A scaling has a rope_type: {', '.join(_ROPES)}"
    names = ", ".join(sorted(fields | _ROPE_EXTRA.get(kind, set()))) or "no keys of a scaling"
    raise ValueError(f"expected {names} for rope_type {kind!r}; got {shown(unknown)}{hint}")


def _read_theta(rope: Mapping[str, Any]) -> float:
    theta = rope["rope_theta"]
    if type(theta) not in (int, float):
        raise ValueError(f"expected rope_theta as a number; got {shown(theta)}")
    return float(theta)


def _read_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    """The scaling in `rope_parameters`; None for plain RoPE."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind not in _ROPES:
        raise ValueError(f"expected rope_type of default, {', '.join(_ROPES)}; got {kind!r}")
    given = {field.name: rope.get(_key(field)) for field in dataclasses.fields(_ROPES[kind])}
    fields = {name: _of_json(value) for name, value in given.items() if value is not None}
    if "original_max_positions" in fields:
        fields["original_max_positions"] = int(fields["original_max_positions"])
    if kind == "yarn":
        fields.setdefault("original_max_positions", max_positions)
        fields["truncate"] = bool(rope.get("truncate", True))  # null: false, as in transformers
    if kind in ("yarn", "longrope"):
        fields.setdefault("factor", max_positions / fields["original_max_positions"])
    if kind == "yarn" and fields["factor"] > 1 and rope.get("mscale") and rope.get("mscale_all_dim"):
        # DeepSeek's two mscales, instead of the factor.
        above, below = (0.1 * rope[key] * math.log(fields["factor"]) + 1 for key in ("mscale", "mscale_all_dim"))
        fields.setdefault("attention_factor", above / below)
    return _ROPES[kind](**fields)


def _of_json(value: Any) -> Any:
    """Lists as tuples, and whole numbers as floats."""
    if isinstance(value, list):
        return tuple(map(_of_json, value))
    return float(value) if type(value) is int else value


def _key(field: dataclasses.Field[Any]) -> str:
    return _ROPE_KEYS.get(field.name, field.name)


def _read_windows(hf: Any, content: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    """The window of each layer; empty if none has one."""
    window = getattr(hf, "sliding_window", None) if family.windows else None
    kinds = [FULL if window is None else SLIDING] * hf.num_hidden_layers
    if family.windows == "some":
        kinds = hf.layer_types
    elif content.get("layer_types") not in (None, kinds):
        # transformers ignores the key in these families.
        raise ValueError(f"{hf.model_type} has {kinds[0]} in all layers; got {shown(content['layer_types'])}")
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"{hf.model_type} with layers of {SLIDING!r} needs a sliding_window that is in use; got "
            f"sliding_window={shown(content.get('sliding_window'))}, "
            f"use_sliding_window={shown(content.get('use_sliding_window'))}"
        )
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(f"expected layer_types of {hf.model_type} of {FULL}, {SLIDING}; got {shown(sorted(unknown))}")
    return tuple(window if kind == SLIDING else None for kind in kinds) if SLIDING in kinds else ()


def _read_experts(hf: Any, family: Family) -> Experts:
    known = {key: getattr(hf, key) for key in _defaults(hf.model_type)}
    step, dense = known.get("decoder_sparse_step", 1), known.get("mlp_only_layers") or []
    layers = tuple((layer + 1) % step == 0 and layer not in dense for layer in range(hf.num_hidden_layers))
    clamp = hf.swiglu_limit if family.layout == "gpt_oss" else None
    return Experts(
        count=hf.num_local_experts,
        per_token=hf.num_experts_per_tok,
        intermediate_size=known.get("moe_intermediate_size", hf.intermediate_size),
        layers=() if all(layers) else layers,
        normalised=known.get("norm_topk_prob", True),
        bias=clamp is not None,
        clamp=clamp,
        balance_coef=hf.router_aux_loss_coef,
    )


# Writing


def hf_config_from_model(config: ModelConfig, dtype: FloatName, model_type: str | None = None) -> dict[str, Any]:
    """The config.json of `config`, with weights stored as `dtype`, for transformers 4 and 5 alike.

    Args:
      model_type: preferred if several express `config` (as Llama and Mistral do, without windows and biases).

    Raises:
      TypeError: for a config of another class, such as ModelShape.
      ValueError: no model type of transformers expresses `config`.
    """
    check_instance("config", config, ModelConfig)
    chosen = model_type_of(config, model_type)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # Llama's defaults fit few tokenizers
    return _written(config, chosen) | {"torch_dtype": dtype, "dtype": dtype, **ids}


@functools.cache
def model_type_of(config: ModelConfig, prefer: str | None = None) -> str:
    """The model type of transformers that fits `config`; of several, `prefer` or the first.

    Raises:
      ValueError: none fits; the message names the closest ones.
    """
    reasons: dict[str, list[str]] = {}
    for model_type in sorted(FAMILIES, key=lambda name: name != prefer):
        if all(getattr(config, name) == value for name, value in FAMILIES[model_type].always.items()):
            reasons[model_type] = _differences(config, model_type)
            if not reasons[model_type]:
                return model_type
    closest = sorted(reasons, key=lambda name: len(reasons[name]))[:4]
    listed = "; ".join(f"{name} has {', '.join(reasons[name])}" for name in closest)
    raise ValueError(f"expected a configuration that a model type of transformers expresses; of the closest {listed}")


def _differences(config: ModelConfig, model_type: str) -> list[str]:
    """Differences of `config` after it is written as this type and read again."""
    try:
        again = model_config_from_hf(_written(config, model_type), config.dtype)
    except ValueError as error:
        return [f"no such config.json: {error!s:.120}"]
    again = replace(again, max_positions=config.max_positions)  # YaRN's is extended when it is read
    # The same model, with defaults instead of lists and sizes that say the same.
    experts, scalar = config.experts, config.query_pre_attn_scalar
    given = replace(
        config,
        sliding_windows=config.sliding_windows if any(config.sliding_windows) else (),
        rope_layers=() if all(config.rope_layers) else config.rope_layers,
        rotary_dim=None if config.rotary_dim == config.head_dim else config.rotary_dim,
        query_pre_attn_scalar=None if scalar == config.head_dim else scalar,
        experts=replace(experts, layers=()) if experts is not None and all(experts.layers) else experts,
    )
    names = [field.name for field in dataclasses.fields(config)]
    return [f"{name}={getattr(again, name)}" for name in names if getattr(again, name) != getattr(given, name)]


@functools.cache
def _defaults(model_type: str) -> dict[str, Any]:
    return _parsed({"model_type": model_type}).to_dict()


def _has_nested_rope(model_type: str) -> bool:
    """Whether layers with and without a window have RoPE parameters of their own."""
    return FULL in _defaults(model_type)["rope_parameters"]


def _written(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """config.json without dtypes and ids of tokens."""
    family, known = FAMILIES[model_type], _defaults(model_type)
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_layers)]
    window = max((window for window in config.sliding_windows if window), default=None)
    scalar = config.query_pre_attn_scalar
    keys = {key: getattr(config, name) for name, key in {**_SCALES, **family.biases}.items()} | {
        "query_pre_attn_scalar": int(config.head_dim if scalar is None else scalar),  # transformers has no other
        # Gemma's may not be null.
        "sliding_window": known.get("sliding_window") if window is None and family.windows == "some" else window,
        "use_sliding_window": window is not None,
        "layer_types": kinds,
        # For readers without `layer_types`: the first layer with a window.
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else config.num_layers,
        "no_rope_layers": [int(config.has_rope(layer)) for layer in range(config.num_layers)],
    }
    if config.experts is not None:
        keys |= {
            **dict.fromkeys(_EXPERT_COUNT, config.experts.count),
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.intermediate_size,
            "router_aux_loss_coef": config.experts.balance_coef,
            "output_router_logits": False,
            "norm_topk_prob": config.experts.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(config.num_layers) if not config.is_mixture(layer)],
            "swiglu_limit": config.experts.clamp,
        }
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{key: getattr(config, name) for name, key in _SIZES.items()},
        "head_dim": config.head_dim,
        "max_position_embeddings": _written_positions(config),
        **_rope_to_hf(config, model_type),
        **{key: value for key, value in keys.items() if key in known or (family.experts and key in _EXPERT_COUNT)},
        **{key: values[0] for key, values in family.only.items() if values[0] not in (None, False)},
    }


def _written_positions(config: ModelConfig) -> int:
    scaling = config.rope_scaling
    if isinstance(scaling, LongRope):
        return max(config.max_positions, round(scaling.factor * scaling.original_max_positions))
    return config.max_positions


def _rope_to_hf(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """RoPE's keys: transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters` and
    reads all."""
    rope = _scaling_to_hf(config.rope_scaling)
    new = {**rope, "rope_theta": config.rope_theta}
    keys = {"rope_theta": config.rope_theta, "rope_scaling": None if config.rope_scaling is None else rope}
    if config.rotary_dim is not None:
        share = config.rotary_dim / config.head_dim
        if int(config.head_dim * share) != config.rotary_dim:
            # transformers truncates the product, which rounding may have made one less.
            share = (config.rotary_dim + 0.5) / config.head_dim
        keys["partial_rotary_factor"] = new["partial_rotary_factor"] = share
    scaling = config.rope_scaling
    if isinstance(scaling, LongRope):
        keys["original_max_position_embeddings"] = scaling.original_max_positions
        own_factor = _written_positions(config) / scaling.original_max_positions
        if FAMILIES[model_type].layout == "fused" and scaling.attention_factor is None and scaling.factor == own_factor:
            # The Phi-3 of transformers 4 takes these three keys and derives the rest.
            factors = {key: rope[key] for key in ("short_factor", "long_factor")}
            keys["rope_scaling"] = {"type": "longrope", **factors}
    if not _has_nested_rope(model_type):
        return {**keys, "rope_parameters": new}
    theta = config.rope_theta if config.local_rope_theta is None else config.local_rope_theta
    if model_type == "gemma3_text":
        keys["rope_local_base_freq"] = theta
    return {**keys, "rope_parameters": {FULL: new, SLIDING: {"rope_type": "default", "rope_theta": theta}}}


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """The inverse of `_read_scaling`."""
    if scaling is None:
        return {"rope_type": "default"}
    (kind,) = (kind for kind, of_kind in _ROPES.items() if isinstance(scaling, of_kind))
    values = {_key(field): getattr(scaling, field.name) for field in dataclasses.fields(scaling)}
    written = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind} | {
        key: value for key, value in written.items() if value is not None and (key, value) != (_QUERY_BETA, 0)
    }
