"""A Flax Linen decoder that is Llama 2/3, Qwen2/2.5 or Qwen3 by configuration (RMSNorm, RoPE, GQA, SwiGLU).

Pure functions of a plain parameter pytree, three ways into the same layers:

    model = Decoder(config)
    logits = model.apply({"params": params}, tokens, positions, mask)    # teacher forced, explicit mask
    hidden, layers = model.apply(…, method=Decoder.prefill)              # and every layer's keys and values
    hidden, cache = model.apply(…, method=Decoder.decode)                # one token or a chunk against a KVCache

They differ in one line: what a layer does with its q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.slots import KVCache, LayerCache
from smd_jax.config import LinearRope, Llama3Rope, ModelConfig, YarnRope
from smd_jax.masks import LayerMask, Mask, check_mask, layer_mask, to_visible
from smd_jax.model.attention import BlockSizes, DecodeImplementation, Implementation, attend
from smd_jax.model.attention import decode as decode_attention
from smd_jax.pytrees import any_leaves
from smd_jax.sharding import constrain, gathered_embedding
from smd_kernels.observed import attend_and_observe

Params = Any  # nested dict of arrays; the tree is listed in the README
Heads = Float[Array, "batch heads tokens head_dim"]
KVHeads = Float[Array, "batch kv_heads tokens head_dim"]
AttendFn = Callable[[Heads, KVHeads, KVHeads], tuple[Heads, Any]]


@any_leaves
class PrefillLayer(struct.PyTreeNode):
    """What one layer hands over after reading the prompt.

    Attributes:
      keys, values: `[batch, kv_heads, tokens, head_dim]`.
      received: `[batch, kv_heads, tokens]` attention that each key received, or None if not asked for.
      queries: `[batch, heads, window, head_dim]` the newest queries as in `LayerCache.queries`, or None.
    """

    keys: Float[Array, "batch kv_heads tokens head_dim"]
    values: Float[Array, "batch kv_heads tokens head_dim"]
    received: Float[Array, "batch kv_heads tokens"] | None
    queries: Float[Array, "batch heads window head_dim"] | None


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[head_dim / 2]` and the factor on cos and sin (transformers `modeling_rope_utils`)."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if isinstance(scaling, LinearRope):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Rope):
        return _llama3_frequencies(plain, scaling), 1.0
    return _yarn_frequencies(plain, scaling, config)


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn_frequencies(plain: np.ndarray, scaling: YarnRope, config: ModelConfig) -> tuple[np.ndarray, float]:
    def dimension(rotations: float) -> float:
        length = scaling.original_max_positions / (rotations * 2 * math.pi)
        return config.head_dim * math.log(length) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return plain / scaling.factor * ramp + plain * (1 - ramp), factor


def rope_tables(config: ModelConfig, positions: Int[Array, "batch tokens"]) -> tuple[Array, Array]:
    """cos and sin of every token's angles, `[batch, 1, tokens, head_dim / 2]` in float32 or wider."""
    frequencies, factor = inverse_frequencies(config)
    wide = jnp.promote_types(config.dtype, jnp.float32)
    angles = positions[:, None, :, None].astype(wide) * jnp.asarray(frequencies, wide)[None, None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Heads, rope: tuple[Array, Array]) -> Heads:
    """Applies RoPE in the dtype of the tables; first and second half of head_dim are the pairs (Hugging Face)."""
    cos, sin = rope
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale; statistics in float32 or wider."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def flat(x: Float[Array, "batch tokens width"]) -> Float[Array, "batch*tokens width"]:
    """One long matrix, which XLA multiplies faster on CPUs (an MLP: 1.6 s in place of 2.3)."""
    return x.reshape(-1, x.shape[-1])


