"""A language model from outside the library: plain JAX, no Flax, similar to Gemma 2 and 3.

Embeddings times sqrt(hidden), norms before and after attention and MLP with scales of 1 + w, GeGLU, norms of q and k,
another query scale, RoPE on half of the channels, some layers with a sliding window, tied and soft-capped logits.
Parameters are a nested dict with names that the library does not know.

    model = OutsideModel()                      # a smd_jax.model.protocol.LanguageModel
    params = model.init(jax.random.key(0))
    trajectory = smd.rollout(model, params, prompts, key, policy=…, config=…)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.config import FloatName
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.protocol import Attend, LayerState, ModelShape


@dataclass(frozen=True)
class OutsideModel:
    """The model. Hashable and compared by value, because it is a static argument of jitted functions."""

    vocab_size: int = 264
    hidden_size: int = 32
    mlp_size: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    max_positions: int = 4096
    windows: tuple[int | None, ...] = (20, None, 6)  # the sliding window of each layer; None: no window
    query_scale: float = 0.4  # of the scores, instead of 1 / sqrt(head_dim)
    cap: float = 15.0  # of the logits, softly
    dtype: FloatName = "float32"
    attention: AttentionConfig = AttentionConfig()

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Random parameters, float32."""
        keys = iter(jax.random.split(key, 2 + 11 * len(self.windows)))

        def normal(*shape: int, scale: float = 1.0) -> Array:
            return scale * jax.random.normal(next(keys), shape, jnp.float32)

        def matrix(rows: int, columns: int) -> Array:
            return normal(rows, columns, scale=rows**-0.5)

        def block() -> dict[str, Any]:
            query = self.heads * self.head_dim
            key_value = self.kv_heads * self.head_dim
            return {
                "before": normal(2, self.hidden_size, scale=0.1),  # of attention and of the MLP
                "after": normal(2, self.hidden_size, scale=0.1),
                "norm_q": normal(self.head_dim, scale=0.1),
                "norm_k": normal(self.head_dim, scale=0.1),
                "wq": matrix(self.hidden_size, query),
                "wkv": normal(2, self.hidden_size, key_value, scale=self.hidden_size**-0.5),
                "wo": matrix(query, self.hidden_size),
                "geglu": normal(2, self.hidden_size, self.mlp_size, scale=self.hidden_size**-0.5),
                "out": matrix(self.mlp_size, self.hidden_size),
            }

        blocks = {f"block{index}": block() for index in range(len(self.windows))}
        table = normal(self.vocab_size, self.hidden_size, scale=self.hidden_size**-0.5)
        return {"table": table, "blocks": blocks, "last": normal(self.hidden_size, scale=0.1)}

    # The five members.

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=len(self.windows),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype=self.dtype,
            windows=self.windows,
            attention=self.attention,
            full_float32=True,
        )

    def encode_positions(self, positions: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens quarter 2"]:
        """cos and sin of a quarter of head_dim: RoPE turns half of the channels."""
        count = self.head_dim // 4
        wide = jnp.promote_types(self.dtype, jnp.float32)
        frequencies = 10_000.0 ** (-jnp.arange(count, dtype=wide) / count)
        angles = positions[:, :, None].astype(wide) * frequencies[None, None]
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)

    def hidden(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "batch tokens"],
        positions: Float[Array, "batch tokens quarter 2"],
        attend: Attend,
        layers: tuple[LayerState, ...],
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[LayerState, ...]]:
        x = params["table"][tokens].astype(self.dtype) * self.hidden_size**0.5
        new = []
        for index, layer in enumerate(layers):
            x, layer = self._block(params["blocks"][f"block{index}"], x, positions, attend, layer)
            new.append(layer)
        return norm(x, params["last"]), tuple(new)

    def logits(self, params: dict[str, Any], hidden: Float[Array, "batch tokens hidden"]) -> Array:
        wide = jnp.promote_types(self.dtype, jnp.float32)
        table = params["table"].astype(self.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, table, precision="highest", preferred_element_type=wide)
        return self.cap * jnp.tanh(logits / self.cap)

    def compute_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def _block(
        self, p: dict[str, Any], x: Array, turn: Array, attend: Attend, layer: LayerState
    ) -> tuple[Array, LayerState]:
        y = norm(x, p["before"][0])
        q = rotate(norm(self._heads(y, p["wq"]), p["norm_q"]), turn)
        k = rotate(norm(self._heads(y, p["wkv"][0]), p["norm_k"]), turn)
        v = self._heads(y, p["wkv"][1])
        # The library divides scores by sqrt(head_dim), so another scale goes into the queries.
        out, layer = attend(q * (self.query_scale * self.head_dim**0.5), k, v, layer)
        out = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        x = x + norm(self._product(out, p["wo"]), p["after"][0])
        y = norm(x, p["before"][1])
        gate = self._product(y, p["geglu"][0])
        up = self._product(y, p["geglu"][1])
        return x + norm(self._product(jax.nn.gelu(gate, approximate=True) * up, p["out"]), p["after"][1]), layer

    def _heads(self, x: Array, matrix: Array) -> Array:
        """`[batch, heads, tokens, head_dim]`."""
        return self._product(x, matrix).reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)

    def _product(self, x: Array, matrix: Array) -> Array:
        # Accelerators multiply float32 in fewer bits by default.
        return jnp.matmul(x, matrix.astype(self.dtype), precision="highest")


def norm(x: Array, scale: Array) -> Array:
    """RMSNorm over the last axis, times 1 + scale; in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * (1 + scale.reshape((1,) * (x.ndim - 1) + (-1,)))).astype(x.dtype)


def rotate(x: Float[Array, "batch heads tokens head_dim"], turn: Float[Array, "batch tokens quarter 2"]) -> Array:
    """RoPE on the first half of the channels; adjacent channels form pairs."""
    turned, still = jnp.split(x, 2, axis=-1)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2).astype(turn.dtype)
    cos = turn[:, None, ..., 0]
    sin = turn[:, None, ..., 1]
    first = pairs[..., 0]
    second = pairs[..., 1]
    pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([pairs.reshape(turned.shape).astype(x.dtype), still], axis=-1)
