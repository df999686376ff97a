"""Rotary position embeddings (arXiv:2104.09864), plain and stretched, as in transformers' `modeling_rope_utils`."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.config import DynamicRope, LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope


class Rope(NamedTuple):
    """The rotation of every token.

    Attributes:
      cos, sin: of its angles.
      query_scale: factor of its query, see `YarnRope.query_beta`; None: 1.
    """

    cos: Float[Array, "batch tokens half"]
    sin: Float[Array, "batch tokens half"]
    query_scale: Float[Array, "batch tokens"] | None = None


def inverse_frequencies(config: ModelConfig, *, local: bool = False) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[rotated / 2]` and the factor on cos and sin (transformers `modeling_rope_utils`).

    Args:
      local: for layers with a sliding window, which may have another base.
    """
    # In float64 on the host: the result is a constant of the program.
    half = np.arange(0, config.rotated, 2, dtype=np.float64) / config.rotated
    if local and config.local_rope_theta is not None:
        return 1.0 / config.local_rope_theta**half, 1.0
    plain = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None or isinstance(scaling, DynamicRope):
        return plain, 1.0
    if isinstance(scaling, LinearRope):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Rope):
        # Full turns of each frequency within the original context. Frequencies with many turns are unchanged, those
        # with few are divided by the factor, and those in between are mixed.
        turns = scaling.original_max_positions * plain / (2 * math.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * plain / scaling.factor + smooth * plain, 1.0
    if isinstance(scaling, LongRope):
        original, factor = scaling.original_max_positions, scaling.attention_factor
        if factor is None:
            factor = math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(original))
        is_long = config.max_positions > original
        return plain / np.asarray(scaling.long_factor if is_long else scaling.short_factor), factor
    return _yarn_frequencies(plain, scaling, config)


def _yarn_frequencies(plain: np.ndarray, scaling: YarnRope, config: ModelConfig) -> tuple[np.ndarray, float]:
    # The (fractional) index of the frequency with this many turns within the original context.
    def dimension(rotations: float) -> float:
        length = scaling.original_max_positions / (rotations * 2 * math.pi)
        return config.rotated * math.log(length) / (2 * math.log(config.rope_theta))

    # More turns than beta_fast: unchanged; fewer than beta_slow: stretched by the whole factor.
    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotated - 1)
    # 0: the plain frequency; 1: divided by the factor. The least width avoids a division by zero.
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return plain / scaling.factor * ramp + plain * (1 - ramp), factor


def rope_tables(config: ModelConfig, positions: Int[Array, "batch tokens"], *, local: bool = False) -> Rope:
    """The rotation of every token, `[batch, tokens, rotated / 2]` in float32 or wider; `local` as above."""
    frequencies, factor = inverse_frequencies(config, local=local)
    wide = jnp.promote_types(config.dtype, jnp.float32)
    # At least float32: bfloat16 cannot represent all positions above 256.
    angles = positions[:, :, None].astype(wide) * jnp.asarray(frequencies, wide)[None, None]
    query_scale, scaling = None, config.rope_scaling
    if isinstance(scaling, YarnRope) and scaling.query_beta:
        contexts = (positions // scaling.original_max_positions).astype(wide)
        query_scale = 1 + scaling.query_beta * jnp.log1p(contexts)
    # The factor is on queries and keys, so the score is scaled by its square.
    return Rope(jnp.cos(angles) * factor, jnp.sin(angles) * factor, query_scale)


def rotate(
    x: Float[Array, "batch heads tokens head_dim"], rope: Rope, *, interleaved: bool = False
) -> Float[Array, "batch heads tokens head_dim"]:
    """Applies RoPE in the dtype of the tables, to the first channels where the tables have fewer pairs than a head.

    Args:
      interleaved: pairs are neighbours; else the first and second half of the rotated channels (Hugging Face).
    """
    cos = rope.cos[:, None]
    sin = rope.sin[:, None]
    rotated = 2 * cos.shape[-1]
    partial = rotated < x.shape[-1]
    turned = (x[..., :rotated] if partial else x).astype(cos.dtype)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    out = jnp.stack(pair, -1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, -1)
    out = out.astype(x.dtype)
    return jnp.concatenate([out, x[..., rotated:]], -1) if partial else out
