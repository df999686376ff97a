"""Stretched RoPE in Hugging Face's config.json <-> `RopeScaling`.

The keys of transformers are the fields of our configurations, but for two names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from smd_jax.config import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope

ROPES: dict[str, type[RopeScaling]] = {
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}
QUERY_BETA = "llama_4_scaling_beta"
HF_KEYS = {"original_max_positions": "original_max_position_embeddings", "query_beta": QUERY_BETA}


def read_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    """The scaling in `rope_parameters`; None for plain RoPE.

    Args:
      max_positions: `max_position_embeddings`, which with the original context gives the default factor.

    Raises:
      ValueError, TypeError: an unsupported type, or values that its configuration refuses.
    """
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind not in ROPES:
        raise ValueError(f"rope type must be one of default, {', '.join(ROPES)}; got {kind!r}")
    fields = {field.name: _of_json(rope.get(_key(field))) for field in dataclasses.fields(ROPES[kind])}
    fields = {name: value for name, value in fields.items() if value is not None}
    if "original_max_positions" in fields:
        fields["original_max_positions"] = int(fields["original_max_positions"])
    if kind in ("yarn", "longrope"):
        fields.setdefault("factor", max_positions / fields["original_max_positions"])
    if kind == "yarn" and fields["factor"] > 1 and rope.get("mscale") and rope.get("mscale_all_dim"):
        # DeepSeek's two mscales, instead of the factor.
        above, below = (0.1 * rope[key] * math.log(fields["factor"]) + 1 for key in ("mscale", "mscale_all_dim"))
        fields.setdefault("attention_factor", above / below)
    return ROPES[kind](**fields)


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """The inverse of `read_scaling`."""
    if scaling is None:
        return {"rope_type": "default"}
    (kind,) = (kind for kind, of_kind in ROPES.items() if isinstance(scaling, of_kind))
    values = {_key(field): getattr(scaling, field.name) for field in dataclasses.fields(scaling)}
    written = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind} | {
        key: value for key, value in written.items() if value is not None and (key, value) != (QUERY_BETA, 0)
    }


def _of_json(value: Any) -> Any:
    """Lists as tuples, and whole numbers as floats."""
    if isinstance(value, list):
        return tuple(map(_of_json, value))
    return float(value) if type(value) is int else value


def _key(field: dataclasses.Field[Any]) -> str:
    return HF_KEYS.get(field.name, field.name)
