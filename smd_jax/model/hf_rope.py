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
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return _parse(rope, config, float(config.get("rope_theta") or 10_000.0))


def read_two_ropes(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """Gemma's: base and scaling of the layers that see all, and the base of those with a window.

    Raises:
      ValueError: as `read_rope`; parameters for no kind of layer; a scaling of the layers with a window.
    """
    given = config.get("rope_parameters") or {}
    unknown = sorted(set(given) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(
            f"expected rope_parameters of {' and '.join(LAYER_TYPES)}, each with its own; got also {', '.join(unknown)}"
        )
    whole = {**(given.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    theta, scaling = _parse(whole, config, float(config.get("rope_theta") or GLOBAL_THETA))
    near = given.get("sliding_attention") or {}
    local_theta, local_scaling = _parse(near, config, float(config.get("rope_local_base_freq") or LOCAL_THETA))
    if local_scaling is not None:
        raise ValueError(f"expected plain RoPE in layers with a sliding window; got {near}")
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


def required_int(config: Mapping[str, Any], key: str) -> int:
    """A whole number that config.json must give."""
    value = config.get(key)
    if not isinstance(value, int):
        raise ValueError(f"config.json must give {key} as an integer; got {value!r}")
    return value


def _parse(given: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """One dictionary of parameters; `theta` is the base where it has none."""
    rope = dict(given)
    # Older files say `type` where newer ones say `rope_type`.
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    theta = float(rope.pop("rope_theta", None) or theta)
    partial = rope.pop("partial_rotary_factor", None)
    if rope_type not in ROPE_KEYS:
        raise ValueError(f"rope type must be one of {', '.join(ROPE_KEYS)}; got {rope_type!r}")
    if partial is not None and partial != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0 or absent; got {partial!r}")
    unknown = sorted(set(rope) - set(ROPE_KEYS[rope_type]))
    if unknown:
        known = ", ".join(ROPE_KEYS[rope_type]) or "no further keys"
        raise ValueError(f"rope type {rope_type!r} takes {known}; got also {', '.join(unknown)}")
    return theta, _scaling(rope_type, rope, config)


def _scaling(rope_type: str, rope: dict[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearRope(factor=_number(rope, "factor", rope_type))
    # A length outside the dictionary wins, and the context length stands in for an absent one, as in transformers.
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = int(original or required_int(config, "max_position_embeddings"))
    if rope_type == "llama3":
        return Llama3Rope(
            factor=_number(rope, "factor", rope_type),
            low_freq_factor=_number(rope, "low_freq_factor", rope_type),
            high_freq_factor=_number(rope, "high_freq_factor", rope_type),
            original_max_positions=original,
        )
    if rope.get("truncate") is False:
        raise ValueError("yarn with truncate=False is not supported; only truncate=True is")
    # An absent factor is the ratio of the two contexts.
    factor = float(rope.get("factor") or required_int(config, "max_position_embeddings") / original)
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _number(rope: dict[str, Any], key: str, rope_type: str) -> float:
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