class Attention(nn.Module):
    """Projections around an attention that the caller passes in."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.q_proj = nn.Dense(c.num_heads * c.head_dim, use_bias=c.qkv_bias, dtype=c.dtype)
        self.k_proj = nn.Dense(c.num_kv_heads * c.head_dim, use_bias=c.qkv_bias, dtype=c.dtype)
        self.v_proj = nn.Dense(c.num_kv_heads * c.head_dim, use_bias=c.qkv_bias, dtype=c.dtype)
        self.o_proj = nn.Dense(c.hidden_size, use_bias=False, dtype=c.dtype)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.norm_eps)
            self.k_norm = RMSNorm(c.norm_eps)

    def __call__(self, x: Array, rope: tuple[Array, Array], attend_fn: AttendFn) -> tuple[Array, Any]:
        tokens = flat(x)
        q, k, v = (self._split(proj(tokens), x.shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out, aux = attend_fn(rotate(q, rope), rotate(k, rope), v)
        return self.o_proj(out.swapaxes(1, 2).reshape(len(tokens), -1)).reshape(x.shape), aux

    def _split(self, x: Array, shape: tuple[int, ...]) -> Heads:
        """`[batch * tokens, heads * head_dim]` -> `[batch, heads, tokens, head_dim]`."""
        return x.reshape(*shape[:2], -1, self.config.head_dim).swapaxes(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.gate_proj = nn.Dense(c.intermediate_size, use_bias=False, dtype=c.dtype)
        self.up_proj = nn.Dense(c.intermediate_size, use_bias=False, dtype=c.dtype)
        self.down_proj = nn.Dense(c.hidden_size, use_bias=False, dtype=c.dtype)

    def __call__(self, x: Array) -> Array:
        tokens = flat(x)
        return self.down_proj(nn.silu(self.gate_proj(tokens)) * self.up_proj(tokens)).reshape(x.shape)


class Layer(nn.Module):
    """One decoder layer."""

    config: ModelConfig
    impl: Implementation | None = None
    sizes: BlockSizes | None = None

    def setup(self) -> None:
        self.attention_norm = RMSNorm(self.config.norm_eps)
        self.attention = Attention(self.config)
        self.mlp_norm = RMSNorm(self.config.norm_eps)
        self.mlp = MLP(self.config)

    def __call__(self, x: Array, rope: tuple[Array, Array], mask: LayerMask) -> Array:
        """Teacher forced, under one layer's mask."""
        return self.extend(x, rope, lambda q, k, v: (attend(q, k, v, mask, self.impl, self.sizes), None))[0]

    def extend(self, x: Array, rope: tuple[Array, Array], attend_fn: AttendFn) -> tuple[Array, Any]:
        """With any attention; also returns what it gave beside its output."""
        out, aux = self.attention(self.attention_norm(x), rope, attend_fn)
        x = x + out
        return constrain(x + self.mlp(self.mlp_norm(x))), aux


class Head(nn.Module):
    """The output projection's matrix `[hidden, vocab]`."""

    hidden_size: int
    vocab_size: int

    @nn.compact
    def __call__(self) -> Float[Array, "hidden vocab"]:
        return self.param("kernel", nn.initializers.lecun_normal(), (self.hidden_size, self.vocab_size))


