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
from jaxtyping import Array, Float, Int

from smd_jax.model.protocol import Attend, LayerState, ModelShape, Params, check_attended

if TYPE_CHECKING:
    from flax import nnx


HiddenFunction = Callable[[Any, Int[Array, "batch tokens"], Int[Array, "batch tokens"], Callable[..., Array]], Array]
LogitsFunction = Callable[[Any, Float[Array, "batch tokens hidden_size"]], Array]


@dataclass(frozen=True, eq=False)
class ModuleModel:
    """A `LanguageModel` around a module. Two models are never equal: build one and keep it, because each compiles its
    own programs.

    Attributes:
      with_params: the module with these parameters.
      shape: see ModelShape.
      hidden_of, logits_of: the two functions of this file's docstring.

    Raises:
      ValueError: a shape with routing or with runs of several layers.
    """

    with_params: Callable[[Params], Any]
    shape: ModelShape
    hidden_of: HiddenFunction
    logits_of: LogitsFunction

    def __post_init__(self) -> None:
        if self.shape.routing is not None or max(self.shape.runs, default=1) > 1:
            raise ValueError(
                "expected a shape without routing and without runs of several layers, because a module calls attention "
                f"once per layer; got routing {self.shape.routing} and runs {self.shape.runs}"
            )

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
        new: list[LayerState] = []

        def attention(q: Array, k: Array, v: Array) -> Array:
            if len(new) == len(layers):
                raise ValueError(f"expected one attention call per layer, {len(layers)} of them; got another one")
            check_attended(self.shape, q, k, v, heads_axis=2)
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            out, state = attend(q, k, v, layers[len(new)])
            new.append(state)
            return out.swapaxes(1, 2)

        hidden = self.hidden_of(self.with_params(params), tokens, positions, attention)
        if len(new) != len(layers):
            raise ValueError(f"expected one attention call per layer, {len(layers)} of them; got {len(new)}")
        return hidden, tuple(new)

    def logits(self, params: Params, hidden: Float[Array, "batch tokens hidden_size"]) -> Array:
        return self.logits_of(self.with_params(params), hidden)

    def compute_params(self, params: Params) -> Params:
        return params


def from_nnx(
    module: nnx.Module, shape: ModelShape, hidden: HiddenFunction, logits: LogitsFunction
) -> tuple[ModuleModel, Params]:
    """Model and parameters of a flax.nnx module.

    The parameters are the module's `nnx.Param` variables, as an `nnx.State`; `nnx.update(module, params)` puts trained
    ones back. Other variables, such as counters of random streams, are unchanged. The model is a copy whose
    Dropout layers have rate 0, because sampler and learner would drop different activations.

    Args:
      hidden, logits: functions of the module, see this file's docstring.

    Raises:
      TypeError: for a module of another library.
    """
    from flax import nnx

    _check_module(module, nnx.Module, "flax.nnx")
    module = nnx.clone(module)
    for _, part in nnx.iter_modules(module):
        # A rate of 0 holds for calls with `deterministic=False` too.
        if isinstance(part, nnx.Dropout):
            part.rate = 0.0
        elif isinstance(part, nnx.MultiHeadAttention):
            part.dropout_rate = 0.0
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return ModuleModel(lambda params: nnx.merge(graph, params, rest, copy=True), shape, hidden, logits), params


def from_equinox(
    module: Any, shape: ModelShape, hidden: HiddenFunction, logits: LogitsFunction
) -> tuple[ModuleModel, Params]:
    """Model and parameters of an Equinox module; arguments and errors as `from_nnx`.

    The parameters are the module's floating-point arrays, as a module with None instead of everything else;
    `equinox.combine(params, module)` puts trained ones back. Functions take modules of one example as Equinox has
    them: map them over batch and tokens with `jax.vmap`, without the calls of `attention`. Dropout is off, too.
    """
    import equinox

    _check_module(module, equinox.Module, "equinox")
    off = equinox.nn.Dropout(0.0, inference=True)
    module = jax.tree.map(
        lambda x: off if isinstance(x, equinox.nn.Dropout) else x,
        module,
        is_leaf=lambda x: isinstance(x, equinox.nn.Dropout),
    )
    params, rest = equinox.partition(module, equinox.is_inexact_array)
    return ModuleModel(lambda params: equinox.combine(params, rest), shape, hidden, logits), params


def _check_module(module: object, kind: type, library: str) -> None:
    if not isinstance(module, kind):
        raise TypeError(f"expected a module of {library}; got {type(module).__module__}.{type(module).__name__}")
