"""RoPE in Hugging Face's config.json: base and scaling, in the spellings of transformers 4 and 5.

transformers 4    rope_theta, rope_scaling {type or rope_type, factor, …}, partial_rotary_factor
transformers 5    rope_parameters {rope_type, rope_theta, factor, partial_rotary_factor, …}
Gemma 3, OLMo 3   as transformers 4, Gemma with rope_local_base_freq; or rope_parameters {full_attention: {…},
                  sliding_attention: {…}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from smd_jax.config import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from smd_jax.model.families import Family
from smd_jax.model.hf_fields import flag, mapping, number, numbers, shown, some, whole

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"),
}
QUERY_BETA = "llama_4_scaling_beta"
LAYER_TYPES = ("full_attention", "sliding_attention")


class RopeFields(NamedTuple):
    """RoPE in config.json.

    Attributes:
      theta, scaling: of the layers with full attention, and of all layers if `local_theta` is None.
      local_theta: base of the layers with a window, if it differs.
      rotated: share of a head's channels that is rotated.
    """

    theta: float
    scaling: RopeScaling | None
    local_theta: float | None
    rotated: float


def read_rope(config: Mapping[str, Any], family: Family) -> RopeFields:
    """RoPE's parameters. As in transformers 5, `rope_scaling` takes precedence over `rope_parameters`.

    Raises:
      ValueError: an unsupported scaling, missing or unknown keys, an unknown kind of layer, or a scaling for the layers
        with a window.
    """
    local = family.local_rope
    if local is None:
        rope = mapping(config, "rope_scaling") or mapping(config, "rope_parameters") or family.rope
        if family.query_beta and "max_position_embeddings" in rope:  # which transformers ignores, too
            rope = {key: value for key, value in rope.items() if key != "max_position_embeddings"}
        theta, scaling, rotated = _parse(rope, config, "rope_theta", family.rope_theta, family.query_beta)
        return RopeFields(theta, scaling, None, rotated)
    given = mapping(config, "rope_parameters")
    unknown = sorted(set(given) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"expected rope_parameters of {' and '.join(LAYER_TYPES)}, each with its own; got also {some(unknown)}"
        )
    far = {**mapping(given, "full_attention"), **mapping(config, "rope_scaling")}
    theta, scaling, rotated = _parse(far, config, "rope_theta", family.rope_theta)
    near = mapping(given, "sliding_attention")
    local_theta, local_scaling, _ = _parse(near, config, local.key, theta if local.default is None else local.default)
    if local_scaling is not None:
        raise ValueError(f"expected plain RoPE in layers with a sliding window; got {shown(near)}")
    same = local.default is None and scaling is None and local_theta == theta
    return RopeFields(theta, scaling, None if same else local_theta, rotated)


def rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """transformers' dictionary, without the base."""
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
        case DynamicRope():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case LongRope():
            return _longrope_to_hf(scaling)
        case YarnRope():
            yarn = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            if scaling.query_beta:
                yarn[QUERY_BETA] = scaling.query_beta
            if scaling.attention_factor is not None:
                yarn["attention_factor"] = scaling.attention_factor
            return yarn if scaling.truncate else {**yarn, "truncate": False}


def _longrope_to_hf(scaling: LongRope) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": list(scaling.short_factor),
        "long_factor": list(scaling.long_factor),
        "original_max_position_embeddings": scaling.original_max_positions,
    }
    # Otherwise transformers computes the factor from the two contexts.
    if stretched_positions(scaling) / scaling.original_max_positions != scaling.factor:
        rope["factor"] = scaling.factor
    given = scaling.attention_factor is not None
    return {**rope, "attention_factor": scaling.attention_factor} if given else rope


def stretched_positions(scaling: LongRope) -> int:
    """The extended context length."""
    return round(scaling.factor * scaling.original_max_positions)


def _parse(
    given: Mapping[str, Any],
    config: Mapping[str, Any],
    theta_key: str,
    default_theta: float,
    query_beta: bool = False,
) -> tuple[float, RopeScaling | None, float]:
    """Base, scaling and rotated share in a dictionary of parameters. Without `rope_theta`, the base is
    `config[theta_key]` or the default."""
    rope = dict(given)
    # Older files have `type` instead of `rope_type`.
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    base = rope.pop("rope_theta", None)
    theta = number(config, theta_key, default_theta) if base is None else number(given, "rope_theta")
    share = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = 1.0 if share is None else number({"partial_rotary_factor": share}, "partial_rotary_factor")
    rope_type = "longrope" if rope_type == "su" else rope_type  # Phi-3's first name for it
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise ValueError(f"rope type must be one of {', '.join(ROPE_KEYS)}; got {shown(rope_type)}")
    keys = (*ROPE_KEYS[rope_type], QUERY_BETA) if query_beta and rope_type == "yarn" else ROPE_KEYS[rope_type]
    unknown = sorted(set(rope) - set(keys))
    if unknown:
        known = ", ".join(keys) or "no further keys"
        raise ValueError(f"rope type {rope_type!r} takes {known}; got also {some(unknown)}")
    return theta, _scaling(rope_type, rope, config), rotated


def _scaling(rope_type: str, rope: dict[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearRope(factor=number(rope, "factor"))
    if rope_type == "dynamic":
        return DynamicRope(factor=number(rope, "factor"))
    original = _original_positions(rope, config)
    if rope_type == "llama3":
        return Llama3Rope(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=original,
        )
    given = {key: value for key, value in rope.items() if value is not None}
    if rope_type == "longrope":
        return _longrope(given, config, original)
    # The default is the ratio of the two contexts.
    factor = number(given, "factor") if "factor" in given else whole(config, "max_position_embeddings") / original
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=number(given, "beta_fast", 32.0),
        beta_slow=number(given, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(given, factor),
        truncate=flag(given, "truncate", True),
        query_beta=number(given, QUERY_BETA, 0.0, zero=True),
    )


def _longrope(rope: Mapping[str, Any], config: Mapping[str, Any], original: int) -> LongRope:
    given = "factor" in rope
    return LongRope(
        short_factor=numbers(rope, "short_factor"),
        long_factor=numbers(rope, "long_factor"),
        original_max_positions=original,
        factor=number(rope, "factor") if given else whole(config, "max_position_embeddings") / original,
        attention_factor=number(rope, "attention_factor") if "attention_factor" in rope else None,
    )


def _original_positions(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The original context length. As in transformers, the key outside the dictionary takes precedence, and
    max_position_embeddings is the default."""
    key = "original_max_position_embeddings"
    for fields in (config, rope):
        if fields.get(key) is not None:
            return whole(fields, key)
    return whole(config, "max_position_embeddings")


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """Explicit, or computed from DeepSeek's two mscales, or None for the default `0.1 ln(factor) + 1`."""
    if "attention_factor" in rope:
        return number(rope, "attention_factor")
    # Without extension of the context, scores are not scaled.
    if factor <= 1:
        return 1.0
    mscale, mscale_all_dim = (number(rope, key, 0.0, zero=True) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return None