class Decoder(nn.Module):
    """The language model.

    Attributes:
      config: its shape.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      impl, sizes: attention implementation of the teacher-forced pass and of prefill, and its block sizes, see
        `smd_jax.model.attention.attend`. None takes the best that can run.
      decode_impl: attention implementation of decoding, see `smd_jax.model.attention.decode`.
    """

    config: ModelConfig
    remat: bool = False
    impl: Implementation | None = None
    sizes: BlockSizes | None = None
    decode_impl: DecodeImplementation | None = None

    def setup(self) -> None:
        c = self.config
        layer = nn.remat(Layer) if self.remat else Layer
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=nn.initializers.normal(0.02))
        self.layers = [layer(c, self.impl, self.sizes) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.norm_eps)
        if not c.tie_embeddings:
            self.lm_head = Head(c.hidden_size, c.vocab_size)

    def __call__(
        self, tokens: Int[Array, "batch tokens"], positions: Int[Array, "batch tokens"], mask: Mask
    ) -> Float[Array, "batch tokens vocab"]:
        """Logits in float32 or wider of every token's successor.

        Args:
          tokens: ids. positions: place of each token in its own sequence, see `smd_jax.masks.positions`.
          mask: a ShadowMask, or booleans of any pattern that broadcast to `[batch, layers, kv_heads, queries, keys]`.

        Raises:
          ValueError: if the mask has another shape, or there are more tokens than the model has positions.
        """
        return self.logits(self.hidden(tokens, positions, mask))

    def hidden(
        self, tokens: Int[Array, "batch tokens"], positions: Int[Array, "batch tokens"], mask: Mask
    ) -> Float[Array, "batch tokens hidden"]:
        """The normalised last hidden state, arguments as `__call__`."""
        c = self.config
        self._check_length(tokens.shape[1])
        check_mask(mask, batch=tokens.shape[0], layers=c.num_layers, kv_heads=c.num_kv_heads, columns=tokens.shape[1])
        rope = rope_tables(c, positions)
        x = self._embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, layer_mask(mask, index))
        return self.norm(x)

    def prefill(
        self,
        tokens: Int[Array, "batch tokens"],
        positions: Int[Array, "batch tokens"],
        mask: Mask,
        query_window: int,
        observe: bool,
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[PrefillLayer, ...]]:
        """Reads a prompt: hidden states, and every layer's keys, values and statistics (all static sizes)."""
        self._check_length(tokens.shape[1])
        newest = kv_cache.newest_columns(tokens.shape[1] - 1, query_window) if query_window else None

        def attend_fn(q: Heads, k: KVHeads, v: KVHeads, mask: LayerMask):
            if observe:
                out, received = attend_and_observe(q, k, v, to_visible(mask))
            else:
                out, received = attend(q, k, v, mask, self.impl, self.sizes), None
            # Windows longer than the prompt hold queries that do not exist; their positions say so.
            queries = None if newest is None else q[:, :, jnp.maximum(newest, 0)]
            return out, PrefillLayer(k, v, received, queries)

        rope = rope_tables(self.config, positions)
        x, layers = self._embed(tokens), []
        for index, layer in enumerate(self.layers):
            seen = layer_mask(mask, index)
            x, kept = layer.extend(x, rope, lambda q, k, v, seen=seen: attend_fn(q, k, v, seen))
            layers.append(kept)
        return self.norm(x), tuple(layers)

    def decode(
        self,
        tokens: Int[Array, "batch tokens"],
        rope: tuple[Float[Array, "batch 1 tokens half"], Float[Array, "batch 1 tokens half"]],
        columns: Int[Array, "batch tokens"],
        cache: KVCache,
        slots: tuple[Int[Array, ""], ...],
        number: Int[Array, ""],
    ) -> tuple[Float[Array, "batch tokens hidden"], KVCache]:
        """Reads a token of a response or a chunk of a prompt: writes the keys to the slots from `slots[layer]` on, and
        attends to every live key, those included.

        Args:
          rope: `rope_tables` of the tokens' positions. Given, so that a loop over steps can make them all before it
            begins: within it, a compiler may compute every sine again in every layer.
          columns: of the tokens, ascending; -1 for those that are not there (padding, rows that have ended).
          number: of the first query, see `LayerCache.queries`.
        """

        def attend_fn(q: Heads, k: KVHeads, v: KVHeads, layer_cache: LayerCache, slot: Int[Array, ""]):
            layer_cache = kv_cache.write(layer_cache, slot, k, v, columns)
            keys, values = kv_cache.full_precision(layer_cache)
            if tokens.shape[1] == 1:
                out, received = decode_attention(q, keys, values, layer_cache.valid, self.decode_impl)
            else:
                out, received = attend_and_observe(q, keys, values, kv_cache.visible(layer_cache, columns))
            return out, kv_cache.observe(layer_cache, received, q, number)

        x, updated = self._embed(tokens), []
        for layer, old, slot in zip(self.layers, cache, slots, strict=True):
            x, new = layer.extend(x, rope, lambda q, k, v, old=old, slot=slot: attend_fn(q, k, v, old, slot))
            updated.append(new)
        return self.norm(x), tuple(updated)

    def logits(self, hidden: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens vocab"]:
        """Logits in float32 or wider."""
        table = self.embed.embedding.T if self.config.tie_embeddings else self.lm_head()
        wide = jnp.promote_types(self.config.dtype, jnp.float32)
        return jnp.einsum("btd,dv->btv", hidden, table.astype(hidden.dtype), preferred_element_type=wide)

    def _embed(self, tokens: Array) -> Array:
        return constrain(gathered_embedding(self.embed.embedding)[tokens].astype(self.config.dtype))

    def _check_length(self, tokens: int) -> None:
        if tokens > self.config.max_positions:
            raise ValueError(f"expected at most {self.config.max_positions} tokens (the model's context); got {tokens}")


def apply_model(model: Decoder, params: Params, *args: Any, method: Callable[..., Any] = Decoder.__call__) -> Any:
    """One of the Decoder's methods as a pure function of its parameters."""
    return model.apply({"params": params}, *args, method=method)
