"""Interface of eviction policies: a score for every key of a layer's cache, higher = keep.

To add one, write a frozen dataclass with `score`, and add a row in `tests/under_test.py`.

Policies see a `CacheView`: keys in column order, empty slots first, so the newest key is in the last slot. Compute
scores in float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.eviction.statistics import State, Statistic
from smd_jax.message.gate import Gate
from smd_jax.message.spans import TokenSpans
from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_settings


class CacheView(PyTreeNode):
    """A layer's cache at a compression, after the attention of the newest query.

    Attributes:
      keys, values: `[batch, kv_heads, slots, head_dim]`, keys after RoPE; dequantised in a quantised cache.
      valid: `[batch, kv_heads, slots]` false for empty slots, which are left of all valid ones. In a finished row they
        are also at the right; its scores do not matter.
      positions: `[batch, kv_heads, slots]` position of the key in its own sequence, negative where empty.
      newest: `[batch]` position of the newest query.
      number: number of the newest query, for ring buffers, see `Observation.number`.
      states: states of the policy's statistics, in order; policies call `statistic(...)`.
      rng: `[batch]` one PRNG key per row, new at every compression and layer; the key is consumed.
      budget: keys to keep. Static.
      declared: the policy's statistics. Static.
      parameters: the policy's parameters for this layer, see `EvictionPolicy.parameters`.
    """

    keys: Float[Array, "batch kv_heads slots head_dim"]
    values: Float[Array, "batch kv_heads slots head_dim"]
    valid: Bool[Array, "batch kv_heads slots"]
    positions: Int[Array, "batch kv_heads slots"]
    newest: Int[Array, " batch"]
    number: Int[Array, ""]
    states: tuple[Any, ...]
    rng: Key[Array, " batch"]
    budget: int = struct.field(pytree_node=False)
    declared: tuple[Statistic[Any], ...] = struct.field(pytree_node=False, default=())
    parameters: Any = ()

    def statistic(self, kind: Statistic[State]) -> State:
        """The state of one of the policy's statistics; per-slot arrays are in the order of the keys.

        Raises:
          ValueError: if the policy does not declare it with these parameters.
        """
        if kind not in self.declared:
            declared = ", ".join(map(str, self.declared)) or "none"
            raise ValueError(f"expected a statistic that the policy declares in `statistics`: {declared}; got {kind}")
        return self.states[self.declared.index(kind)]


Scores = Float[Array, "batch kv_heads slots"]


@dataclass(frozen=True)
class EvictionPolicy:
    """Base of all policies."""

    @property
    def evicts(self) -> bool:
        """Whether a budget limits the cache; False only for `Dense`, and for `OnTokens` around it."""
        return True

    @property
    def spans(self) -> TokenSpans | None:
        """Spans that are evicted when a token is written; None: only the budget evicts."""
        return None

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Statistics to keep with the keys; `score` reads their states from the view."""
        return ()

    @property
    def gate(self) -> Gate | None:
        """The gate from whose logits evictions are sampled, so that their log-probability is recorded; None without
        a trainable gate."""
        return None

    def parameters(self, params: Any, layer: int) -> Any:
        """The parameters that `score` reads as `view.parameters`: a pytree of arrays.

        Args:
          params: the sampler's parameters, of the model and its additions such as gates.
        """
        return ()

    def protected(self, budget: int) -> int:
        """Number of keys that are always kept; the budget must hold them."""
        return 0

    def layer_budgets(self, budget: int, num_layers: int) -> tuple[int, ...]:
        """Keys kept in each layer: `num_layers` whole numbers."""
        return (budget,) * num_layers

    def score(self, view: CacheView) -> Scores:
        """`[batch, kv_heads, slots]`, higher = keep. NaN ranks lowest. Values at empty slots are ignored."""
        raise TypeError(f"{type(self).__name__} has no score: it never evicts, or its class must define one")


def check_budget(policy: EvictionPolicy, budget: int, num_layers: int) -> None:
    """Raises ValueError unless `policy` gives every layer a budget that holds the keys that it protects."""
    budgets = policy.layer_budgets(budget, num_layers)
    is_whole = isinstance(budgets, tuple | list) and all(
        type(size) is int or isinstance(size, np.integer) for size in budgets
    )
    if not is_whole or len(budgets) != num_layers:
        raise ValueError(
            f"expected layer_budgets of {type(policy).__name__} as a tuple of {num_layers} whole numbers, one for each "
            f"layer; got {budgets!r}"
        )
    # Per layer, because budgets may differ between layers, and a policy may protect a share of them.
    for layer, size in enumerate(budgets):
        needed = max(policy.protected(size), 1)
        if size < needed:
            raise ValueError(
                f"expected a budget of at least {needed} keys (sinks + window that {policy} protects); "
                f"got {size} in layer {layer} (budget {budget})"
            )


def check_policy(policy: object) -> None:
    """Raises TypeError unless the object is a hashable instance of EvictionPolicy."""
    if not isinstance(policy, EvictionPolicy):
        hint = f": {policy.__name__}()?" if isinstance(policy, type) else ""
        raise TypeError(f"expected an eviction policy, an instance of an EvictionPolicy; got {policy!r}{hint}")
    check_settings(policy)
    try:
        hash(policy)
    except TypeError as error:
        raise TypeError(
            f"expected a hashable eviction policy, because programs are compiled once per policy; got {policy!r}: "
            f"{error}. Use numbers, texts and tuples as fields"
        ) from error


def check_at_least(policy: EvictionPolicy, least: int, *fields: str) -> None:
    """Raises ValueError unless a policy's numbers, such as its sinks, are at least `least`."""
    for field in fields:
        value = getattr(policy, field)
        # Not `value < least`, which is false for NaN.
        if not value >= least:
            raise ValueError(f"expected {type(policy).__name__}.{field} >= {least}; got {value}")


def check_share(policy: EvictionPolicy, field: str) -> None:
    """Raises ValueError unless a policy's number is between 0 and 1."""
    value = getattr(policy, field)
    if not 0 <= value <= 1:
        raise ValueError(f"expected {type(policy).__name__}.{field} from 0 to 1, because it is a share; got {value}")


def scores_of(policy: EvictionPolicy, view: CacheView) -> Scores:
    """`policy.score(view)` as floats, one per slot; a user's policy may return whole numbers or booleans.

    Raises:
      ValueError: for scores of another shape. Broadcast, a row's scores could become those of a head.
    """
    scores, expected = policy.score(view), view.valid.shape
    if jnp.shape(scores) != expected:
        raise ValueError(
            f"expected {type(policy).__name__}.score to give [rows, kv_heads, slots] = {list(expected)}; got "
            f"{None if scores is None else list(jnp.shape(scores))}"
        )
    return scores if jnp.issubdtype(scores.dtype, jnp.floating) else at_least_float32(scores)


def newest_slots(view: CacheView, count: int) -> Bool[Array, "1 1 slots"]:
    """The `count` newest slots."""
    slots = view.keys.shape[2]
    # Slots are in column order, so the newest keys are last in every row and head.
    return (jnp.arange(slots) >= slots - count)[None, None]


def protect(scores: Scores, protected: Bool[Array, ...]) -> Scores:
    """Ranks the protected slots above all others."""
    # Infinity, because no finite score can reach it. Empty slots may be among them: `smd_jax.cache.slots.select`
    # ignores their scores.
    return jnp.where(protected, jnp.inf, scores)


def at_least_float32(x: Float[Array, ...] | Int[Array, ...] | Bool[Array, ...]) -> Float[Array, ...]:
    """The same numbers in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
