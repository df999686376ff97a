"""Sliding windows in Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smd_jax.config import ModelConfig
from smd_jax.model.families import Family, Windows
from smd_jax.model.hf_fields import flag, names, shown, whole
from smd_jax.model.hf_rope import LAYER_TYPES

FULL, SLIDING = LAYER_TYPES
_DEFAULT_WINDOW = 4096  # written for a model without a window, in families that always have the key
_QWEN_WINDOW_LAYERS = 28  # default of the first layer with a window


def read_windows(
    config: Mapping[str, Any], family: Family, layers: int, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The window of each layer; empty if none has one.

    Raises:
      ValueError: `layer_types` has unknown kinds, kinds that the family does not have, or another length.
    """
    model_type = config["model_type"]
    window = _window(config, family.windows)
    by_rule = _layer_types(config, family.windows, window, layers, rope_layers)
    kinds = names(config, "layer_types") or by_rule
    possible = (FULL,) if family.windows is None else LAYER_TYPES
    unknown = sorted(set(kinds) - set(possible))
    if unknown:
        raise ValueError(f"layer_types of {model_type} must be {' or '.join(possible)}; got {shown(unknown)}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types must name the kind of each of {layers} layers; got {len(kinds)}")
    # transformers' Mistral ignores layer_types, so other values describe another model.
    if family.windows is not None and family.windows.layers == "all" and kinds != by_rule:
        raise ValueError(
            f"{model_type} has windows in all layers or in none; got sliding_window={window} and {shown(kinds)}"
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


def _window(config: Mapping[str, Any], windows: Windows | None) -> int | None:
    """The size of the windows; None without windows."""
    # Qwen's files have a size even if no layer uses it.
    if windows is None or (windows.flag and not flag(config, "use_sliding_window", False)):
        return None
    # Null turns windows off; an absent key leaves them at the default.
    given = config.get("sliding_window", windows.default)
    return None if given is None else whole({"sliding_window": given}, "sliding_window")


def _layer_types(
    config: Mapping[str, Any], windows: Windows | None, window: int | None, layers: int, rope_layers: tuple[bool, ...]
) -> list[str]:
    """The kind of each layer by the rule of its family, for older files without `layer_types`."""
    if windows is None:
        return [FULL] * layers
    if windows.pattern is not None:
        key = windows.pattern_key
        pattern = windows.pattern if key is None else whole(config, key, windows.pattern)
        return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(layers)]
    if window is None:
        return [FULL] * layers
    if windows.without_rope:
        return [FULL if has_rope else SLIDING for has_rope in rope_layers or (True,) * layers]
    first = whole(config, "max_window_layers", _QWEN_WINDOW_LAYERS, 0) if windows.first_layer else 0
    return [SLIDING if layer >= first else FULL for layer in range(layers)]


def windows_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json."""
    windows = family.windows
    if windows is None:
        return {}
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_layers)]
    window = next((window for window in config.sliding_windows if window is not None), None)
    keys: dict[str, Any] = {"sliding_window": window}
    if windows.flag:
        keys["use_sliding_window"] = window is not None
    if windows.layers == "all":
        return keys
    if windows.pattern is not None:
        keys["sliding_window"] = _DEFAULT_WINDOW if window is None else window
        return {**keys, "layer_types": kinds}
    if window is None and windows.first_layer:
        return keys
    keys["layer_types"] = kinds
    if windows.first_layer:
        # For readers without `layer_types`: the first layer with a window.
        keys["max_window_layers"] = kinds.index(SLIDING)
    return keys
