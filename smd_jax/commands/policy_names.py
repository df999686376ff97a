"""Eviction policies by name, as a command line or a file has them: with their parameters, and of one's own.

parse_policy("snapkv")                                      one of `POLICIES`, as it is
parse_policy("snapkv(window=16)")                           with parameters, by name: numbers, texts, True, False, None
parse_policy("my_policies.py:FadingH2O(half_life=64)")      a class of your own, in a file or a module

Nothing of a text is evaluated: what stands between the parentheses are literals, read by `ast.literal_eval`. A file of
your own is executed, as files of rewards are.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.named import POLICIES
from smd_jax.tasks.functions import import_class
from smd_jax.tasks.reward_calls import Caught
from smd_jax.text.near_names import did_you_mean
from smd_jax.typed_fields import check_type, field_types

# A folder may have parentheses in its name, so only behind ".py" is a colon sure to end a place that has some.
PATTERN = r"(?:(?P<place>.+\.py|[^()]+):(?P<kind>[^\W\d]\w*)|(?P<name>[^:()]+))\s*(?P<parameters>\(.*\))?"
_POLICY = re.compile(PATTERN, re.DOTALL)
_LITERALS = (bool, int, float, str, tuple, type(None))
_REQUIRED = object()  # in place of a default, where there is none


@dataclass(frozen=True)
class NamedPolicy:
    """What a text says.

    Attributes:
      label: letters, digits, "_", "-" and ".", such as `snapkv-window-16`: a part of metrics' names.
      policy: the policy.
      given: names of the parameters that stand in the text.
      place: file or module of a policy of one's own; None: the library's.
    """

    label: str
    policy: EvictionPolicy
    given: tuple[str, ...] = ()
    place: str | None = None


def parse_policy(text: str, policies: Mapping[str, EvictionPolicy] = POLICIES) -> NamedPolicy:
    """The policy that a text names.

    Args:
      policies: which there are by name; other cases, and "-" for "_", are taken for the same name.

    Raises:
      ValueError: no such policy, listing those that there are; a class of one's own that is not there or is none;
        parameters that it doesn't have, listing its own with their defaults, or not of these values.
    """
    match = _POLICY.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"expected an eviction policy as name, name(parameter=value) or path/to/file.py:Class(parameter=value), "
            f"such as snapkv or snapkv(window=16); got {text!r}"
        )
    if match["place"] is not None:
        name = match["kind"]
        kind = _own_class(match["place"], name, text, policies)
        start: EvictionPolicy | None = None
        there = _parameters(kind, None)
    else:
        name = match["name"].strip().lower().replace("-", "_")
        if name not in policies:
            raise ValueError(_unknown(name, match["name"].strip(), text, policies))
        start = policies[name]
        kind = type(start)
        there = _parameters(kind, start)
    given = {} if match["parameters"] is None else _values(match["parameters"], name, there, text)
    _check_parameters(given, there, name, text)
    policy = _made(kind, start, given, text)
    return NamedPolicy(_label(name, given), policy, tuple(given), match["place"])


def own_place(text: str) -> str | None:
    """The file or module of a policy of one's own; None for one of the library's, and for what is no policy."""
    match = _POLICY.fullmatch(text.strip())
    return None if match is None else match["place"]


def _own_class(place: str, name: str, text: str, policies: Mapping[str, EvictionPolicy]) -> type[EvictionPolicy]:
    if place.strip().lower().replace("-", "_") in policies:
        raise ValueError(f"expected a number of keys behind {place}, as in {place}:512; got {name!r} in {text!r}")
    try:
        kind = import_class(f"{place}:{name}", EvictionPolicy)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; the eviction policy was {text!r}") from error
    # Without the decorator its fields would be constants, and equal policies with other ones one program.
    if "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"expected a frozen dataclass as {place}:{name}, @dataclass(frozen=True) above it; got a class"
        )
    return kind


def _unknown(name: str, written: str, text: str, policies: Mapping[str, EvictionPolicy]) -> str:
    inside = "" if written == text.strip() else f" in {text!r}"
    return (
        f"expected one of the eviction policies {', '.join(policies)}, or one of your own as path/to/file.py:Class; "
        f"got {written!r}{inside}{did_you_mean(name, policies)}"
    )


def _parameters(kind: type[EvictionPolicy], start: EvictionPolicy | None) -> dict[str, Any]:
    """The parameters that a text can set, with their defaults or `_REQUIRED`."""
    found = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        if start is not None:
            default = getattr(start, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = _REQUIRED if field.default is dataclasses.MISSING else field.default
        # A policy inside of another one, or a gate, has no literal.
        if default is _REQUIRED or isinstance(default, _LITERALS):
            found[field.name] = default
    return found


def _values(parameters: str, name: str, there: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Name -> value of `(window=16, kernel=3)`."""
    by_name = f"expected every parameter of {name} once and by name, as in {_example(name, there)}; got"
    try:
        call = ast.parse(f"policy{parameters}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{by_name} {text!r}") from error
    # `(a=1)(b=2)` is a call, too: of what the first one gives.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{by_name} {text!r}")
    found = dict[str, Any]()
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise ValueError(f"{by_name} {text!r}")
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"expected {keyword.arg} of {name} as a number, a text in quotes, True, False or None; got "
                f"{ast.unparse(keyword.value)} in {text!r}"
            ) from error
    return found


def _example(name: str, there: Mapping[str, Any]) -> str:
    for parameter, default in there.items():
        return f"{name}({parameter}={'…' if default is _REQUIRED else repr(default)})"
    return "snapkv(window=16)"


def _check_parameters(given: Mapping[str, Any], there: Mapping[str, Any], name: str, text: str) -> None:
    unknown = [parameter for parameter in given if parameter not in there]
    if unknown:
        shown = ", ".join(p if default is _REQUIRED else f"{p}={default!r}" for p, default in there.items())
        wanted = f"a parameter of {name}, which has {shown}" if there else f"no parameters of {name}, which has none"
        raise ValueError(f"expected {wanted}; got {', '.join(map(repr, unknown))} in {text!r}")
    missing = [parameter for parameter, default in there.items() if default is _REQUIRED and parameter not in given]
    if missing:
        example = ", ".join(f"{parameter}=…" for parameter in missing)
        raise ValueError(f"expected {name}({example}), because these have no default; got {text!r}")


def _made(
    kind: type[EvictionPolicy], start: EvictionPolicy | None, given: Mapping[str, Any], text: str
) -> EvictionPolicy:
    # A class of one's own may raise anything; and it need not look at types, as ours do.
    with Caught() as caught:
        for name, value in given.items():
            check_type(kind, name, value)
        # 1 and 1.0 are one number, and would be two settings to a run that is resumed.
        values = {name: float(x) if field_types(kind)[name] is float else x for name, x in given.items()}
        policy = kind(**values) if start is None else dataclasses.replace(start, **values)
        hash(policy)  # what is compiled is kept by it, and a list, for example, has none
        return policy
    error = caught.error
    assert error is not None
    said = str(error) if isinstance(error, ValueError | TypeError) else f"it raised {type(error).__name__}: {error}"
    raise ValueError(f"{said}; the eviction policy was {text!r}") from error


def _label(name: str, given: Mapping[str, Any]) -> str:
    values = [f"{parameter}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', str(value))}" for parameter, value in given.items()]
    return "-".join([name, *values])
