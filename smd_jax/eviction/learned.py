"""A trainable policy, which samples the evicted keys and records their log-probability."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from smd_jax.eviction.base import CacheView, EvictionPolicy, Scores
from smd_jax.eviction.policies import drawn_by_position
from smd_jax.eviction.statistics import NewestQueries, Statistic
from smd_jax.message.gate import Gate, LinearGate, gate_parameters
from smd_jax.typed_fields import check_types

NEWEST_QUERY = NewestQueries(1)


@dataclass(frozen=True)
class LearnedGate(EvictionPolicy):
    """Evicts keys by sampling without replacement, in proportion to exp(-logit) of a gate (`smd_jax.message.gate`).

    The lowest scores of logit - Gumbel noise are such a sample (Gumbel top-k, arXiv:1903.06059). The trajectory records
    order and log-probability (`smd_jax.message.draws`); `UpdateConfig.eviction_coef` trains the gate.

    Add the parameters of a `LinearGate` with `smd_jax.message.gate.add_gate`; an `AttentionGate` has none. The gate
    protects only its `sinks`.
    Inside `Protect` or `Pyramid` it evicts in the same way, but records no draws to train on.

    A group's rows share the draws made while their prompt is read, as with `Random`. Shared draws are recorded and
    replayed, but not trained: see `EvictionDraws.trained`.

    Attributes:
      greedy: evict the keys with the lowest logits, without sampling and without a record.

    Raises:
      TypeError: for a value that the type of its field does not allow.
    """

    weights: Gate = field(default_factory=LinearGate)
    greedy: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def gate(self) -> Gate | None:
        return None if self.greedy else self.weights

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        return (NEWEST_QUERY,)

    def protected(self, budget: int) -> int:
        del budget
        return self.weights.sinks

    def parameters(self, params: Any, layer: int) -> Any:
        return gate_parameters(params, self.weights, layer)

    def score(self, view: CacheView) -> Scores:
        logits = gate_logits(self.weights, view)
        if self.greedy:
            return logits
        # Explicit float32: with 64-bit numbers enabled, JAX's default dtype gives other numbers.
        return logits - drawn_by_position(view, lambda rng: jax.random.gumbel(rng, (), jnp.float32))


def gate_logits(gate: Gate, view: CacheView) -> Scores:
    """The gate's worth of each cached key."""
    queries = view.statistic(NEWEST_QUERY)
    newest = view.newest[:, None]
    logits = gate.logits(view.parameters, view.keys, view.values, view.positions, newest, queries)
    return gate.keep_sinks(logits, view.positions)[:, :, 0]
