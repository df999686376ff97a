"""RoPE in Hugging Face's config.json: base and scaling, in the spellings of transformers 4 and 5.

transformers 4    rope_theta, rope_scaling {type or rope_type, factor, …}
transformers 5    rope_parameters {rope_type, rope_theta, factor, …}
Gemma 3           rope_theta, rope_local_base_freq, rope_scaling; or rope_parameters {full_attention: {…},
                  sliding_attention: {…}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from smd_jax.config import LinearRope, Llama3Rope, RopeScaling, YarnRope
from smd_jax.model.hf_fields import flag, mapping, number, shown, some, whole

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
LAYER_TYPES = ("full_attention", "sliding_attention")
# Gemma 3's, where a file doesn't give them.
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base of the frequencies and their scaling. As in transformers 5, `rope_scaling` comes before
    `rope_parameters`.

    Raises:
      ValueError: a kind of scaling that is not supported, or keys that are missing or unknown.
    """
    rope = mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
    return _parse(rope, config, "rope_theta", 10_000.0)


def read_two_ropes(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """Gemma's: base and scaling of the layers that see all, and the base of those with a window.

    Raises:
      ValueError: as `read_rope`; parameters for no kind of layer; a scaling of the layers with a window.
    """
    given = mapping(config, "rope_parameters")
    unknown = sorted(set(given) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"expected rope_parameters of {' and '.join(LAYER_TYPES)}, each with its own; got also {some(unknown)}"
        )
    far = {**mapping(given, "full_attention"), **mapping(config, "rope_scaling")}
    theta, scaling = _parse(far, config, "rope_theta", GLOBAL_THETA)
    near = mapping(given, "sliding_attention")
    local_theta, local_scaling = _parse(near, config, "rope_local_base_freq", LOCAL_THETA)
    if local_scaling is not None:
        raise ValueError(f"expected plain RoPE in layers with a sliding window; got {shown(near)}")
    return theta, scaling, local_theta


def rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """The dictionary of transformers, without the base."""
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


def _parse(
    given: Mapping[str, Any], config: Mapping[str, Any], theta_key: str, default_theta: float
) -> tuple[float, RopeScaling | None]:
    """One dictionary of parameters. The base of one without a `rope_theta` is `config[theta_key]`, or the default."""
    rope = dict(given)
    # Older files say `type` where newer ones say `rope_type`.
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    base = rope.pop("rope_theta", None)
    theta = number(config, theta_key, default_theta) if base is None else number(given, "rope_theta")
    partial = rope.pop("partial_rotary_factor", None)
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise ValueError(f"rope type must be one of {', '.join(ROPE_KEYS)}; got {shown(rope_type)}")
    if partial is not None and partial != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0 or absent; got {shown(partial)}")
    unknown = sorted(set(rope) - set(ROPE_KEYS[rope_type]))
    if unknown:
        known = ", ".join(ROPE_KEYS[rope_type]) or "no further keys"
        raise ValueError(f"rope type {rope_type!r} takes {known}; got also {some(unknown)}")
    return theta, _scaling(rope_type, rope, config)


def _scaling(rope_type: str, rope: dict[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearRope(factor=number(rope, "factor"))
    original = _original_positions(rope, config)
    if rope_type == "llama3":
        return Llama3Rope(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=original,
        )
    given = {key: value for key, value in rope.items() if value is not None}
    if not flag(given, "truncate", True):
        raise ValueError("yarn with truncate=False is not supported; only truncate=True is")
    # An absent factor is the ratio of the two contexts.
    factor = number(given, "factor") if "factor" in given else whole(config, "max_position_embeddings") / original
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=number(given, "beta_fast", 32.0),
        beta_slow=number(given, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _original_positions(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The context before it was stretched. A length outside of the dictionary wins, and the context length replaces an
    absent one, as in transformers."""
    key = "original_max_position_embeddings"
    for fields in (config, rope):
        if fields.get(key) is not None:
            return whole(fields, key)
    return whole(config, "max_position_embeddings")


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """Explicit, or from DeepSeek's two mscales, or None where the default `0.1 ln(factor) + 1` holds."""
    if "attention_factor" in rope:
        return number(rope, "attention_factor")
    # Without stretching, scores keep their size.
    if factor <= 1:
        return 1.0
    mscale, mscale_all_dim = (number(rope, key, 0.0, zero=True) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return None
