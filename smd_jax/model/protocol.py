"""Model protocol: the five members of a language model, independent of caches, evictions and kernels.

    shape              ModelShape                                        static sizes
    encode_positions   positions ─► pytree                               RoPE's tables, or the positions
    hidden             params, tokens, positions ─► states, layers       the forward pass
    logits             params, states ─► logits
    compute_params     params ─► params                                  converted once, not at every token

There is one forward pass. Prefill, decoding and the learner's teacher-forced pass differ only in the attention that the
library passes:

    hidden(params, tokens, positions, attend, layers)
        for every layer i:    q, k, v  ─►  out, new[i] = attend(q, k, v, layers[i])

`layers[i]` is opaque to the model: a mask in teacher forcing, a prompt's mask in prefill, a cache in decoding. So
sampler and learner are one policy, because the model cannot distinguish them.

A model is a static argument of jitted functions, so it must be hashable and compare by its configuration, as a frozen
dataclass does. It holds no arrays; those are in `params`, any pytree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.config import FloatName, check_model_sizes, check_windows
from smd_jax.model.attention import AttentionConfig
from smd_jax.pytrees import PyTreeNode, any_leaves

Params = Any  # any pytree of arrays
EncodedPositions = Any  # any pytree of arrays [batch, tokens, ...]
LayerState = Any  # an opaque pytree of the library
WIDEST = 2**30  # sliding window: a wider one hides no key either, and added to a column could exceed int32


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer, passed by the library. Hashable, so that it can be a static argument of `jax.jit` or
    `jax.checkpoint` around a layer, as in Decoder; `layer` is a pytree and an ordinary argument."""

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: LayerState,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], LayerState]:
        """softmax(q k^T / sqrt(head_dim)) v over the visible keys, and the layer's new state.

        Queries and keys include their positions, because keys are cached this way. A model with another scale of scores
        multiplies `q` by that scale times sqrt(head_dim). Query heads `g * h … g * (h + 1) - 1` share KV head `h`.

        Args:
          sinks: a learned extra score per query head in the softmax, whose weight is dropped; None: no sinks.
        """
        ...


@any_leaves
class Routed(NamedTuple):
    """A layer's state when the library records or replays the experts of tokens.

    A model replaces `state` as usual, and returns `experts` and `logits` of a layer with experts, or None for a layer
    without.

    Attributes:
      state: of the attention.
      experts: as input, the experts of each token, negative where the router chooses; None: it chooses for all. As
        output, the chosen experts, int32.
      logits: as output, the router's logits.
    """

    state: LayerState
    experts: Int[Array, "batch tokens per_token"] | None = None
    logits: Float[Array, "batch tokens count"] | None = None


class LayerRun(PyTreeNode):
    """The state of consecutive equal layers, for a model that loops over them (`ModelShape.runs`).

    The model calls `attend` with `AtLayer(state, i)` for i from 0 on, gets the state back, and returns the run with it.
    With `Routed(LayerRun(…))`, it calls with `Routed(AtLayer(…))` and stacks experts and logits on a new first axis.

    Attributes:
      state: of all layers.
      layers: number of layers. Static.
    """

    state: LayerState
    layers: int = struct.field(pytree_node=False)


