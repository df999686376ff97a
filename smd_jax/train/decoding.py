"""Ways of decoding that an evaluation compares: an eviction policy with its budget, sampling, quantisation.

Decode("short", SnapKV(), budget=256)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from smd_jax.config import check_whole
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import Dense
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.sampler.config import RolloutConfig
from smd_jax.typed_fields import check_types

# A name becomes part of metric names, in which loggers allow no other characters.
_NAME = re.compile(r"[\w.-]+")


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
        )


def as_trained(policy: EvictionPolicy, config: RolloutConfig, name: str = "sampler") -> Decode:
    """The way in which a run decodes its rollouts."""
    return Decode(name, policy, config.budget, config.buffer, config.sampling, config.quant)


def check_names(decodes: tuple[Decode, ...]) -> None:
    """Raises ValueError without any way of decoding, or if two have the same name."""
    names = [decode.name for decode in decodes]
    if not names:
        raise ValueError("expected at least one way of decoding; got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected ways of decoding with different names; got {', '.join(twice)} more than once")
