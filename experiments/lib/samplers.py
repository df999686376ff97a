"""Samplers of the studies: an eviction policy with its budget and buffer, named as in "tova:14+2"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, TOVA, Dense, Knorm, LearnedGate, Random, Recent, SnapKV, StreamingLLM
from smd_jax.message.gate import AttentionGate
from smd_jax.message.sampling import SamplingConfig
from smd_jax.train.evaluation import Decode

# Windows and sinks for budgets of about ten keys.
POLICIES: dict[str, EvictionPolicy] = {
    "tova": TOVA(),  # one choice for all heads, as in the paper
    "tova-heads": TOVA(shared=False),  # one choice per KV head
    "h2o": H2O(),
    "snapkv": SnapKV(window=4, kernel=1),
    "streaming": StreamingLLM(),
    "random": Random(),
    "knorm": Knorm(),
    "recent": Recent(),
    "gate": LearnedGate(),
    "attention": LearnedGate(AttentionGate()),
    "attention-cold": LearnedGate(AttentionGate(temperature=0.3)),
}
_TEXT = re.compile(r"(?P<policy>[a-z0-9-]+):(?P<budget>\d+)\+(?P<buffer>\d+)")


@dataclass(frozen=True)
class Sampler:
    """A cache of `budget` + `buffer` slots per layer and KV head, with its eviction policy."""

    policy: str
    budget: int
    buffer: int

    @property
    def eviction(self) -> EvictionPolicy:
        return POLICIES[self.policy]

    @property
    def label(self) -> str:
        return f"{self.policy}:{self.budget}+{self.buffer}"


FULL_CACHE = Dense()


def decodings(policy: EvictionPolicy) -> tuple[Decode, ...]:
    """Under the budget and with the full cache, at the sampler's temperature and greedily."""
    greedy = SamplingConfig(temperature=0.0)
    return (
        Decode("sparse", policy),
        Decode("dense", FULL_CACHE),
        Decode("sparse_greedy", policy, sampling=greedy),
        Decode("dense_greedy", FULL_CACHE, sampling=greedy),
    )


def sampler_of(label: str) -> Sampler:
    """ "tova:14+2" -> Sampler("tova", 14, 2).

    Raises:
      ValueError: for another form, or an unknown policy.
    """
    found = _TEXT.fullmatch(label)
    if found is None or found["policy"] not in POLICIES:
        raise ValueError(f"expected a sampler as POLICY:BUDGET+BUFFER with one of {sorted(POLICIES)}; got {label!r}")
    return Sampler(found["policy"], int(found["budget"]), int(found["buffer"]))
