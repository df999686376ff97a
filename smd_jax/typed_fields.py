"""Checks the types of a configuration's fields.

Without the checks a text in place of a number fails later: `'<' not supported between instances of 'str' and 'int'`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np


def check_types(config: Any) -> None:
    """Checks every field of a dataclass against its annotation.

    Checks numbers, texts, choices, tuples, dataclasses, and unions of them; other annotations, such as protocols,
    accept any value. Whole numbers count as floats, and NumPy's numbers as numbers; True and False are no numbers.

    Raises:
      TypeError: a value that the annotation does not allow, or with settings that are no fields; names the field.
      ValueError: a text that is none of the choices of a Literal.
    """
    kind = type(config)
    for name, hint in _field_types(kind).items():
        value, choices = getattr(config, name), get_args(hint)
        if get_origin(hint) is Literal and all(isinstance(choice, str) for choice in choices):
            check_choice(name, value, choices)
        elif not _fits(value, hint):
            raise TypeError(
                f"expected {name} of {kind.__name__} to be {_written(hint)}; got {value!r}, {type(value).__name__}"
            )
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item):
                check_settings(item)


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"expected {field} to be one of {', '.join(choices)}; got {value!r}")


def check_settings(part: Any) -> None:
    """Raises TypeError for attributes of a dataclass object that are not among its fields.

    Equality and hash read the fields only. Two policies that differ in such an attribute would be equal and share the
    compiled program of the first.
    """
    fields = {field.name for field in dataclasses.fields(part)}
    others = [
        name
        for name in getattr(part, "__dict__", {})
        if name not in fields and not isinstance(getattr(type(part), name, None), functools.cached_property)
    ]
    if others:
        raise TypeError(
            f"expected {type(part).__name__} to be a frozen dataclass, with @dataclass(frozen=True), whose fields are "
            f"its settings; got attributes that are no fields: {', '.join(others)}"
        )


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    """Field name -> annotation."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    arms = get_args(hint)
    if _is_union(hint):
        return any(_fits(value, arm) for arm in arms)
    if get_origin(hint) is Literal:
        # By value and type, because True equals 1. The configuration checks the texts of a union itself.
        return any(value == arm and type(value) is type(arm) for arm in arms) or (
            isinstance(value, str) and any(isinstance(arm, str) for arm in arms)
        )
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        items = arms[:1] * len(value) if arms[1:] == (Ellipsis,) else arms
        return len(value) == len(items) and all(map(_fits, value, items))
    if hint in _SIMPLE:
        return _SIMPLE[hint](value)
    return isinstance(value, hint) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else True


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _is_number(value: Any, method: str) -> bool:
    # Also of NumPy. True and False would pass for 1 and 0; arrays cannot be hashed, and may be traced.
    return hasattr(value, method) and not isinstance(value, bool | jax.Array | np.ndarray)


_SIMPLE: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: _is_number(value, "__index__"),
    float: lambda value: _is_number(value, "__float__"),
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    type(None): lambda value: value is None,
}


def _written(hint: Any) -> str:
    """The annotation as in the source: `int | None`."""
    if _is_union(hint):
        return " | ".join(_written(arm) for arm in get_args(hint))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")
