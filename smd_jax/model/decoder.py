"""A Flax Linen decoder, configurable for all families in `smd_jax.model.families`.

All families have RMSNorm, RoPE, grouped queries and an MLP. They differ in fields of `ModelConfig`.

Pure functions of a plain parameter pytree:

    model = Decoder(config)
    logits = model.apply({"params": params}, tokens, positions, mask)    # teacher forced, explicit mask

It also has the five members of `smd_jax.model.protocol.LanguageModel`, which sampler and learner use. These accept LoRA
adapters in the parameters, see `smd_jax.model.lora`. The parameters:

    embed/embedding                                          [vocab, hidden]
    layers_0/attention_norm/scale                            [hidden]                                   with pre_norms
    layers_0/attention/{q_proj,k_proj,v_proj}/kernel         [hidden, heads * head_dim], of k and v kv_heads * head_dim
    layers_0/attention/{q_proj,k_proj,v_proj}/bias           [heads * head_dim], …                      with qkv_bias
    layers_0/attention/{q_norm,k_norm}/scale                 [head_dim], or [heads * head_dim], …       with qk_norm
    layers_0/attention/sinks                                 [heads]                             with attention_sinks
    layers_0/attention/o_proj/kernel                         [heads * head_dim, hidden]
    layers_0/attention/o_proj/bias                           [hidden]                                   with o_bias
    layers_0/attention_post_norm/scale                       [hidden]                                   with post_norms
    layers_0/mlp_norm/scale                                  [hidden]                                   with pre_norms
    layers_0/mlp/{gate_proj,up_proj}/kernel                  [hidden, intermediate]                     gate: gated_mlp
    layers_0/mlp/down_proj/kernel                            [intermediate, hidden]
    layers_0/mlp/{gate_proj,up_proj,down_proj}/bias          [intermediate], …                          with mlp_bias
    layers_0/mlp/{router,experts}/…                          see `smd_jax.model.mixture`                with experts
    layers_0/mlp_post_norm/scale                             [hidden]                                   with post_norms
    layers_1/…
    norm/scale                                               [hidden]
    lm_head/kernel                                           [hidden, vocab]                            unless tied
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.config import Activation, ModelConfig, check_choice
from smd_jax.devices.sharding import columns_apart, constrain_tokens, gathered_embedding
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.message.masks import Mask
from smd_jax.model.attention import AttentionConfig, BlockSizes, DecodeImplementation, Implementation
from smd_jax.model.embedding import look_up
from smd_jax.model.layer_runs import carry_layers, equal_runs, run_layers, run_of, state_kind
from smd_jax.model.lora import LORA, Projection, variables_of
from smd_jax.model.mixture import Mixture
from smd_jax.model.protocol import Attend, LayerState, ModelShape, Params, Routed, RoutingShape
from smd_jax.model.rope import Rope, rope_tables, rotate
from smd_jax.model.stacked_params import check_names, layer_of, layers_of, stack_params
from smd_jax.model.teacher_forced import TeacherForced, layer_masks
from smd_jax.pytrees import stack, unstack
from smd_kernels.reference import product_precision, soft_capped

Ropes = tuple[Rope, ...]  # of all layers; or of full layers, and of layers with a window


class RMSNorm(nn.Module):
    """x / rms(x) * scale, or times 1 + scale; statistics in float32 or wider."""

    epsilon: float
    plus_one: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # The initial scale is 1 in either form.
        fresh = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = self.param("scale", fresh, (x.shape[-1],))
        # XLA:CPU reduces slowly if the first axis is one, such as the batch of one packed row: 1,024 tokens of width
        # 256 took 3.9 ms forward and backward, and take 0.2 without it.
        rows = x[0] if x.ndim > 2 and x.shape[0] == 1 else x
        wide = rows.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.plus_one:
            # Added in float32: in bfloat16 the sum would lose the difference from one.
            scale = 1 + scale.astype(wide.dtype)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        # Scaled in float32, so that there is only one rounding to the dtype of x.
        return (normed * scale.reshape((1,) * (rows.ndim - 1) + (-1,))).astype(x.dtype).reshape(x.shape)


def norm_of(config: ModelConfig) -> RMSNorm:
    """The norm of this model."""
    return RMSNorm(config.norm_eps, config.norm_plus_one)


def flat(x: Float[Array, "batch tokens width"]) -> Float[Array, "... width"]:
    """Flattens to `[batch * tokens, width]`, which XLA multiplies faster on CPUs (an MLP: 1.6 s instead of 2.3). If
    tokens are sharded, returns `x`, because one axis cannot express that sharding."""
    return x if columns_apart() else x.reshape(-1, x.shape[-1])


class Attention(nn.Module):
    """Projections around the attention that the caller passes in."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        dense = partial(Projection, dtype=c.dtype, precision=product_precision(c.dtype))
        self.q_proj = dense(c.num_heads * c.head_dim, use_bias=c.qkv_bias)
        self.k_proj = dense(c.num_kv_heads * c.head_dim, use_bias=c.qkv_bias)
        self.v_proj = dense(c.num_kv_heads * c.head_dim, use_bias=c.qkv_bias)
        self.o_proj = dense(c.hidden_size, use_bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = norm_of(c)
            self.k_norm = norm_of(c)
        if c.attention_sinks:
            self.sinks = self.param("sinks", nn.initializers.zeros, (c.num_heads,))

    def __call__(self, x: Array, rope: Rope | None, attend: Attend, layer: LayerState) -> tuple[Array, LayerState]:
        tokens = flat(x)
        projected = [self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens)]
        if self.config.qk_norm and self.config.qk_norm_over == "all":
            projected[:2] = self.q_norm(projected[0]), self.k_norm(projected[1])
        # [batch, heads, tokens, head_dim]
        split = (part.reshape(*x.shape[:2], -1, self.config.head_dim).swapaxes(1, 2) for part in projected)
        # Keeps the sharding of x: each device projects its own tokens, and devices of a sequence exchange q, k, v and
        # the output.
        q, k, v = (constrain_tokens(part, axis=2) for part in split)
        if self.config.qk_norm and self.config.qk_norm_over == "head":
            # Per head, before RoPE.
            q = self.q_norm(q)
            k = self.k_norm(k)
        # Rotated before attention, because a cache keeps keys at their original positions.
        q, k = self._rotated(q, k, rope)
        # A user's `attend` need not accept sinks.
        out, layer = attend(q, k, v, layer, self.sinks) if self.config.attention_sinks else attend(q, k, v, layer)
        out = constrain_tokens(out, axis=2).swapaxes(1, 2)
        return self.o_proj(out.reshape(*tokens.shape[:-1], -1)).reshape(x.shape), layer

    def _rotated(self, q: Array, k: Array, rope: Rope | None) -> tuple[Array, Array]:
        """Applies RoPE to queries and keys, and scales queries. Attention divides scores by sqrt(head_dim), so queries
        are multiplied by the ratio to the model's scale."""
        c = self.config
        scale = _query_scale(c)
        if rope is None:
            return _times(q, scale), k
        apply = partial(rotate, interleaved=c.rope_interleaved)
        if rope.query_scale is None and (scale == 1 or c.rotated < c.head_dim):
            return apply(_times(q, scale), rope), apply(k, rope)
        # The ratio is in the tables, so that 16-bit queries are rounded once.
        factor = scale if rope.query_scale is None else scale * rope.query_scale[..., None]
        return apply(q, Rope(factor * rope.cos, factor * rope.sin)), apply(k, rope)


