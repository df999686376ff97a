"""Turns a module of flax.nnx or Equinox into a `LanguageModel`.

    model, params = from_nnx(module, shape, hidden, logits)

    hidden(module, tokens, positions, attention) -> states     calls attention(q, k, v) once per layer, in order
    logits(module, states) -> logits                           float32 or wider

`attention` has the layout of `jax.nn.dot_product_attention`: queries `[batch, tokens, heads, head_dim]`, keys and
values `[batch, tokens, kv_heads, head_dim]`. Queries and keys must already contain their positions (RoPE, or positions
that were added to the embeddings), because the cache stores them. The module itself applies no mask.

The two functions are static arguments of jitted functions: define them once, at module level. `attention` counts its
calls, so do not call it under `jax.checkpoint`, `jax.lax.scan` or `jax.vmap`; a model that needs these implements
`smd_jax.model.protocol.LanguageModel` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.model.protocol import Attend, LayerState, ModelShape, Params

if TYPE_CHECKING:
    from flax import nnx


class AttentionCalls:
    """`attention(q, k, v)` of a forward pass: the i-th call attends in layer i and stores the layer's new state.

    Attributes:
      states: the new state of every layer attended so far.
    """

    def __init__(self, attend: Attend, layers: tuple[LayerState, ...]):
        self._attend = attend
        self._layers = layers
        self.states: tuple[LayerState, ...] = ()

    def __call__(
        self,
        q: Float[Array, "batch tokens heads head_dim"],
        k: Float[Array, "batch tokens kv_heads head_dim"],
        v: Float[Array, "batch tokens kv_heads head_dim"],
    ) -> Float[Array, "batch tokens heads head_dim"]:
        """Attends in the next layer.

        Raises:
          ValueError: at the call after the one of the last layer.
        """
        index = len(self.states)
        if index == len(self._layers):
            raise ValueError(f"expected one attention call per layer, {index} of them; got another one")
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out, state = self._attend(q, k, v, self._layers[index])
        self.states += (state,)
        return out.swapaxes(1, 2)


HiddenFunction = Callable[[Any, Int[Array, "batch tokens"], Int[Array, "batch tokens"], AttentionCalls], Array]
LogitsFunction = Callable[[Any, Float[Array, "batch tokens hidden_size"]], Array]


@dataclass(frozen=True)
class ModuleModel:
    """A `LanguageModel` around a module.

    Attributes:
      module: the module without its parameters.
      shape: see ModelShape.
      hidden_of, logits_of: the two functions of this file's docstring.
    """

    module: NNXModule | EquinoxModule
    shape: ModelShape
    hidden_of: HiddenFunction
    logits_of: LogitsFunction

    def encode_positions(self, positions: Int[Array, "batch tokens"]) -> Int[Array, "batch tokens"]:
        return positions

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "batch tokens"],
        positions: Int[Array, "batch tokens"],
        attend: Attend,
        layers: tuple[LayerState, ...],
    ) -> tuple[Float[Array, "batch tokens hidden_size"], tuple[LayerState, ...]]:
        calls = AttentionCalls(attend, layers)
        hidden = self.hidden_of(self.module.with_params(params), tokens, positions, calls)
        if len(calls.states) != len(layers):
            raise ValueError(f"expected one attention call per layer, {len(layers)} of them; got {len(calls.states)}")
        return hidden, calls.states

    def logits(self, params: Params, hidden: Float[Array, "batch tokens hidden_size"]) -> Array:
        return self.logits_of(self.module.with_params(params), hidden)

    def compute_params(self, params: Params) -> Params:
        return params


@dataclass(frozen=True)
class NNXModule:
    """The graph of a flax.nnx module, and its variables that are not parameters."""

    graph: Any
    constants: Constants

    def with_params(self, params: Params) -> nnx.Module:
        """A new module with these parameters."""
        from flax import nnx

        return nnx.merge(self.graph, params, self.constants.tree())


@dataclass(frozen=True)
class EquinoxModule:
    """The leaves of an Equinox module that are not parameters."""

    constants: Constants

    def with_params(self, params: Params) -> Any:
        """The module with these parameters."""
        import equinox

        return equinox.combine(params, self.constants.tree())


def from_nnx(
    module: nnx.Module, shape: ModelShape, hidden: HiddenFunction, logits: LogitsFunction
) -> tuple[ModuleModel, Params]:
    """Model and parameters of a flax.nnx module.

    The parameters are the module's `nnx.Param` variables, as an `nnx.State`; `nnx.update(module, params)` puts trained
    ones back. Other variables, such as counters of random streams, stay as they are.

    Args:
      hidden, logits: functions of the module, see this file's docstring.
    """
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return ModuleModel(NNXModule(graph, Constants.of(rest)), shape, hidden, logits), params


def from_equinox(
    module: Any, shape: ModelShape, hidden: HiddenFunction, logits: LogitsFunction
) -> tuple[ModuleModel, Params]:
    """Model and parameters of an Equinox module.

    The parameters are the module's floating-point arrays, as a module with None in place of everything else;
    `equinox.combine(params, module)` puts trained ones back. Functions take modules of one example as Equinox has
    them: map them over batch and tokens with `jax.vmap`, without the calls of `attention`.

    Args:
      hidden, logits: functions of the module, see this file's docstring.
    """
    import equinox

    params, rest = equinox.partition(module, equinox.is_inexact_array)
    return ModuleModel(EquinoxModule(Constants.of(rest)), shape, hidden, logits), params


@dataclass(frozen=True)
class Constants:
    """A pytree that is hashable and compared by value, so that it can be a static argument of a jitted function.

    Attributes:
      leaves: arrays and PRNG keys as shape, dtype and bytes; other leaves as they are.
      treedef: of the pytree.
    """

    leaves: tuple[Any, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> Constants:
        leaves, treedef = jax.tree.flatten(tree)
        return cls(tuple(_frozen(leaf) for leaf in leaves), treedef)

    def tree(self) -> Any:
        """The pytree, with arrays in place of the bytes."""
        leaves = [leaf.array() if isinstance(leaf, _FrozenArray) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclass(frozen=True)
class _FrozenArray:
    shape: tuple[int, ...]
    dtype: str
    data: bytes
    key_impl: str | None  # of a PRNG key array

    def array(self) -> Any:
        values = np.frombuffer(self.data, self.dtype).reshape(self.shape)
        return values if self.key_impl is None else jax.random.wrap_key_data(jnp.asarray(values), impl=self.key_impl)


def _frozen(leaf: Any) -> Any:
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf
    impl = None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    values = np.asarray(leaf)
    return _FrozenArray(values.shape, values.dtype.name, values.tobytes(), impl)