@any_leaves
class AtLayer(NamedTuple):
    """A run's state, and which of its layers attends."""

    state: LayerState
    index: Int[Array, ""] | int


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The experts of a model.

    Attributes:
      layers: indices of the layers with experts.
      count: experts per layer.
      per_token: experts per token.
    """

    layers: tuple[int, ...]
    count: int
    per_token: int


@dataclass(frozen=True)
class ModelShape:
    """Static sizes of a model.

    Attributes:
      num_layers, num_heads, num_kv_heads, head_dim: of the attention.
      hidden_size: size of the last hidden state.
      vocab_size: size of the logits.
      max_positions: longest sequence, in tokens.
      dtype: dtype of q, k and v, and of the cache. Statistics, softmax and logits are always in float32 or wider.
      windows: sliding window of each layer in keys, including the query's own; None: no window. Empty: no layer has a
        window. The library applies them, not the model.
      attention: implementations of attention.
      routing: of a model with experts; None: the model has none, or the library does not see them.
      runs: lengths of runs of consecutive equal layers, over which the model can loop: it takes a LayerRun for some of
        a run's layers or all. Empty: every layer has its own state.
      full_float32: whether the model asks for full precision in its float32 products. GPUs and TPUs otherwise multiply
        in 10 or 8 bits, and the mismatch guard then has a looser bound. The library's attention always asks for it.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: FloatName = "float32"
    windows: tuple[int | None, ...] = ()
    attention: AttentionConfig = AttentionConfig()
    routing: RoutingShape | None = None
    runs: tuple[int, ...] = ()
    full_float32: bool = False

    def __post_init__(self) -> None:
        check_model_sizes(vars(self))
        check_windows(self.windows, self.num_layers)
        if self.dtype == "float64" and jax.dtypes.canonicalize_dtype("float64") != "float64":
            raise ValueError(
                "expected 64-bit numbers to be enabled for a model in float64, jax.config.update('jax_enable_x64', "
                "True), because JAX would silently compute in float32; got jax_enable_x64 False"
            )

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, see `windows`; at most `WIDEST`."""
        window = self.windows[layer] if self.windows else None
        return None if window is None else min(window, WIDEST)

    @property
    def layer_runs(self) -> tuple[range, ...]:
        """The layers of each run, see `runs`."""
        lengths = self.runs or (1,) * self.num_layers
        return tuple(range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True))


@runtime_checkable
class LanguageModel(Protocol):
    """A decoder-only language model with softmax attention over cached keys and values.

    All methods are pure functions of their arrays. Hashable and compared by value, see above.
    """

    @property
    def shape(self) -> ModelShape:
        """Sizes, windows, and implementations of attention."""
        ...

    def encode_positions(self, positions: Int[Array, "batch tokens"]) -> EncodedPositions:
        """The position encoding of each token's position in its own sequence: arrays `[batch, tokens, ...]`.

        Called for all tokens of a segment before its loop and sliced along the tokens' axis: inside the loop, a
        compiler may recompute every sine in every layer.
        """
        ...

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "batch tokens"],
        positions: EncodedPositions,
        attend: Attend,
        layers: tuple[LayerState, ...],
    ) -> tuple[Float[Array, "batch tokens hidden_size"], tuple[LayerState, ...]]:
        """The hidden state that predicts each token's successor, and the new state of every layer.

        There may be one token per row (decoding) or whole sequences; `attend` determines the visible keys. Padding
        tokens have ids, positions and arbitrary results.
        """
        ...

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden_size"]
    ) -> Float[Array, "batch tokens vocab_size"]:
        """Logits of hidden states, in float32 or wider, including any soft cap."""
        ...

    def compute_params(self, params: Params) -> Params:
        """Converts parameters once instead of at each use; the other methods must return bitwise the same results.
        Decoding reads every matrix once per step, and float32 has twice the bytes of bfloat16. `return params` is also
        correct."""
        ...


def forward(
    model: LanguageModel,
    params: Params,
    tokens: Int[Array, "batch tokens"],
    positions: EncodedPositions,
    attend: Attend,
    layers: tuple[LayerState, ...],
) -> tuple[Float[Array, "batch tokens hidden_size"], tuple[LayerState, ...]]:
    """`model.hidden` with its result checked.

    Raises:
      TypeError: the result is not hidden states and layers.
      ValueError: hidden states of another shape, or a layer's state that `attend` did not return.
    """
    result = model.hidden(params, tokens, positions, attend, layers)
    if not (isinstance(result, tuple) and len(result) == 2 and hasattr(result[0], "shape")):
        raise TypeError(
            f"expected hidden of {type(model).__name__} to return an array of hidden states and the layers' new "
            f"states; got {f'{len(result)} objects' if isinstance(result, tuple) else type(result).__name__}"
        )
    hidden, new = result[0], tuple(result[1])
    if hidden.shape != (want := (*tokens.shape, model.shape.hidden_size)):
        raise ValueError(f"expected hidden states [batch, tokens, hidden_size] {want}; got {hidden.shape}")
    unchanged = [index for index, (old, state) in enumerate(zip(layers, new, strict=False)) if state is old]
    if len(new) != len(layers) or unchanged:
        found = f"layer {unchanged[0]}'s unchanged" if unchanged else f"{len(new)} states"
        raise ValueError(
            f"expected hidden to return the state from attend for each of {len(layers)} layers; got {found}"
        )
    return hidden, new


def check_attended(shape: ModelShape, q: Array, k: Array, v: Array, heads_axis: Literal[1, 2] = 1) -> None:
    """Raises ValueError unless queries, keys and values of a model have the sizes of its `shape`."""
    for name, x, heads in (("q", q, "num_heads"), ("k", k, "num_kv_heads"), ("v", v, "num_kv_heads")):
        size = getattr(shape, heads)
        if x.ndim != 4 or (x.shape[heads_axis], x.shape[3]) != (size, shape.head_dim):
            layout = f"{size}, tokens" if heads_axis == 1 else f"tokens, {size}"
            raise ValueError(
                f"expected {name} of shape [batch, {layout}, {shape.head_dim}] in attend, with {heads} and "
                f"head_dim of ModelShape; got {list(x.shape)}"
            )


def check_logits(shape: ModelShape, logits: Array) -> None:
    """Raises ValueError unless logits have the width of `shape`."""
    if logits.shape[-1] != shape.vocab_size:
        raise ValueError(
            f"expected logits of width {shape.vocab_size}, the vocab_size of ModelShape; got {list(logits.shape)}"
        )


def check_model(model: object) -> None:
    """Raises TypeError unless the object has the five members of a model and is hashable; a class is no model."""
    if isinstance(model, type) or not isinstance(model, LanguageModel):
        raise TypeError(
            "expected a model with shape, encode_positions, hidden, logits and compute_params, such as "
            f"smd.Decoder(config); got {model.__name__ if isinstance(model, type) else type(model).__name__}"
        )
    try:
        hash(model)
    except TypeError as error:
        raise TypeError(
            f"expected a hashable model, because programs are compiled once per model: {error}. Use a dataclass with "
            "frozen=True"
        ) from error
