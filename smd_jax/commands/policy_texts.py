"""Eviction policies and ways of decoding as texts of the command line.

parse_policy("snapkv(window=16)")                          a policy of `POLICIES`
parse_policy("my_policies.py:FadingH2O(half_life=64)")     a user's class, in a file or a module
parse_policy("my_policies.py:fading")                      a user's policy
parse_decode("snapkv(window=16):512+128")                  a policy with its budget and buffer

Parameters are Python literals. A user's file is executed, like a reward file.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from contextlib import suppress
from typing import Any

from smd_jax.eviction import policies, wrappers
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import POLICIES, LearnedGate, TriAttention
from smd_jax.message.gate import Gate
from smd_jax.tasks.functions import import_object
from smd_jax.text.near_names import did_you_mean
from smd_jax.train.evaluation import Decode
from smd_jax.typed_fields import check_types

# A folder's name may contain parentheses; then only a colon after ".py" ends the path.
_PATTERN = r"(?:(?P<place>.+\.py|[^()]+):(?P<object>[^\W\d]\w*)|(?P<name>[^:()]+))\s*(?P<parameters>\(.*\))?"
_POLICY = re.compile(_PATTERN, re.DOTALL)
_DECODE = re.compile(rf"(?P<policy>{_PATTERN})(:(?P<budget>\d+)(\+(?P<buffer>\d+))?)?", re.DOTALL)


def parse_policy(text: str) -> EvictionPolicy:
    """Parses one of the forms above. Case, and "-" versus "_", do not matter in the library's names.

    Raises FileNotFoundError for no such file, and ValueError for another form, an unknown name, an unsuitable class, or
    parameters that it does not take.
    """
    match = _POLICY.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "expected an eviction policy as name, name(parameter=value) or path/to/file.py:Class(parameter=value), "
            f"such as snapkv or snapkv(window=16); got {text!r}"
        )
    if match["place"] is not None:
        known = import_object(f"{match['place']}:{match['object']}", EvictionPolicy)
    elif _plain(match["name"]) in POLICIES:
        known = POLICIES[_plain(match["name"])]
    else:
        raise ValueError(
            f"expected one of the eviction policies {', '.join(POLICIES)}, or one of your own as "
            f"path/to/file.py:Class; got {text!r}{did_you_mean(_plain(match['name']), POLICIES)}"
        )
    given = _parameters(match["parameters"], text)
    kind = known if isinstance(known, type) else type(known)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    for name in given:
        if name not in names:
            near = did_you_mean(name, names)
            raise ValueError(f"expected parameters of {kind.__name__} among {names}; got {name!r} in {text!r}{near}")
    try:
        policy = known(**given) if isinstance(known, type) else dataclasses.replace(known, **given)
        hash(policy)  # compiled programs are cached by policy
        with suppress(NameError):  # an annotation that only type checkers import
            check_types(policy)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; the eviction policy was {text!r}") from error
    # Without the decorator, policies with different fields would compare equal and share one compiled program.
    if "__dataclass_fields__" not in vars(type(policy)):
        raise ValueError(f"expected {text!r} to be a frozen dataclass, with @dataclass(frozen=True); got a plain class")
    return policy


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _parameters(parameters: str | None, text: str) -> dict[str, Any]:
    """Parses `(window=16, kernel=3)` into names and values."""
    try:
        call = ast.parse(f"policy{parameters or '()'}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("no call with keywords")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(
            "expected the parameters of an eviction policy by name, each a number, a quoted string, True, False or "
            f"None, as in snapkv(window=16); got {text!r}"
        ) from error


def named_policy(text: str, sinks: int, pyramid: bool = False) -> EvictionPolicy:
    """Parses a policy that always keeps the first `sinks` keys; a pyramid gives deeper layers smaller budgets. Raises
    ValueError as `parse_policy`, for sinks that are given twice, and for a pyramid for a gate."""
    policy = with_sinks(parse_policy(text), sinks)
    if pyramid and policy.gate is not None:
        raise ValueError(f"expected no --pyramid with {text!r}, because its draws would not be recorded; got it")
    return wrappers.Pyramid(policy) if pyramid and policy.evicts else policy


def with_sinks(policy: EvictionPolicy, sinks: int) -> EvictionPolicy:
    """Protects the first `sinks` keys of a sequence from the policy."""
    if not policy.evicts:
        return policy
    if type(policy) is policies.StreamingLLM:  # not a user's subclass, which never equals the library's policy
        if policy != policies.StreamingLLM():
            raise ValueError(f"expected the sinks of streaming_llm only in --sinks; got {policy}")
        return policies.StreamingLLM(sinks)
    if isinstance(policy, policies.StreamingLLM | TriAttention):
        # They have sinks themselves. TriAttention leaves them out of its normalisation.
        return dataclasses.replace(policy, sinks=max(policy.sinks, sinks))
    if isinstance(policy, LearnedGate):
        # In the gate, because the learner must know which keys no draw evicts.
        gate = dataclasses.replace(policy.weights, sinks=max(policy.weights.sinks, sinks))
        return dataclasses.replace(policy, weights=gate)
    if sinks and policy.gate is not None:
        raise ValueError(f"expected --sinks 0 with {policy}, because its draws would not be recorded; got {sinks}")
    return wrappers.Protect(policy, sinks=sinks) if sinks else policy


def trained_gate(policy: EvictionPolicy) -> Gate | None:
    """The policy's gate, if it has parameters."""
    return policy.weights if isinstance(policy, LearnedGate) and policy.weights.has_parameters else None


def parse_decode(text: str, sinks: int = 0) -> Decode:
    """Parses `dense`, `snapkv(window=16):512+128` or `my_policies.py:FadingH2O:512`: policy, budget, buffer.

    The result is named by the text without a file's path: `snapkv-window-16-512-128`. Raises ValueError or
    FileNotFoundError as `named_policy`, for another form, and for a missing or superfluous budget.
    """
    match = _DECODE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "expected policy, policy:budget or policy:budget+buffer, as in dense, snapkv:512 or "
            f"snapkv(window=16):512+128; got {text!r}"
        )
    policy = named_policy(match["policy"], sinks)
    budget, buffer = (None if match[name] is None else int(match[name]) for name in ("budget", "buffer"))
    if policy.evicts != (budget is not None):
        wanted = "a budget of keys, as in snapkv:512" if policy.evicts else "no budget, because all keys are kept"
        raise ValueError(f"expected {wanted}; got {text!r}")
    words = re.findall(r"[\w.-]+", match["parameters"] or "")
    parts = [match["object"] or _plain(match["name"]), *words, match["budget"], match["buffer"]]
    return Decode("-".join(part for part in parts if part), policy, budget, buffer)
