"""The library's eviction policies by name, with their default parameters."""

from __future__ import annotations

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.learned import LearnedGate
from smd_jax.eviction.policies import H2O, RKV, TOVA, Dense, KeyDiff, Knorm, Random, Recent, SnapKV, StreamingLLM

POLICIES: dict[str, EvictionPolicy] = {
    "dense": Dense(),
    "gate": LearnedGate(),
    "h2o": H2O(),
    "keydiff": KeyDiff(),
    "knorm": Knorm(),
    "random": Random(),
    "recent": Recent(),
    "rkv": RKV(),
    "snapkv": SnapKV(),
    "streaming_llm": StreamingLLM(),
    "tova": TOVA(),
}
