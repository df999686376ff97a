"""Parses eviction policies from command-line and config texts.

parse_policy("snapkv")                                      a policy of `POLICIES` with its defaults
parse_policy("snapkv(window=16)")                           with parameters: numbers, strings, True, False, None
parse_policy("my_policies.py:FadingH2O(half_life=64)")      a user's class, in a file or a module
parse_policy('triattention(centers="centers.npz")')         a policy of `described_policies`

Parameters are literals, read by `ast.literal_eval`. A user's file is executed, like a reward file.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smd_jax.commands.described_policies import DESCRIBED, Described
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.named import POLICIES
from smd_jax.tasks.functions import import_class
from smd_jax.tasks.reward_calls import Caught
from smd_jax.text.near_names import did_you_mean
from smd_jax.typed_fields import check_type, field_types

# A folder's name may contain parentheses; then only a colon after ".py" ends the path.
PATTERN = r"(?:(?P<place>.+\.py|[^()]+):(?P<kind>[^\W\d]\w*)|(?P<name>[^:()]+))\s*(?P<parameters>\(.*\))?"
_POLICY = re.compile(PATTERN, re.DOTALL)
_LITERALS = (bool, int, float, str, tuple, type(None))
_REQUIRED = object()  # marks a parameter without a default


@dataclass(frozen=True)
class NamedPolicy:
    """A parsed policy.

    Attributes:
      label: part of metric names, such as `snapkv-window-16`; letters, digits, "_", "-" and ".".
      policy: the policy.
      given: names of the parameters in the text.
      place: file or module of a user's policy; None for a policy of the library.
    """

    label: str
    policy: EvictionPolicy
    given: tuple[str, ...] = ()
    place: str | None = None


def parse_policy(text: str, policies: Mapping[str, EvictionPolicy] = POLICIES) -> NamedPolicy:
    """Parses a policy.

    Args:
      policies: the known policies by name; case, and "-" versus "_", do not matter.

    Raises:
      ValueError: an unknown policy; a missing or unsuitable class; an unknown parameter or an invalid value. The
        message lists the known names.
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
    else:
        name = match["name"].strip().lower().replace("-", "_")
        start = policies.get(name)
        if start is None and name not in DESCRIBED:
            raise ValueError(_unknown(name, match["name"].strip(), text, policies))
        kind = DESCRIBED[name] if start is None else type(start)
    defaults = _parameters(kind, start)
    given = {} if match["parameters"] is None else _values(match["parameters"], name, defaults, text)
    _check_parameters(given, defaults, name, text)
    policy = _build(kind, start, given, text)
    return NamedPolicy(_label(name, given), policy, tuple(given), match["place"])


def own_place(text: str) -> str | None:
    """File or module of a user's policy; None for a policy of the library, and for any other text."""
    match = _POLICY.fullmatch(text.strip())
    return None if match is None else match["place"]


def _own_class(place: str, name: str, text: str, policies: Mapping[str, EvictionPolicy]) -> type[EvictionPolicy]:
    if place.strip().lower().replace("-", "_") in policies:
        raise ValueError(f"expected a number of keys after {place}, as in {place}:512; got {name!r} in {text!r}")
    try:
        kind = import_class(f"{place}:{name}", EvictionPolicy)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; the eviction policy was {text!r}") from error
    # Without the decorator, policies with different fields would compare equal and share one compiled program.
    if "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"expected a frozen dataclass as {place}:{name}, with @dataclass(frozen=True); got a plain class"
        )
    return kind


def _unknown(name: str, written: str, text: str, policies: Mapping[str, EvictionPolicy]) -> str:
    inside = "" if written == text.strip() else f" in {text!r}"
    return (
        f"expected one of the eviction policies {', '.join([*policies, *DESCRIBED])}, or one of your own as "
        f"path/to/file.py:Class; got {written!r}{inside}{did_you_mean(name, [*policies, *DESCRIBED])}"
    )


def _parameters(kind: type[Any], start: EvictionPolicy | None) -> dict[str, Any]:
    """The parameters that a text can set, with their defaults or `_REQUIRED`."""
    defaults = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        if start is not None:
            default = getattr(start, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = _REQUIRED if field.default is dataclasses.MISSING else field.default
        # An inner policy or a gate cannot be written as a literal.
        if default is _REQUIRED or isinstance(default, _LITERALS):
            defaults[field.name] = default
    return defaults


def _values(parameters: str, name: str, defaults: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Parses `(window=16, kernel=3)` into names and values."""
    by_name = f"expected every parameter of {name} once and by name, as in {_example(name, defaults)}; got"
    try:
        call = ast.parse(f"policy{parameters}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{by_name} {text!r}") from error
    # Rejects `(a=1)(b=2)`, a call of a call.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{by_name} {text!r}")
    values = dict[str, Any]()
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in values:
            raise ValueError(f"{by_name} {text!r}")
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"expected {keyword.arg} of {name} as a number, a quoted string, True, False or None; got "
                f"{ast.unparse(keyword.value)} in {text!r}"
            ) from error
    return values


def _example(name: str, defaults: Mapping[str, Any]) -> str:
    for parameter, default in defaults.items():
        return f"{name}({parameter}={'…' if default is _REQUIRED else repr(default)})"
    return "snapkv(window=16)"


def _check_parameters(given: Mapping[str, Any], defaults: Mapping[str, Any], name: str, text: str) -> None:
    unknown = [parameter for parameter in given if parameter not in defaults]
    if unknown:
        shown = ", ".join(p if default is _REQUIRED else f"{p}={default!r}" for p, default in defaults.items())
        wanted = f"a parameter of {name}, which has {shown}" if defaults else f"no parameters of {name}, which has none"
        raise ValueError(f"expected {wanted}; got {', '.join(map(repr, unknown))} in {text!r}")
    missing = [parameter for parameter, default in defaults.items() if default is _REQUIRED and parameter not in given]
    if missing:
        example = ", ".join(f"{parameter}=…" for parameter in missing)
        raise ValueError(f"expected {name}({example}), because these have no default; got {text!r}")


def _build(kind: type[Any], start: EvictionPolicy | None, given: Mapping[str, Any], text: str) -> EvictionPolicy:
    # A user's class may raise anything, and need not check its types.
    with Caught() as caught:
        for name, value in given.items():
            check_type(kind, name, value)
        # A resumed run would take 1 and 1.0 for different settings.
        values = {name: float(x) if field_types(kind)[name] is float else x for name, x in given.items()}
        made: Any = kind(**values) if start is None else dataclasses.replace(start, **values)
        policy: EvictionPolicy = made.policy() if isinstance(made, Described) else made
        hash(policy)  # compiled programs are cached by policy; a list as a field is not hashable
        return policy
    error = caught.error
    assert error is not None
    expected = isinstance(error, ValueError | TypeError | OSError)
    reason = str(error) if expected else f"it raised {type(error).__name__}: {error}"
    raise ValueError(f"{reason}; the eviction policy was {text!r}") from error


def _label(name: str, given: Mapping[str, Any]) -> str:
    # Of a file only its name.
    shown = {parameter: Path(value).stem if parameter == "centers" else value for parameter, value in given.items()}
    values = [f"{parameter}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', str(value))}" for parameter, value in shown.items()]
    return "-".join([name, *values])
