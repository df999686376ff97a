"""Settings as JSON values, and the differences between two of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smd_jax.typed_fields import written_fields

# Lists and objects hold Json, too. jaxtyping's checks could not resolve a recursive name here.
Json = None | bool | int | float | str | list[Any] | dict[str, Any]

ABSENT = "(absent)"


def to_jsonable(value: object, path: str = "config") -> Json:
    """Configuration -> JSON values: nested dataclasses become objects that name their class under `_class`.

    Tuples become lists; paths and non-finite floats become strings. Errors begin with `path`.

    Raises:
      TypeError: a value (named by its dotted path) has no JSON form.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # JSON has no infinity, and a comparison of texts works as well.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_jsonable(item, f"{path}.{i}") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_string_key(key, path): to_jsonable(item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # The class counts in a comparison: two policies may have the same fields.
        return {"_class": type(value).__name__} | _fields_to_jsonable(value, path)
    raise TypeError(
        f"{path}: expected None, bool, int, float, str, Path, list, tuple, dict or a dataclass; "
        f"got {type(value).__name__} {value!r}"
    )


def config_differences(saved: Json, given: Json, words: tuple[str, str] = ("expected", "got")) -> list[str]:
    """One line `field: expected <saved>, got <given>` for each differing field of two `to_jsonable` results.

    Args:
      words: replace "expected" and "got".
    """
    left = _flatten("", saved)
    right = _flatten("", given)
    names = [name for name in left | right if left.get(name, ABSENT) != right.get(name, ABSENT)]
    return [f"{name}: {words[0]} {_shown(left, name)}, {words[1]} {_shown(right, name)}" for name in names]


def _fields_to_jsonable(value: Any, path: str) -> dict[str, Json]:
    return {f.name: to_jsonable(getattr(value, f.name), f"{path}.{f.name}") for f in written_fields(value)}


def _string_key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{path}: expected string keys; got {type(key).__name__} {key!r}")
    return key


def _flatten(path: str, value: Json) -> dict[str, Json]:
    """Dotted path -> leaf; an empty list or object is a leaf itself."""
    if isinstance(value, list):
        # An empty list stays a leaf; without a name it would vanish from the comparison.
        value = {str(i): item for i, item in enumerate(value)} or value
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Json] = {}
    for key, item in value.items():
        flat |= _flatten(f"{path}.{key}" if path else key, item)
    return flat


def _shown(flat: dict[str, Json], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else ABSENT
