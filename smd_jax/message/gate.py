"""Eviction gates: a logit for each key, from the key, its value, its position, its age and the newest query.

    params    embed … norm      eviction_gate/layers_0, layers_1, …
              └─ the model ─┘   └─ a pytree of the gate's for every layer ─┘

The gate's parameters are stored with the model's under a name that models ignore, so optimizer, sharding and
checkpoints include them. A sampler that samples evictions from a gate's logits (`smd_jax.eviction.LearnedGate`)
is a policy over keys and tokens, and the learner can recompute both probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from smd_jax.typed_fields import check_types

EVICTION_GATE = "eviction_gate"
KEPT = 1e9  # logit of a protected key; finite, because differences of infinities are NaN

Keys = Float[Array, "batch kv_heads keys head_dim"]
Positions = Int[Array, "batch heads_or_one keys"]
Newest = Int[Array, "batch compressions"]
Queries = Float[Array, "batch heads compressions head_dim"]
Logits = Float[Array, "batch kv_heads compressions keys"]


@dataclass(frozen=True)
class Gate:
    """Base of all gates: a frozen, hashable dataclass, usable as a static argument. A subclass defines `logits`, and
    `init` unless it sets `has_parameters` to False.

    Attributes:
      has_parameters: whether the gate has parameters of its own.
      sinks: number of first keys of a sequence that are never evicted. Pretrained models need them (arXiv:2309.17453),
        also before the gate has learned it.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if `sinks` is negative.
    """

    has_parameters: ClassVar[bool] = True

    sinks: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.sinks < 0:
            raise ValueError(f"expected sinks >= 0; got {self.sinks}")

    def init(self, kv_heads: int, head_dim: int, dtype: DTypeLike) -> Any:
        """Initial parameters of one layer, a mapping of arrays."""
        raise TypeError(f"{type(self).__name__} has no init: its class must define one, or set has_parameters = False")

    def logits(
        self, parameters: Any, keys: Keys, values: Keys, positions: Positions, newest: Newest, queries: Queries
    ) -> Logits:
        """Logit of each key at each compression, `[batch, kv_heads, compressions, keys]`, higher = keep, in float32 or
        wider. Logits of empty slots (negative positions) and of keys after the compression are ignored.

        The sampler passes one compression and the cached keys, the learner all compressions and keys. Both must agree,
        so a key's logit may not depend on the other keys.

        Args:
          parameters: parameters of the layer.
          keys, values: `[batch, kv_heads, keys, head_dim]` as cached, keys after RoPE.
          positions: `[batch, kv_heads or 1, keys]` of the keys in their own sequence.
          newest: `[batch, compressions]` position of the newest query at each compression.
          queries: `[batch, heads, compressions, head_dim]` the newest query at each compression, after RoPE.
        """
        raise TypeError(f"{type(self).__name__} has no logits: its class must define them")

    def keep_sinks(self, logits: Logits, positions: Positions) -> Logits:
        """The logits from which evictions are drawn: `KEPT` for the sinks."""
        return jnp.where(positions[:, :, None] < self.sinks, KEPT, logits) if self.sinks else logits


@dataclass(frozen=True)
class LinearGate(Gate):
    """A logit that is linear in the key's features and changes with its age:

        logit = a(x) + b(x) log(1 + age)        x = (key, value, 1, log(1 + position)), age = newest - position

    `a` and `b` are linear, per KV head, and start at zero: all keys have the same logit, as in `Random`.
    """

    def init(self, kv_heads: int, head_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        return {"kernel": jnp.zeros((kv_heads, 2 * head_dim + 2, 2), dtype)}

    def logits(
        self, parameters: Any, keys: Keys, values: Keys, positions: Positions, newest: Newest, queries: Queries
    ) -> Logits:
        del queries
        wide = jnp.promote_types(keys.dtype, jnp.float32)
        # Cast to the compute dtype first, because the sampler casts its parameters and the learner does not.
        kernel = parameters["kernel"].astype(keys.dtype).astype(wide)
        places = jnp.broadcast_to(positions[..., None], (*keys.shape[:3], 1))
        features = [keys.astype(wide), values.astype(wide), jnp.ones(places.shape, wide), _log1p(places, wide)]
        # A small product per key. Accelerators multiply float32 in fewer bits by default.
        logits = jnp.einsum("bhsf,hfo->bhso", jnp.concatenate(features, axis=-1), kernel, precision="highest")
        ages = _log1p(newest[:, None, :, None] - positions[:, :, None], wide)
        return logits[:, :, None, :, 0] + logits[:, :, None, :, 1] * ages


@dataclass(frozen=True)
class AttentionGate(Gate):
    """The model's own attention score as logit, without parameters of a gate:

        logit = mean over the query heads of a KV head of  q · k / sqrt(head_dim) / temperature

    q is the newest query. At temperature 1, with one query head per KV head and without a soft cap, a logit is the
    logarithm of the key's attention weight plus a constant of the query, which draws do not depend on. The eviction
    term trains the model's queries and keys, so the same weights learn attention and eviction, as in Neural Garbage
    Collection (arXiv:2604.18002). That paper draws the kept keys; `LearnedGate` draws the evicted
    ones.

    Attributes:
      temperature: a lower one makes the evictions less random.

    Raises:
      ValueError: for a temperature that is not positive and finite.
    """

    has_parameters: ClassVar[bool] = False

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"expected a positive, finite temperature; got {self.temperature}")

    def logits(
        self, parameters: Any, keys: Keys, values: Keys, positions: Positions, newest: Newest, queries: Queries
    ) -> Logits:
        del parameters, values, newest
        wide = jnp.promote_types(keys.dtype, jnp.float32)
        batch, kv_heads, _, head_dim = keys.shape
        grouped = queries.astype(wide).reshape(batch, kv_heads, -1, *queries.shape[2:])
        # The mean of products is the product with the mean query.
        products = jnp.einsum("bhcd,bhsd->bhcs", grouped.mean(axis=2), keys.astype(wide), precision="highest")
        return products / (math.sqrt(head_dim) * self.temperature)


def _log1p(count: Int[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    # Empty slots have negative positions, and later keys negative ages.
    return jnp.log1p(jnp.maximum(count, 0).astype(dtype))


def add_gate(
    params: Mapping[str, Any],
    gate: Gate,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike = jnp.float32,
) -> dict[str, Any]:
    """Adds an untrained gate to the parameters; nothing for a gate without parameters.

    Args:
      params: parameters of the policy, a mapping; its leaves stay the same objects.
      num_layers, num_kv_heads, head_dim: of the model.
      dtype: dtype of the gate's parameters, float32 or wider.

    Raises:
      ValueError: if the parameters already have a gate.
    """
    if EVICTION_GATE in params:
        raise ValueError(f"expected parameters without a gate, which would be lost; got {sorted(params)}")
    if not gate.has_parameters:
        return dict(params)
    layers = {f"layers_{layer}": gate.init(num_kv_heads, head_dim, dtype) for layer in range(num_layers)}
    return {**params, EVICTION_GATE: layers}


def drop_gate(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without the gate, for `save_checkpoint`."""
    return {name: leaf for name, leaf in params.items() if name != EVICTION_GATE}


def gate_parameters(params: Mapping[str, Any], gate: Gate, layer: int) -> Any:
    """The gate's parameters of one layer; () for a gate without parameters.

    Raises:
      ValueError: if the parameters have no gate.
    """
    if not gate.has_parameters:
        return ()
    if EVICTION_GATE not in params:
        raise ValueError(
            f"expected parameters with {EVICTION_GATE!r}, because a LearnedGate reads them: "
            f"smd.eviction.add_gate(params, gate, …); got {sorted(params)}"
        )
    return params[EVICTION_GATE][f"layers_{layer}"]
