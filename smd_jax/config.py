"""Frozen configurations: every choice of a run, with its unit, in hashable dataclasses.

Configurations are static arguments of jitted functions: equal ones compile once. Constructors check their values, so
that a wrong value fails before compilation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np

from smd_jax.typed_fields import check_choice, check_types

FloatName = Literal["float32", "bfloat16", "float16", "float64"]
Activation = Literal["silu", "gelu_tanh", "relu2"]
QKNormOver = Literal["head", "all"]


def check_whole(field: str, value: object, least: int, meaning: str = "") -> None:
    """Raises ValueError unless `value` is a whole number >= `least`. `meaning` is a note in the message."""
    # True and False are ints to Python.
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        note = f" ({meaning})" if meaning else ""
        raise ValueError(f"expected {field} >= {least}, a whole number{note}; got {value!r}")


def check_instance(name: str, value: object, kind: type) -> None:
    """Raises TypeError unless `value` is an object of the class `kind`."""
    if not isinstance(value, kind):
        # Inside jit the type of an array is that of JAX's tracer.
        got = "an array" if isinstance(value, jax.Array) else type(value).__name__
        raise TypeError(f"expected {name} to be a {kind.__name__}; got {got}")


MOST_SECONDS = 10**6  # largest time limit; waits on a pipe overflow above about 2 * 10**6 seconds


def check_time_limit(seconds: float) -> None:
    """Raises ValueError unless `seconds` is a positive number that a process can wait for."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"expected a time limit > 0 seconds, at most {MOST_SECONDS:,}; got {seconds}")


MAX_SEED = 2**32 - 1  # `jax.random.key` keeps 32 bits, so a larger seed would repeat the keys of a smaller one
MOST_EXPERTS = 2**15 - 1  # routing is recorded in at most 16 bits


def check_seed(field: str, value: object) -> None:
    """Raises ValueError unless `value` is a whole number from 0 to `MAX_SEED`."""
    check_whole(field, value, 0)
    if value > MAX_SEED:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"expected {field} <= {MAX_SEED}, 32 bits, beyond which seeds repeat; got {value}")


