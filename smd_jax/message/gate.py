"""A gate says how much each key is worth, from what sampler and learner both have: the key itself, its value, its age.

    params    embed … norm      eviction_gate/layers_0, layers_1, …
              └─ the model ─┘   └─ a pytree of the gate's for every layer ─┘

Its parameters lie beside the model's, under a name that no model looks at: optimizer, sharding and checkpoints carry
them along. A sampler that evicts by draws from a gate's logits (`smd_jax.eviction.learned.LearnedGate`) is a policy
over keys as well as over tokens, and the learner can recompute the probabilities of both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from smd_jax.typed_fields import check_types

EVICTION_GATE = "eviction_gate"
KEPT = 1e9  # logit of a key that no draw takes; finite, because differences of infinities would be NaN


@dataclass(frozen=True)
class Gate:
    """Base of all gates: a frozen dataclass, hashable, because it is a static argument. To add one: a class of your own
    with these two methods, in any file."""

    @property
    def protected(self) -> int:
        """Keys that no draw takes; the budget must hold them."""
        return 0

    @abstractmethod
    def init(self, kv_heads: int, head_dim: int, dtype: DTypeLike) -> Any:
        """Fresh parameters of one layer, a mapping of arrays."""

    @abstractmethod
    def logits(
        self,
        parameters: Any,
        keys: Float[Array, "batch kv_heads keys head_dim"],
        values: Float[Array, "batch kv_heads keys head_dim"],
        positions: Int[Array, "batch heads_or_one keys"],
        newest: Int[Array, "batch compressions"],
    ) -> Float[Array, "batch kv_heads compressions keys"]:
        """What each key is worth at each compression, higher = keep, in float32 or wider; defined, but meaningless,
        for places without a key (negative positions) and for keys that come later than the compression.

        The sampler asks for one compression and the keys that are in the cache, the learner for all of them at once.
        The two must agree, so nothing but the arguments may enter: no mean over the keys, for example, because the
        learner's are others.

        Args:
          parameters: of the layer.
          keys, values: keys after RoPE, as they are cached.
          positions: of the keys in their own sequence. newest: position of the newest query at each compression.
        """


@dataclass(frozen=True)
class LinearGate(Gate):
    """A key's worth, linear in its features, and how that changes with its age:

        logit = a(x) + b(x) log(1 + age)        x = (key, value, 1, log(1 + position)), age = newest - position

    `a` and `b` are linear, each KV head has its own. Zeros at first: every key is worth the same, and a draw is that of
    `Random`.

    Attributes:
      sinks: first keys of a sequence that never go. Pretrained models need them (arXiv:2309.17453), and would need
        them while a fresh gate still learns that.

    Raises:
      TypeError: for a value that the type of its field does not allow.
      ValueError: if `sinks` is negative.
    """

    sinks: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.sinks < 0:
            raise ValueError(f"expected sinks >= 0; got {self.sinks}")

    @property
    def protected(self) -> int:
        return self.sinks

    def init(self, kv_heads: int, head_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        return {"kernel": jnp.zeros((kv_heads, 2 * head_dim + 2, 2), dtype)}

    def logits(
        self,
        parameters: Any,
        keys: Float[Array, "batch kv_heads keys head_dim"],
        values: Float[Array, "batch kv_heads keys head_dim"],
        positions: Int[Array, "batch heads_or_one keys"],
        newest: Int[Array, "batch compressions"],
    ) -> Float[Array, "batch kv_heads compressions keys"]:
        wide = jnp.promote_types(keys.dtype, jnp.float32)
        # In the compute dtype first: the sampler converts its parameters once, the learner doesn't.
        kernel = parameters["kernel"].astype(keys.dtype).astype(wide)
        places = jnp.broadcast_to(positions[..., None], (*keys.shape[:3], 1))
        features = [keys.astype(wide), values.astype(wide), jnp.ones(places.shape, wide), _log1p(places, wide)]
        # A product of a few numbers for each key. The default on accelerators is not float32's.
        worth = jnp.einsum("bhsf,hfo->bhso", jnp.concatenate(features, axis=-1), kernel, precision="highest")
        ages = _log1p(newest[:, None, :, None] - positions[:, :, None], wide)
        logits = worth[:, :, None, :, 0] + worth[:, :, None, :, 1] * ages
        return jnp.where(positions[:, :, None] < self.sinks, KEPT, logits) if self.sinks else logits


def _log1p(count: Int[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    # Places without a key have negative positions, and keys to come negative ages.
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
    """The parameters with a fresh gate beside the model's.

    Args:
      params: of the policy, a mapping; its leaves stay the same objects.
      num_layers, num_kv_heads, head_dim: of the model. dtype: of the gate's parameters, float32 or wider.

    Raises:
      ValueError: if there is a gate already.
    """
    if EVICTION_GATE in params:
        raise ValueError(f"expected parameters without a gate, which would be lost; got {sorted(params)}")
    layers = {f"layers_{layer}": gate.init(num_kv_heads, head_dim, dtype) for layer in range(num_layers)}
    return {**params, EVICTION_GATE: layers}


def drop_gate(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the model alone, for `save_checkpoint`; of a model without a gate the same."""
    return {name: leaf for name, leaf in params.items() if name != EVICTION_GATE}


def gate_parameters(params: Mapping[str, Any], layer: int) -> Any:
    """The gate's parameters of one layer.

    Raises:
      ValueError: if the parameters have no gate.
    """
    if EVICTION_GATE not in params:
        raise ValueError(
            f"expected parameters with {EVICTION_GATE!r}, because a LearnedGate chooses by it: "
            f"smd.eviction.add_gate(params, gate, …); got {sorted(params)}"
        )
    return params[EVICTION_GATE][f"layers_{layer}"]
