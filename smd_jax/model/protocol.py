"""What the library asks of a language model: five members, and no knowledge of caches, evictions or kernels.

    shape              ModelShape                                        what has to be known before anything runs
    encode_positions   positions ─► pytree                               RoPE's tables, or the positions themselves
    hidden             params, tokens, positions ─► states, layers       the one forward pass
    logits             params, states ─► logits
    compute_params     params ─► params                                  converted once, not at every token

There is one forward pass. Reading a prompt, decoding and the learner's teacher-forced pass differ in the attention that
the library hands in:

    hidden(params, tokens, positions, attend, layers)
        for every layer i:    q, k, v  ─►  out, new[i] = attend(q, k, v, layers[i])

and `layers[i]` is the library's business: a mask when teacher forced, a prompt's mask in prefill, a slotted cache in
decoding. That is why sampler and learner are one policy: there is nothing in the model that could tell them apart.

A model is a static argument of jitted functions. So it must be hashable, and equal to another one with the same
configuration: a frozen dataclass is. It holds no arrays; those are in `params`, any pytree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from smd_jax.config import FloatName, check_model_sizes, check_windows
from smd_jax.model.attention import AttentionConfig
from smd_jax.pytrees import any_leaves

Params = Any  # any pytree of arrays
EncodedPositions = Any  # any pytree of arrays [batch, tokens, ...]
LayerState = Any  # a pytree of the library's, which a model passes through


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer, as the library hands it in. Hashable, because a model may make it a static argument
    of `jax.jit` or `jax.checkpoint` around a layer, as Decoder does; `layer` is a pytree, an ordinary argument."""

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: LayerState,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], LayerState]:
        """softmax(q k^T / sqrt(head_dim)) v over the keys that each query may see, and the layer's new state.

        Queries and keys come with their positions in them, because that is how keys are cached. A model whose scores
        are scaled by something else multiplies `q` by it, times sqrt(head_dim). Query heads `g * h … g * (h + 1) - 1`
        share KV head `h`.

        Args:
          sinks: a learnt score of each query head that takes part in its softmax, and whose weight is dropped; None:
            the model has none.
        """
        ...


@any_leaves
class Routed(NamedTuple):
    """A layer's state where the library records or replays which experts its tokens go to.

    A model that gets one replaces `state` as ever, and returns the other two of a layer with experts; of a layer
    without, None.

    Attributes:
      state: of the attention.
      experts: given: the experts of each token, a negative one for a token that chooses itself; None: all choose. Came
        back: those that the tokens went to, int32.
      logits: came back: of the router.
    """

    state: LayerState
    experts: Int[Array, "batch tokens per_token"] | None = None
    logits: Float[Array, "batch tokens count"] | None = None


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The experts of a model.

    Attributes:
      layers: numbers of the layers that have experts.
      count: experts of a layer. per_token: of them that a token goes to.
    """

    layers: tuple[int, ...]
    count: int
    per_token: int


@dataclass(frozen=True)
class ModelShape:
    """What the library has to know of a model before anything runs.

    Attributes:
      num_layers, num_heads, num_kv_heads, head_dim: of the attention. hidden_size: of the last hidden state.
      vocab_size: of the logits. max_positions: tokens of the longest sequence.
      dtype: of q, k and v, so of the cache. Statistics, softmax and logits are in float32 or wider whatever this is.
      windows: for each layer, how many of the newest keys a query may see, itself included; None: all of them.
        Empty: no layer has a window. The library applies them; the model doesn't.
      attention: how to attend, where there is a choice.
      routing: of a model with experts; None: the model has none, or the library does not see them.
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

    def __post_init__(self) -> None:
        check_model_sizes(vars(self))
        check_windows(self.windows, self.num_layers)
        if self.dtype == "float64" and jax.dtypes.canonicalize_dtype("float64") != "float64":
            raise ValueError(
                "expected 64-bit numbers to be enabled for a model in float64, jax.config.update('jax_enable_x64', "
                "True), because JAX would compute in float32 without a word; got jax_enable_x64 False"
            )

    def window(self, layer: int) -> int | None:
        """The window of one layer, see `windows`."""
        return self.windows[layer] if self.windows else None


@runtime_checkable
class LanguageModel(Protocol):
    """A decoder-only language model with softmax attention over cached keys and values, in any style.

    All methods are pure functions of their arrays. Hashable and comparable by value, see above.
    """

    @property
    def shape(self) -> ModelShape:
        """Sizes, windows, and how to attend."""
        ...

    def encode_positions(self, positions: Int[Array, "batch tokens"]) -> EncodedPositions:
        """What the forward pass needs of each token's position in its own sequence: arrays `[batch, tokens, ...]`.

        Made for all tokens of a segment before the loop over its steps begins, and cut along the tokens' axis: within
        the loop, a compiler may compute every sine again in every layer.
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
        """The hidden state from which each token's successor is predicted, and the new state of every layer.

        Tokens may be anything from one a row (decoding) to whole sequences; what they see is up to `attend`. Padding
        is among them: it has ids, positions and meaningless results.
        """
        ...

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden_size"]
    ) -> Float[Array, "batch tokens vocab_size"]:
        """Logits in float32 or wider, of any of the hidden states; soft caps and the like are in here."""
        ...

    def compute_params(self, params: Params) -> Params:
        """Parameters with which the other methods compute the same, to the last bit, and faster: what they would
        convert at each use is converted. A step of decoding reads every matrix once, and float32 as the optimizer keeps
        it is twice the bytes of bfloat16. `return params` is right, too."""
        ...
