"""Frozen configurations: every choice of a run, with its unit, in hashable dataclasses.

All of them are static arguments of jitted functions: two equal configurations compile once. They are checked when they
are made, so a wrong value fails before anything is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from smd_jax.typed_fields import check_types

FloatName = Literal["float32", "bfloat16", "float16", "float64"]
Activation = Literal["silu", "gelu_tanh"]


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a name that is none of `choices`: annotations alone would let it pass."""
    if value not in choices:
        raise ValueError(f"expected {field} to be one of {', '.join(choices)}; got {value!r}")


def check_whole(field: str, value: object, least: int, meaning: str = "") -> None:
    """Raises ValueError unless `value` is a whole number from `least` on. `meaning` is a note in the message."""
    # True and False are ints to Python.
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        note = f" ({meaning})" if meaning else ""
        raise ValueError(f"expected {field} >= {least}, a whole number{note}; got {value!r}")


MAX_SEED = 2**32 - 1  # `jax.random.key` keeps 32 bits: a larger seed would repeat the keys of a smaller one


def check_seed(field: str, value: object) -> None:
    """Raises ValueError unless `value` is a whole number from 0 to `MAX_SEED`, each of which has keys of its own."""
    check_whole(field, value, 0)
    if value > MAX_SEED:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"expected {field} <= {MAX_SEED}, 32 bits, beyond which seeds repeat; got {value}")


def _check_positive(rope: LinearRope | Llama3Rope | YarnRope, *fields: str) -> None:
    """Raises ValueError for fields whose numbers are not finite and positive."""
    for field in fields:
        number = getattr(rope, field)
        if not 0 < number < math.inf:
            raise ValueError(f"expected a finite {field} > 0; got {number}")


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor` (transformers `rope_type: linear`).

    Raises:
      TypeError: for a value that the type of its field does not allow.
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
      TypeError: for a value that the type of its field does not allow.
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

    `attention_factor` multiplies cos and sin; None means `0.1 ln(factor) + 1`.

    Raises:
      TypeError: for a value that the type of its field does not allow.
      ValueError: unless all numbers are finite and positive.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        _check_positive(self, "factor", "beta_fast", "beta_slow")
        check_whole("original_max_positions", self.original_max_positions, 1)
        if self.attention_factor is not None:
            _check_positive(self, "attention_factor")


RopeScaling = LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder of the Llama 2/3, Mistral, Qwen2/2.5, Qwen3 or Gemma 3 family: a field for each difference.

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
      activation: of the MLP's gate: SwiGLU, or Gemma's GeGLU with the approximation by tanh.
      norm_plus_one: every RMSNorm multiplies by 1 + scale (Gemma), so that a scale of zero leaves its input's size.
      post_norms: RMSNorms also on what attention and MLP add to the residual stream (Gemma).
      scale_embeddings: embeddings are multiplied by the square root of hidden_size (Gemma).
      sliding_windows: for each layer, how many of the newest keys a query sees, itself included, or None for all;
        empty: no layer has a window.
      tie_embeddings: the output projection is the transposed embedding.
      dtype: compute dtype of matrix products and of cached keys and values. Scores, softmax, norms and logits are
        computed in float32 or wider whatever this is.
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

    def __post_init__(self) -> None:
        check_types(self)
        check_whole("intermediate_size", self.intermediate_size, 1)
        check_model_sizes(vars(self))
        check_windows(self.sliding_windows, self.num_layers)
        if self.head_dim % 2:
            raise ValueError(f"expected an even head_dim, because RoPE rotates pairs; got {self.head_dim}")
        check_choice("activation", self.activation, get_args(Activation))
        scalar = self.query_pre_attn_scalar
        if scalar is not None and scalar <= 0:
            raise ValueError(f"expected query_pre_attn_scalar > 0, or None; got {scalar}")
        if self.local_rope_theta is not None and not any(self.sliding_windows):
            raise ValueError(
                f"expected sliding_windows beside local_rope_theta, the RoPE base of layers with a window; got none, "
                f"and local_rope_theta={self.local_rope_theta}"
            )

    def window(self, layer: int) -> int | None:
        """The window of one layer, see `sliding_windows`."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def check_model_sizes(sizes: Mapping[str, Any]) -> None:
    """Raises ValueError for sizes below 1, heads that are no multiple of KV heads, and a dtype that is no float's; of
    the fields that ModelConfig shares with `smd_jax.model.protocol.ModelShape`."""
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