def _query_scale(config: ModelConfig) -> float:
    """Factor of the queries: the model's scale of scores times sqrt(head_dim)."""
    if config.attention_multiplier is not None:
        return config.attention_multiplier * config.head_dim**0.5
    scalar = config.query_pre_attn_scalar
    return 1.0 if scalar is None or scalar == config.head_dim else (config.head_dim / scalar) ** 0.5


def _times(x: Array, factor: float) -> Array:
    """x * factor, multiplied in float32 or wider and rounded once."""
    return x if factor == 1 else (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)


class MLP(nn.Module):
    """SwiGLU, GeGLU, or without a gate."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        dense = partial(Projection, dtype=c.dtype, precision=product_precision(c.dtype))
        if c.gated_mlp:
            self.gate_proj = dense(c.intermediate_size, use_bias=c.mlp_bias)
        self.up_proj = dense(c.intermediate_size, use_bias=c.mlp_bias)
        self.down_proj = dense(c.hidden_size, use_bias=c.mlp_bias)

    def __call__(self, x: Array) -> Array:
        tokens = flat(x)
        if not self.config.gated_mlp:
            return self.down_proj(activated(self.up_proj(tokens), self.config.activation)).reshape(x.shape)
        gate = activated(self.gate_proj(tokens), self.config.activation)
        return self.down_proj(gate * self.up_proj(tokens)).reshape(x.shape)


def activated(x: Array, activation: Activation) -> Array:
    """The activation function of an MLP."""
    if activation == "gelu_tanh":
        return nn.gelu(x, approximate=True)
    return nn.silu(x) if activation == "silu" else jnp.square(nn.relu(x))


class Layer(nn.Module):
    """One decoder layer.

    Attributes:
      mixture: whether it has experts instead of an MLP.
    """

    config: ModelConfig
    mixture: bool = False

    def setup(self) -> None:
        c = self.config
        if c.pre_norms:
            self.attention_norm = norm_of(c)
            self.mlp_norm = norm_of(c)
        self.attention = Attention(c)
        self.mlp = Mixture(c.experts, c.activation) if self.mixture and c.experts is not None else MLP(c)
        if c.post_norms:
            self.attention_post_norm = norm_of(c)
            self.mlp_post_norm = norm_of(c)

    def __call__(self, x: Array, rope: Rope | None, attend: Attend, layer: LayerState) -> tuple[Array, LayerState]:
        """The residual stream after this layer, and the layer's new state."""
        c = self.config
        routed = isinstance(layer, Routed)
        given = layer.experts if routed else None
        state = layer.state if routed else layer
        out, state = self.attention(self.attention_norm(x) if c.pre_norms else x, rope, attend, state)
        x = x + _times(self.attention_post_norm(out) if c.post_norms else out, c.residual_multiplier)
        read = self.mlp_norm(x) if c.pre_norms else x
        if isinstance(self.mlp, Mixture):
            out, *routing = self.mlp(read, given)
        else:
            out, routing = self.mlp(read), (None, None)
        x = x + _times(self.mlp_post_norm(out) if c.post_norms else out, c.residual_multiplier)
        return constrain_tokens(x), Routed(state, *routing) if routed else state


