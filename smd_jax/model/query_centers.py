"""Measures the mean queries of a model before RoPE, for `smd.eviction.TriAttention`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smd_jax.message.masks import dense_mask, positions
from smd_jax.message.query_centers import QueryCenters
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Params
from smd_jax.model.rope import inverse_frequencies
from smd_jax.model.teacher_forced import layer_masks


def measure_query_centers(
    model: Decoder, params: Params, tokens: Int[Array, "rows columns"], valid: Bool[Array, "rows columns"]
) -> QueryCenters:
    """Query centers over all tokens of these texts, read with dense attention.

    Args:
      tokens, valid: texts like those that the model will write, padded on the left or the right.

    Raises:
      ValueError: if RoPE rotates only a part of each head, or pairs neighbouring channels.
    """
    config = model.config
    if config.rotated < config.head_dim or config.rope_interleaved:
        raise ValueError(
            f"expected RoPE that pairs the halves of all {config.head_dim} channels; got {config.rotated} of them"
            f"{' in neighbouring pairs' if config.rope_interleaved else ''}"
        )
    # Zeros without RoPE, so that nothing rotates.
    frequencies = np.stack(
        [
            inverse_frequencies(config, local=config.window(layer) is not None)[0] * config.has_rope(layer)
            for layer in range(config.num_layers)
        ]
    )
    real, imaginary, length = np.asarray(_means(model, params, tokens, valid, jnp.asarray(frequencies)))
    return QueryCenters(real + 1j * imaginary, length, frequencies)


@dataclass(frozen=True)
class _Collect:
    """Dense attention that sums queries rotated back to position 0. A layer's state is its mask, the angles of every
    token and the counted tokens; the new state has the sums of real parts, imaginary parts and lengths."""

    attention: AttentionConfig

    def __call__(
        self,
        q: Float[Array, "rows heads tokens head_dim"],
        k: Float[Array, "rows kv_heads tokens head_dim"],
        v: Float[Array, "rows kv_heads tokens head_dim"],
        layer: Any,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "rows heads tokens head_dim"], Float[Array, "3 heads half"]]:
        mask, angles, valid = layer
        out = self.attention.attend(q, k, v, mask, sinks)
        first, second = jnp.split(q.astype(jnp.promote_types(q.dtype, jnp.float32)), 2, axis=-1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        real, imaginary = first * cos + second * sin, second * cos - first * sin
        parts = jnp.stack([real, imaginary, jnp.sqrt(real**2 + imaginary**2)])
        return out, jnp.where(valid[:, None, :, None], parts, 0).sum(axis=(1, 3))


@partial(jax.jit, static_argnums=0)
def _means(
    model: Decoder, params: Params, tokens: Array, valid: Array, frequencies: Float[Array, "layers half"]
) -> Float[Array, "3 layers heads half"]:
    places = positions(valid)
    masks = layer_masks(model.shape, tokens, dense_mask(valid))
    angles = places[:, :, None].astype(jnp.float32)[None] * frequencies.astype(jnp.float32)[:, None, None]
    layers = tuple((mask, angles[index], valid) for index, mask in enumerate(masks))
    collect = _Collect(model.shape.attention)
    _, sums = model.hidden(params, tokens, model.encode_positions(places), collect, layers)
    return jnp.stack(sums, axis=1) / valid.sum()
