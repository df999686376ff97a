"""Typed fields of a parsed JSON file: a value of the wrong type raises a ValueError that names the field.

JSON has more values than a field allows: null, booleans where Python counts them as integers, NaN and 1e400 where it
reads a float, and texts of any length. Errors show the first characters of a value only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
# Larger sizes do not fit the int32 indices and positions of the decoder.
LARGEST = 2**31 - 1
_SHOWN = 80


def shown(value: object) -> str:
    """The representation of a value, cut after 80 characters."""
    # A text is cut before it is quoted, so that a text of any length costs nothing.
    text = repr(value[: _SHOWN + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def whole(fields: Fields, key: str, default: int | None = None, least: int = 1) -> int:
    """An integer of a JSON object; `default` if the key is absent.

    Raises:
      ValueError: another value, or no value and no default.
    """
    value = fields.get(key, default) if default is not None else fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        raise ValueError(f"expected {key} as an integer from {least} to {LARGEST}; got {shown(value)}")
    return value


def number(fields: Fields, key: str, default: float | None = None, *, zero: bool = False) -> float:
    """A finite number > 0 of a JSON object, or >= 0 with `zero`; `default` if the key is absent.

    Raises:
      ValueError: another value, or no value and no default.
    """
    value = fields.get(key, default) if default is not None else fields.get(key)
    if not isinstance(value, bool) and isinstance(value, int | float):
        # An integer of hundreds of digits is larger than any float.
        size = float(value) if abs(value) < 10**300 else math.inf
        if 0 < size < math.inf or (zero and size == 0):
            return size
    raise ValueError(f"expected {key} as a finite number {'>=' if zero else '>'} 0; got {shown(value)}")


def flag(fields: Fields, key: str, default: bool) -> bool:
    """A boolean of a JSON object; `default` if the key is absent.

    Raises:
      ValueError: another value.
    """
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"expected {key} as true or false; got {shown(value)}")
    return value


def names(fields: Fields, key: str) -> list[str] | None:
    """A list of texts in a JSON object; None if it is absent, null or empty.

    Raises:
      ValueError: another value.
    """
    value = fields.get(key)
    if not value and (value is None or isinstance(value, list)):
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"expected {key} as a list of texts, or null; got {shown(value)}")
    return value


def some(words: list[str], limit: int = 8) -> str:
    """The first words of a list, each cut after 80 characters, and how many more there are."""
    cut = [word if len(word) <= _SHOWN else word[: _SHOWN - 1] + "…" for word in words[:limit]]
    more = f", and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(cut) + more