# Stored by a layer for the backward pass: everything; only its input; or its input and the products with weights, so
# that attention and elementwise operations are recomputed.
Remat = Literal["none", "full", "dots"]

# Attention's products have batch dimensions, products with weights have none (`flat`).
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@dataclass(frozen=True)
class OneLayer:
    """A layer as a function of its variables, see `smd_jax.model.layer_runs`.

    Attributes:
      looped: whether a loop over layers calls it.
    """

    config: ModelConfig
    mixture: bool
    remat: Remat
    attend: Attend
    looped: bool

    @partial(jax.jit, static_argnums=0)  # traced and lowered once for all layers of the same shapes
    def __call__(
        self, variables: dict[str, Any], rope: Rope | None, x: Array, state: LayerState
    ) -> tuple[Array, LayerState]:
        layer = Layer(self.config, self.mixture, parent=None)

        def apply(variables: dict[str, Any], rope: Rope | None, x: Array, state: LayerState) -> Any:
            return layer.apply(variables, x, rope, self.attend, state)

        if self.remat != "none":
            policy = _DOTS if self.remat == "dots" else None
            # In a loop, the compiler cannot merge a recomputed product with the one of the forward pass.
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=not self.looped)
        return apply(variables, rope, x, state)


class Head(nn.Module):
    """The output projection's matrix `[hidden, vocab]`."""

    hidden_size: int
    vocab_size: int

    @nn.compact
    def __call__(self) -> Float[Array, "hidden vocab"]:
        return self.param("kernel", nn.initializers.lecun_normal(), (self.hidden_size, self.vocab_size))


