"""Parses ways of decoding from command-line texts: eviction policy, budget, buffer.

parse_decode("snapkv(window=16):512+128")
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from smd_jax.commands.policy_names import PATTERN, parse_policy
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.named import POLICIES
from smd_jax.train.decoding import Decode, check_names

_TEXT = re.compile(rf"(?P<policy>{PATTERN})(:(?P<budget>\d+)(\+(?P<buffer>\d+))?)?", re.DOTALL)


def parse_decode(text: str, policies: Mapping[str, EvictionPolicy] = POLICIES) -> Decode:
    """Parses `dense`, `snapkv(window=16):512+128` or `my_policies.py:FadingH2O:512`.

    The parts are a policy for `parse_policy`, the budget, and the buffer. The result is named by its parts without a
    file's path: `snapkv-window-16-512-128`. Set sampling and quantisation with `dataclasses.replace`.

    Args:
      policies: the known policies by name; case, and "-" versus "_", do not matter.

    Raises:
      ValueError: an invalid text; the message lists all policies.
    """
    known = ", ".join(policies)
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"expected policy, policy:budget or policy:budget+buffer, as in dense, snapkv:512 or "
            f"snapkv(window=16):512+128, with one of the eviction policies {known}, or one of your own as "
            f"path/to/file.py:Class; got {text!r}"
        )
    written = match["policy"].strip()
    named = parse_policy(written, policies)
    if named.policy.evicts != (match["budget"] is not None):
        wanted = (
            f"a budget of keys, as in {written}:512"
            if named.policy.evicts
            else f"no budget for {written}, which keeps all keys"
        )
        raise ValueError(f"expected {wanted}; got {text!r}")
    if match["budget"] is None:
        return Decode(named.label, named.policy)
    buffer = None if match["buffer"] is None else int(match["buffer"])
    numbers = [match["budget"], *([] if buffer is None else [match["buffer"]])]
    return Decode("-".join([named.label, *numbers]), named.policy, int(match["budget"]), buffer)


def policy_text(text: str) -> str:
    """`snapkv(window=16):512+128` -> `snapkv(window=16)`; any other text is returned unchanged."""
    match = _TEXT.fullmatch(text.strip())
    return text if match is None else match["policy"].strip()


def parse_decodes(text: str, policies: Mapping[str, EvictionPolicy] = POLICIES) -> tuple[Decode, ...]:
    """`dense,snapkv:512,rkv:512` -> one Decode each.

    Raises:
      ValueError: as `parse_decode`; two of the same name.
    """
    decodes = tuple(parse_decode(part, policies) for part in split_decodes(text))
    check_names(decodes)
    return decodes


def split_decodes(text: str) -> list[str]:
    """Splits at commas outside parentheses: `dense,rkv(window=4,kernel=3):512` has two parts."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
