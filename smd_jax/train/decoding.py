"""Ways of decoding that an evaluation compares: an eviction policy with its budget, sampling, quantisation.

Decode("short", SnapKV(), budget=256)          any policy, sampling configuration and quantisation
parse_decode("snapkv(window=16):512+128")      on a command line: eviction policy, budget, buffer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from smd_jax.config import check_whole
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.named import PATTERN, POLICIES, parse_policy
from smd_jax.eviction.policies import Dense
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.sampler.config import RolloutConfig
from smd_jax.typed_fields import check_types

# A name becomes part of metric names, in which loggers allow no other characters.
_NAME = re.compile(r"[\w.-]+")
_TEXT = re.compile(rf"(?P<policy>{PATTERN})(:(?P<budget>\d+)(\+(?P<buffer>\d+))?)?", re.DOTALL)


@dataclass(frozen=True)
class Decode:
    """One way of decoding; None takes the value of the evaluation's rollout configuration.

    Attributes:
      name: of its metrics, `eval/{name}/reward`: letters, digits, "_", "-" and ".".
      policy: eviction policy.
      budget: keys kept per layer and KV head. buffer: queries between two compressions.
      sampling: temperature and filters; `SamplingConfig(temperature=0.0)` is greedy, which training refuses.
      quant: bits of the cache; None is full precision.
    """

    name: str
    policy: EvictionPolicy = Dense()
    budget: int | None = None
    buffer: int | None = None
    sampling: SamplingConfig | None = None
    quant: QuantConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"expected a name of letters, digits, '_', '-' and '.'; got {self.name!r}")
        if self.budget is not None:
            check_whole("budget", self.budget, 1)
        if self.buffer is not None:
            check_whole("buffer", self.buffer, 1)

    def rollout(self, base: RolloutConfig) -> RolloutConfig:
        """`base` with this way of decoding.

        Raises:
          ValueError: if the two are incompatible, such as a quantisation group that does not divide the buffer.
        """
        return replace(
            base,
            budget=base.budget if self.budget is None else self.budget,
            buffer=base.buffer if self.buffer is None else self.buffer,
            sampling=base.sampling if self.sampling is None else self.sampling,
            quant=self.quant,
            # Chunks save memory if keys are evicted between them; a quantised prompt is read in one piece.
            prefill_chunk=base.prefill_chunk if self.policy.evicts and self.quant is None else None,
            # An evaluation does not read its masks.
            mask_storage="compact",
        )


def as_trained(policy: EvictionPolicy, config: RolloutConfig, name: str = "sampler") -> Decode:
    """The way in which a run decodes its rollouts."""
    return Decode(name, policy, config.budget, config.buffer, config.sampling, config.quant)


def parse_decode(text: str, policies: Mapping[str, EvictionPolicy] = POLICIES) -> Decode:
    """`dense`, `snapkv(window=16):512+128` or `my_policies.py:FadingH2O:512` -> Decode: an eviction policy as
    `parse_policy` reads it, keys kept, and queries between two compressions.

    Its name is the text with "-" between the parts, `snapkv-window-16-512-128`, without the path of a file. Sampling
    and quantisation are not part of the text: `dataclasses.replace` adds them.

    Args:
      policies: by name; case does not matter, and "-" stands for "_".

    Raises:
      ValueError: for any other text; lists the names of all policies.
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
    """`snapkv(window=16):512+128` -> `snapkv(window=16)`; other text is returned unchanged."""
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
    """The parts between commas outside of parentheses: `dense,rkv(window=4,kernel=3):512` has two."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def check_names(decodes: tuple[Decode, ...]) -> None:
    """Raises ValueError without any way of decoding, or if two have the same name."""
    names = [decode.name for decode in decodes]
    if not names:
        raise ValueError("expected at least one way of decoding; got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected ways of decoding with different names; got {', '.join(twice)} more than once")