class Decoder(nn.Module):
    """The language model; a `smd_jax.model.protocol.LanguageModel`.

    Attributes:
      config: its shape.
      remat: gradient checkpointing per layer. "none"; "full": recomputes each layer from its input; "dots": recomputes
        all but the products with weights, which cost most. False is "none", True is "full".
      impl, sizes: attention implementation of the teacher-forced pass and of prefill, and its block sizes, see
        `smd_jax.model.attention.attend`. None chooses the fastest that can run.
      decode_impl: attention implementation of decoding, see `smd_jax.model.attention.decode`.
      scan_layers: loop over runs of at least four equal layers, so that compile time does not grow with the depth. On
        CPUs a rollout is slower that way, see docs/models.md. False: every layer is compiled separately.
    """

    config: ModelConfig
    remat: bool | Remat = False
    impl: Implementation | None = None
    sizes: BlockSizes | None = None
    decode_impl: DecodeImplementation | None = None
    scan_layers: bool = False

    reads_lora = True  # `smd_jax.model.lora.check_reads_lora`; without an annotation, so that it is no field

    def __post_init__(self) -> None:
        if not isinstance(self.remat, bool):
            check_choice("remat", self.remat, get_args(Remat))
        super().__post_init__()

    def setup(self) -> None:
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=nn.initializers.normal(0.02))
        self.layers = [Layer(c, c.is_mixture(index)) for index in range(c.num_layers)]
        self.norm = norm_of(c)
        if not c.tie_embeddings:
            self.lm_head = Head(c.hidden_size, c.vocab_size)

    def __call__(
        self, tokens: Int[Array, "batch tokens"], positions: Int[Array, "batch tokens"], mask: Mask
    ) -> Float[Array, "batch tokens vocab"]:
        """Logits in float32 or wider of every token's successor.

        Args:
          tokens: ids.
          positions: position of each token in its own sequence, see `smd_jax.message.masks.positions`.
          mask: a ShadowMask, or booleans of any pattern that broadcast to `[batch, layers, kv_heads, queries, keys]`.

        Raises:
          ValueError: if the mask has a wrong shape, or there are more tokens than the model's context.
        """
        layers = layer_masks(self.shape, tokens, mask)
        ropes = self.encode_positions(positions)
        return self._logits(self._hidden(tokens, ropes, TeacherForced(self.shape), layers)[0])

    def _hidden(
        self, tokens: Int[Array, "batch tokens"], ropes: Ropes, attend: Attend, layers: tuple[LayerState, ...]
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[LayerState, ...]]:
        if self.has_variable("params", LORA):
            raise ValueError(
                f"expected adapters in a separate collection: apply(smd_jax.model.lora.variables_of(params), …); "
                f"got {LORA!r} among the parameters"
            )
        c = self.config
        # Cast after the look-up: a few rows instead of a whole vocabulary.
        x = constrain_tokens(look_up(gathered_embedding(self.embed.embedding), tokens).astype(c.dtype))
        if c.scale_embeddings:
            # The factor is in the compute dtype, as Gemma was trained: in bfloat16 the root of 1,152 is 34.
            x = x * jnp.asarray(c.hidden_size**0.5, c.dtype)
        x = _times(x, c.embedding_multiplier)
        x, new = self._all_layers(x, ropes, attend, layers)
        return self.norm(x), new

    def _all_layers(
        self, x: Array, ropes: Ropes, attend: Attend, layers: tuple[LayerState, ...]
    ) -> tuple[Array, tuple[LayerState, ...]]:
        """All layers in order, runs of equal ones in a loop."""
        # A state that several layers share appears once.
        groups: list[Sequence[LayerState]] = [(state,) for state in layers]
        if self.scan_layers and not self.is_initializing() and all(run_of(state) is None for state in layers):
            kinds = [(self._kind(index), state_kind(state, index)) for index, state in enumerate(layers)]
            groups = [layers[here.start : here.stop] for here in equal_runs(kinds)]
        new: list[LayerState] = []
        first = 0
        for states in groups:
            run = run_of(states[0])
            here = range(first, first + (len(states) if run is None else run.layers))
            first = here.stop
            weights = layers_of(self.variables, here) if len(here) > 1 else None
            rope = None
            if self.config.has_rope(here[0]):
                rope = ropes[0] if self.config.window(here[0]) is None else ropes[-1]
            one = OneLayer(self.config, self.config.is_mixture(here[0]), self.recomputed, attend, weights is not None)
            if run is not None:
                if weights is None:  # its layers differ in their adapters
                    weights = [layer_of(self.variables, index) for index in here]
                x, state = carry_layers(one, weights, rope, x, states[0])
                new.append(state)
            elif weights is not None:
                x, stacked = run_layers(one, weights, rope, x, stack(states))
                new.extend(unstack(stacked, len(here)))
            else:
                for index, state in zip(here, states, strict=True):
                    if self.is_initializing():
                        x, state = self.layers[index](x, rope, attend, state)
                    else:
                        x, state = one(layer_of(self.variables, index), rope, x, state)
                    new.append(state)
        return x, tuple(new)

    @nn.nowrap
    def _kind(self, index: int) -> tuple[Any, ...]:
        """The settings in which equal layers agree."""
        c = self.config
        return c.window(index), c.has_rope(index), c.is_mixture(index)

    def _logits(self, hidden: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens vocab"]:
        # Multiplied here, because logits of nn.Embed or nn.Dense would have the compute dtype instead of float32.
        table = self.embed.embedding.T if self.config.tie_embeddings else self.lm_head()
        wide = jnp.promote_types(self.config.dtype, jnp.float32)
        product = partial(jnp.einsum, precision=product_precision(hidden.dtype), preferred_element_type=wide)
        logits = product("btd,dv->btv", hidden, table.astype(hidden.dtype))
        if self.config.logits_divisor != 1:
            logits = logits / self.config.logits_divisor
        return soft_capped(logits, self.config.logit_softcap)

    @property
    def recomputed(self) -> Remat:
        """`remat` as a name."""
        if isinstance(self.remat, bool):
            return "full" if self.remat else "none"
        return self.remat

    # The protocol: pure functions of the parameters, which Flax must not wrap.

    @property
    def shape(self) -> ModelShape:
        c, routing = self.config, None
        mixtures = tuple(layer for layer in range(c.num_layers) if c.is_mixture(layer))
        if c.experts is not None and mixtures:
            routing = RoutingShape(layers=mixtures, count=c.experts.count, per_token=c.experts.per_token)
        kinds = [self._kind(index) for index in range(c.num_layers)] if self.scan_layers else []
        runs = tuple(len(layers) for layers in equal_runs(kinds))
        return ModelShape(
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            hidden_size=c.hidden_size,
            vocab_size=c.vocab_size,
            max_positions=c.max_positions,
            dtype=c.dtype,
            windows=c.sliding_windows,
            attention=AttentionConfig(
                impl=self.impl, sizes=self.sizes, decode_impl=self.decode_impl, softcap=c.attention_softcap
            ),
            routing=routing,
            runs=runs if max(runs, default=1) > 1 else (),
            full_float32=True,
        )

    @nn.nowrap
    def encode_positions(self, positions: Int[Array, "batch tokens"]) -> Ropes:
        """cos and sin of RoPE's angles; two pairs if layers with a window have another base."""
        tables = rope_tables(self.config, positions)
        if self.config.local_rope_theta is None:
            return (tables,)
        return tables, rope_tables(self.config, positions, local=True)

    @nn.nowrap
    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "batch tokens"],
        positions: Ropes,
        attend: Attend,
        layers: tuple[LayerState, ...],
    ) -> tuple[Float[Array, "batch tokens hidden"], tuple[LayerState, ...]]:
        """The normalised last hidden state, and every layer's new state."""
        check_names(params, self.config.num_layers, self.config.tie_embeddings)
        return self._apply(params, Decoder._hidden, tokens, positions, attend, layers)

    @nn.nowrap
    def logits(self, params: Params, hidden: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens vocab"]:
        """Logits in float32 or wider."""
        return self._apply(params, Decoder._logits, hidden)

    @nn.nowrap
    def _apply(self, params: Params, method: Callable[..., Any], *args: Any) -> Any:
        return self.apply(variables_of(params), *args, method=method)

    @nn.nowrap
    def compute_params(self, params: Mapping[str, Any]) -> Params:
        """Casts all operands of matrix products to the compute dtype. Scales of norms and sinks are unchanged, because
        they are used in float32. So is a gate of evictions, which sampler and learner must read alike."""

        def converted(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            # Unconverted leaves stay the same object, which `smd_jax.sampler.static` checks.
            name = getattr(path[-1], "key", None)  # a user's gate may hold a list
            of_gate = getattr(path[0], "key", None) == EVICTION_GATE
            unchanged = name in ("scale", "sinks") or of_gate or leaf.dtype == self.config.dtype
            return leaf if unchanged else leaf.astype(self.config.dtype)

        return stack_params(jax.tree_util.tree_map_with_path(converted, params), self.shape.layer_runs)
