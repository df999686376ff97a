"""What an eviction policy is: a score for every key of a layer's cache, higher = keep; the sampler does the rest.

To add one: a frozen dataclass with `score`, a row in `tests/under_test.py`. Nothing in the library needs to know it.

All see a `CacheView`: the keys in column order, empty slots first, so the newest key is the last slot. Scores are
computed in float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax.eviction.statistics import State, Statistic
from smd_jax.message.gate import Gate
from smd_jax.message.spans import TokenSpans
from smd_jax.pytrees import any_leaves


@any_leaves
class CacheView(struct.PyTreeNode):
    """What a policy may look at when a layer is compressed, after the attention of the newest query.

    Attributes:
      keys, values: `[batch, kv_heads, slots, head_dim]`, keys after RoPE; those of a quantised cache as it is read.
      valid: `[batch, kv_heads, slots]` false for empty slots; they lie left of all valid ones (in a row that has ended
        also at the right, where its scores no longer matter).
      positions: `[batch, kv_heads, slots]` position of the key in its own sequence, negative where empty.
      newest: `[batch]` position of the newest query.
      number: of the newest query, by which rings go, see `Observation.number`.
      states: of the policy's statistics, in their order; a policy asks `statistic(...)` for them.
      rng: `[batch]` one PRNG key per row, new at every compression and layer; the key is consumed.
      budget: keys that will be kept. Static.
      declared: the policy's statistics. Static.
      parameters: what the policy takes of the parameters for this layer, see `EvictionPolicy.parameters`.
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
        """The state of one of the policy's statistics; whatever belongs to a slot lies as the keys do.

        Raises:
          ValueError: if the policy doesn't declare it, or with other parameters.
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
        """Spans that go when a token is written, whatever their scores; None: nothing but the budget evicts."""
        return None

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """What is to be kept beside the keys; `score` asks the view for the states."""
        return ()

    @property
    def gate(self) -> Gate | None:
        """Whose logits the choice of keys is a draw from, so that its log-probability is recorded; None: of none, and
        the choice has no probability that a learner could know."""
        return None

    def parameters(self, params: Any, layer: int) -> Any:
        """What `score` needs of the parameters, as `view.parameters`: a pytree of arrays.

        Args:
          params: as the sampler has them, of the model and whatever lies beside it.
        """
        del params, layer
        return ()

    def protected(self, budget: int) -> int:
        """Keys that are kept whatever their score; the budget must hold them."""
        del budget
        return 0

    def layer_budgets(self, budget: int, num_layers: int) -> tuple[int, ...]:
        """Keys kept in each layer."""
        return (budget,) * num_layers

    def score(self, view: CacheView) -> Scores:
        """`[batch, kv_heads, slots]`, higher = keep. Values at empty slots are ignored."""
        raise TypeError(f"{type(self).__name__} has no score: it never evicts, or its class must define one")


def check_budget(policy: EvictionPolicy, budget: int, num_layers: int) -> None:
    """Raises ValueError if a layer cannot hold the keys that `policy` protects, TypeError for what is no policy."""
    check_policy(policy)
    # Layer by layer, because a policy may give each its own budget, and protect a share of it.
    for layer, size in enumerate(policy.layer_budgets(budget, num_layers)):
        needed = max(policy.protected(size), 1)
        if size < needed:
            raise ValueError(
                f"expected a budget of at least {needed} keys (sinks + window that {policy} protects); "
                f"got {size} in layer {layer} (budget {budget})"
            )


def check_policy(policy: object) -> None:
    """Raises TypeError for what is no eviction policy, such as a class of them."""
    if not isinstance(policy, EvictionPolicy):
        hint = f": {policy.__name__}()?" if isinstance(policy, type) else ""
        raise TypeError(f"expected an eviction policy, an instance of an EvictionPolicy; got {policy!r}{hint}")


def check_at_least(policy: EvictionPolicy, field: str, value: float | int, least: int) -> None:
    """Raises ValueError unless a number of a policy, of sinks or queries for example, is `least` or more."""
    # Every comparison with NaN is false, so NaN is refused here, as it would not be by `value < least`.
    if not value >= least:
        raise ValueError(f"expected {type(policy).__name__}.{field} >= {least}; got {value}")


def check_share(policy: EvictionPolicy, field: str, value: float | int) -> None:
    """Raises ValueError unless a number of a policy is a share."""
    if not 0 <= value <= 1:
        raise ValueError(f"expected {type(policy).__name__}.{field} from 0 to 1, because it is a share; got {value}")


def newest_slots(view: CacheView, count: int) -> Bool[Array, "1 1 slots"]:
    """The `count` newest slots."""
    slots = view.keys.shape[2]
    # Slots are in column order, so the newest keys are the last, in every row and head alike.
    return (jnp.arange(slots) >= slots - count)[None, None]


def protect(scores: Scores, protected: Bool[Array, ...]) -> Scores:
    """Puts the protected slots above all others."""
    # Infinity rather than a large number: no finite score can reach it. Empty slots may be among them, because
    # `smd_jax.cache.slots.select` ignores what they score.
    return jnp.where(protected, jnp.inf, scores)


def at_least_float32(x: Float[Array, ...]) -> Float[Array, ...]:
    """The same numbers in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