def _check_positive(config: Any, *fields: str) -> None:
    """Raises ValueError for fields whose numbers are not finite and positive; None passes."""
    for field in fields:
        number = getattr(config, field)
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"expected a finite {field} > 0; got {number}")


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor` (transformers `rope_type: linear`).

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: unless `factor` is finite and positive.
    """

    factor: float

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "factor")


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1 frequency scaling (transformers `rope_type: llama3`, `_compute_llama3_parameters`).

    Frequencies whose wavelength is longer than `original_max_positions / low_freq_factor` are divided by `factor`,
    those shorter than `original_max_positions / high_freq_factor` are kept, those between are interpolated.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: unless all numbers are finite and positive, and high_freq_factor is above low_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        check_whole("original_max_positions", self.original_max_positions, 1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"expected high_freq_factor > low_freq_factor {self.low_freq_factor}; got {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv:2309.00071) as in transformers `_compute_yarn_parameters`, used by long-context Qwen2.5 and Qwen3.

    `attention_factor` multiplies cos and sin; None means `0.1 ln(factor) + 1`. `truncate` rounds the ends of the range
    of interpolated frequencies to whole numbers. `query_beta` scales the query at position p by
    `1 + query_beta ln(1 + floor(p / original_max_positions))`, as Llama 4 and Ministral 3 do.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: unless all numbers are finite and positive; `query_beta` may be 0.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    query_beta: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "factor", "beta_fast", "beta_slow", "attention_factor")
        if not 0 <= self.query_beta < math.inf:
            raise ValueError(f"expected a finite query_beta >= 0; got {self.query_beta}")
        check_whole("original_max_positions", self.original_max_positions, 1)


@dataclass(frozen=True)
class DynamicRope:
    """Dynamic NTK scaling (transformers `rope_type: dynamic`) within the trained context, where it is plain RoPE.

    Beyond the trained context transformers rotates new keys with another base than the cached ones, so no cache has
    the keys of a pass over all tokens. `ModelConfig.max_positions` ends the context before that.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: unless `factor` is finite and positive.
    """

    factor: float

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "factor")


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv:2402.13753) as in transformers `_compute_longrope_parameters`, used by Phi-3 and Phi-4-mini.

    Each frequency has its own divisor: of `short_factor` in a model whose `max_positions` is at most
    `original_max_positions`, else of `long_factor`. transformers chooses by the length of the batch, and reads the
    prompt again if a response crosses the limit. Here one choice holds for a run, so that cached keys stay right.

    Attributes:
      short_factor, long_factor: one divisor for each frequency.
      original_max_positions: context before it was stretched. factor: by which it was stretched.
      attention_factor: multiplies cos and sin; None: sqrt(1 + ln(factor) / ln(original_max_positions)).

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: unless all numbers are finite and positive, and both tuples have the same length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "factor", "attention_factor")
        check_whole("original_max_positions", self.original_max_positions, 2)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"expected as many long as short factors; got {len(self.long_factor)} and {len(self.short_factor)}"
            )
        for factor in (*self.short_factor, *self.long_factor):
            if not 0 < factor < math.inf:
                raise ValueError(f"expected finite factors > 0 in short_factor and long_factor; got {factor}")


RopeScaling = LinearRope | Llama3Rope | YarnRope | DynamicRope | LongRope


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of the MLP: every token goes to the `per_token` experts whose gates are largest.

    Attributes:
      count: experts per layer. per_token: experts per token.
      intermediate_size: width of an expert.
      layers: for each layer, whether it is a mixture; empty: all are.
      normalised: whether the gates of a token's experts sum to one; else they are a softmax over all experts.
      bias: biases on the router and on the experts' projections (gpt-oss).
      clamp: gpt-oss' activation, gate * sigmoid(1.702 gate) * (up + 1) with gate <= clamp and |up| <= clamp; None:
        `ModelConfig.activation`.
      balance_coef: weight of the load-balancing loss in the family's training.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for sizes below 1, more experts of a token than there are, or a clamp or coefficient out of range.
    """

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[bool, ...] = ()
    normalised: bool = True
    bias: bool = False
    clamp: float | None = None
    balance_coef: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("count", "per_token", "intermediate_size"):
            check_whole(name, getattr(self, name), 1)
        if self.per_token > self.count:
            raise ValueError(f"expected per_token <= count {self.count}; got {self.per_token}")
        if self.count > MOST_EXPERTS:
            raise ValueError(f"expected count <= {MOST_EXPERTS}; got {self.count}")
        _check_positive(self, "clamp")
        if not 0 <= self.balance_coef < math.inf:
            raise ValueError(f"expected a finite balance_coef >= 0; got {self.balance_coef}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder of one of the families in `smd_jax.model.families`: a field for each difference.

    Attributes:
      vocab_size: rows of the embedding table.
      hidden_size: width of the residual stream.
      intermediate_size: width of the MLP.
      num_layers, num_heads, num_kv_heads, head_dim: attention shape; `num_heads` is a multiple of `num_kv_heads`.
      max_positions: the longest sequence, in tokens, that the model may see.
      rope_theta: RoPE base. rope_scaling: how RoPE is stretched, None for plain.
      local_rope_theta: RoPE base of the layers with a sliding window, which are not stretched (Gemma); None: they have
        RoPE as all others.
      norm_eps: epsilon of every RMSNorm.
      qkv_bias: biases on the q, k and v projections (Qwen2). o_bias: on the output projection of attention.
      mlp_bias: on the three projections of the MLP.
      qk_norm: RMSNorm per head on q and k (Qwen3, Gemma).
      query_pre_attn_scalar: scores are divided by its square root (Gemma); None: by that of head_dim.
      activation: of the MLP's gate: SwiGLU, Gemma's GeGLU with the tanh approximation, or the squared ReLU (Arcee).
      norm_plus_one: every RMSNorm multiplies by 1 + scale instead of scale (Gemma).
      post_norms: RMSNorms also on the outputs of attention and MLP (Gemma).
      scale_embeddings: embeddings are multiplied by the square root of hidden_size (Gemma).
      sliding_windows: for each layer, how many of the newest keys a query sees, itself included, or None for all;
        empty: no layer has a window.
      tie_embeddings: the output projection is the transposed embedding.
      pre_norms: RMSNorms on the inputs of attention and MLP (all but OLMo 2 and 3).
      qk_norm_over: scope of the RMSNorms on q and k: each head, or all heads together (OLMo 2 and 3).
      rope_layers: for each layer, whether it has RoPE (SmolLM3); empty: all have.
      rotary_dim: how many of a head's channels RoPE rotates, the first ones (Phi-4-mini); None: all.
      rope_interleaved: RoPE pairs neighbouring channels (Ernie 4.5), instead of the first and second half.
      attention_multiplier: scores are multiplied by it (Granite); None: divided as `query_pre_attn_scalar` says.
      embedding_multiplier: of embeddings. residual_multiplier: of the outputs of attention and MLP. logits_divisor: of
        logits (all three Granite).
      attention_softcap: attention scores are squeezed into ±this by tanh (Gemma 2); None: no cap.
      logit_softcap: the same for the logits (Gemma 2).
      attention_sinks: every head has a learnt score that takes part in its softmax, and whose weight is dropped
        (gpt-oss).
      experts: a mixture of experts instead of the MLP; None: no layer has one.
      gated_mlp: the MLP has a gate; without one it is down(activation(up(x))) (Arcee).
      dtype: compute dtype of matrix products and of cached keys and values. Scores, softmax, norms and logits are
        always computed in float32 or wider.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    query_pre_attn_scalar: float | None = None
    activation: Activation = "silu"
    norm_plus_one: bool = False
    post_norms: bool = False
    scale_embeddings: bool = False
    tie_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    dtype: FloatName = "float32"
    pre_norms: bool = True
    qk_norm_over: QKNormOver = "head"
    rope_layers: tuple[bool, ...] = ()
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    gated_mlp: bool = True
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_sinks: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_whole("intermediate_size", self.intermediate_size, 1)
        check_model_sizes(vars(self))
        check_windows(self.sliding_windows, self.num_layers)
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim, because RoPE rotates pairs; got {self.head_dim}")
        if self.local_rope_theta is not None and not any(self.sliding_windows):
            raise ValueError(
                f"expected sliding_windows with local_rope_theta, the RoPE base of layers with a window; got none, "
                f"and local_rope_theta={self.local_rope_theta}"
            )
        if self.experts is not None and len(self.experts.layers) not in (0, self.num_layers):
            raise ValueError(
                f"expected layers of experts with a boolean for each of {self.num_layers} layers; got "
                f"{len(self.experts.layers)}"
            )
        if self.experts is not None and (self.activation == "relu2" or not self.gated_mlp):
            raise ValueError(
                "expected activation 'silu' or 'gelu_tanh' and gated_mlp with experts, which have a gate; got "
                f"{self.activation!r} and {self.gated_mlp}"
            )
        self._check_rope()
        self._check_multipliers()

    def _check_rope(self) -> None:
        if self.rope_layers and len(self.rope_layers) != self.num_layers:
            raise ValueError(
                f"expected rope_layers with a boolean for each of {self.num_layers} layers; got {len(self.rope_layers)}"
            )
        rotary = self.rotary_dim
        if rotary is not None and (rotary % 2 or not 2 <= rotary <= self.head_dim):
            raise ValueError(
                f"expected rotary_dim as an even number from 2 to head_dim {self.head_dim}, or None; got {rotary}"
            )
        scaling = self.rope_scaling
        pairs = self.rotated // 2
        if isinstance(scaling, LongRope) and len(scaling.short_factor) != pairs:
            raise ValueError(
                f"expected a factor of LongRope for each of {pairs} frequencies; got {len(scaling.short_factor)}"
            )
        if isinstance(scaling, YarnRope) and scaling.query_beta and (self.rope_layers or self.rotated < self.head_dim):
            raise ValueError(
                f"expected RoPE of all channels in all layers with query_beta; got rotary_dim={self.rotary_dim} and "
                f"rope_layers={self.rope_layers}"
            )

    def _check_multipliers(self) -> None:
        _check_positive(self, "rope_theta", "embedding_multiplier", "residual_multiplier", "logits_divisor")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"expected a finite norm_eps >= 0; got {self.norm_eps}")
        _check_positive(self, "attention_softcap", "logit_softcap", "local_rope_theta")
        _check_positive(self, "attention_multiplier", "query_pre_attn_scalar")
        if self.attention_multiplier is not None and self.query_pre_attn_scalar is not None:
            raise ValueError(
                "expected attention_multiplier or query_pre_attn_scalar, because both scale scores; got "
                f"{self.attention_multiplier} and {self.query_pre_attn_scalar}"
            )

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.experts is not None and (self.experts.layers[layer] if self.experts.layers else True)

    @property
    def rotated(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def has_rope(self, layer: int) -> bool:
        """Whether a layer has RoPE, see `rope_layers`."""
        return self.rope_layers[layer] if self.rope_layers else True

    def window(self, layer: int) -> int | None:
        """The window of one layer, see `sliding_windows`."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def check_model_sizes(sizes: Mapping[str, Any]) -> None:
    """Checks the fields that ModelConfig shares with `smd_jax.model.protocol.ModelShape`: raises ValueError for sizes
    below 1, heads that are no multiple of KV heads, and a dtype that is not floating."""
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"):
        check_whole(name, sizes[name], 1)
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ValueError(
            f"expected num_heads to be a multiple of num_kv_heads; got {sizes['num_heads']} and {sizes['num_kv_heads']}"
        )
    check_choice("dtype", sizes["dtype"], get_args(FloatName))


def check_windows(windows: tuple[int | None, ...], num_layers: int) -> None:
    """Raises ValueError unless there is a window >= 1, or None, for every layer, or none at all."""
    if windows and len(windows) != num_layers:
        raise ValueError(
            f"expected sliding_windows with a window, or None, for each of {num_layers} layers; got {len(windows)}"
        )
    for window in windows:
        if window is not None:
            check_whole("a window of sliding_windows", window, 1, "a query always sees its own key")
