"""Ways of decoding by name, as a command line has them: eviction policy, keys kept, buffer.

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
    """`dense`, `snapkv(window=16):512+128` or `my_policies.py:FadingH2O:512` -> Decode: an eviction policy as
    `parse_policy` reads it, keys kept, and queries between two compressions.

    Its name is the text with "-" between the parts, `snapkv-window-16-512-128`, without the place of a file. Sampling
    and quantisation are not part of the text: `dataclasses.replace` adds them.

    Args:
      policies: which there are; other cases, and "-" for "_", are taken for the same name.

    Raises:
      ValueError: says what was expected, with the names of all policies.
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
    found = parse_policy(written, policies)
    if found.policy.evicts != (match["budget"] is not None):
        wanted = (
            f"a budget of keys, as in {written}:512" if found.policy.evicts else f"{written} alone, which keeps all"
        )
        raise ValueError(f"expected {wanted}; got {text!r}")
    if match["budget"] is None:
        return Decode(found.label, found.policy)
    buffer = None if match["buffer"] is None else int(match["buffer"])
    numbers = [match["budget"], *([] if buffer is None else [match["buffer"]])]
    return Decode("-".join([found.label, *numbers]), found.policy, int(match["budget"]), buffer)


def policy_text(text: str) -> str:
    """`snapkv(window=16):512+128` -> `snapkv(window=16)`; what is no way of decoding stays as it is."""
    match = _TEXT.fullmatch(text.strip())
    return text if match is None else match["policy"].strip()


def parse_decodes(text: str, policies: Mapping[str, EvictionPolicy] = POLICIES) -> tuple[Decode, ...]:
    """`dense,snapkv:512,rkv:512` -> one Decode each.

    Raises:
      ValueError: as `parse_decode`, and for two of one name.
    """
    decodes = tuple(parse_decode(part, policies) for part in split_decodes(text))
    check_names(decodes)
    return decodes


def split_decodes(text: str) -> list[str]:
    """The parts between commas, those inside of parentheses aside: `dense,rkv(window=4,kernel=3):512` has two."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
