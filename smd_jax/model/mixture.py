"""A mixture of experts instead of an MLP: a router chooses a few experts for every token.

    router logits ─► top k ─► gates (softmax of the chosen logits)        x ─► experts ─► sum of gate * expert(x)

Tokens are sorted by expert, and each expert multiplies its own in one product (`jax.lax.ragged_dot`). No token is
dropped. With given experts only the gates are computed, from the logits of those experts. On a mesh the tensor axis
splits the experts like attention heads: each device has some of them, and their outputs are summed.

    layers_0/mlp/router/kernel                      [hidden, experts]
    layers_0/mlp/experts/{gate_proj,up_proj}        [experts, hidden, width]
    layers_0/mlp/experts/down_proj                  [experts, width, hidden]
    layers_0/mlp/experts/{gate_bias,up_bias,down_bias}, layers_0/mlp/router/bias           with Experts.bias

Each expert may have LoRA adapters of its matrices, see `smd_jax.model.lora`. They are products by expert as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.config import Activation, Experts
from smd_jax.devices.sharding import over_experts
from smd_jax.model.lora import LORA
from smd_kernels.reference import product_precision

ALPHA = 1.702  # of the sigmoid in gpt-oss' activation


class Router(nn.Module):
    """Router logits in float32 or wider."""

    experts: Experts

    @nn.compact
    def __call__(self, x: Float[Array, "*tokens hidden"]) -> Float[Array, "*tokens count"]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.experts.count))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        precision = product_precision(x.dtype)
        logits = jnp.matmul(x, kernel.astype(x.dtype), precision=precision, preferred_element_type=wide)
        if self.experts.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.experts.count,))
            # Cast to the compute dtype first, because the sampler casts its parameters and the learner does not.
            logits = logits + bias.astype(x.dtype).astype(wide).reshape((1,) * (x.ndim - 1) + (-1,))
        return logits


class ExpertWeights(nn.Module):
    """The matrices of all experts of a layer, by name; with adapters also `gate_proj_lora_A`, `gate_proj_lora_B` and
    `gate_proj_scale` `[experts]`, which is the same for all of them."""

    experts: Experts

    @nn.compact
    def __call__(self, hidden: int) -> dict[str, Array]:
        count, width = self.experts.count, self.experts.intermediate_size
        shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
        fresh = nn.initializers.lecun_normal(batch_axis=0)
        weights = {name: self.param(name, fresh, (count, *shape)) for name, shape in shapes.items()}
        if self.experts.bias:
            for name, (_, out) in shapes.items():
                bias = name.replace("proj", "bias")
                weights[bias] = self.param(bias, nn.initializers.zeros, (count, out))
        for name in shapes:
            if self.has_variable(LORA, name):
                pair = self.get_variable(LORA, name)
                weights |= {f"{name}_{matrix}": pair[matrix] for matrix in ("lora_A", "lora_B")}
                # One per expert, so that it is split over devices like the matrices.
                weights[f"{name}_scale"] = jnp.broadcast_to(pair["scale"], (count,))
        return weights


class Mixture(nn.Module):
    """The part of a layer after attention: router and experts."""

    config: Experts
    activation: Activation

    def setup(self) -> None:
        self.router = Router(self.config)
        self.experts = ExpertWeights(self.config)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], given: Int[Array, "batch tokens per_token"] | None
    ) -> tuple[
        Float[Array, "batch tokens hidden"], Int[Array, "batch tokens per_token"], Float[Array, "batch tokens count"]
    ]:
        """The sum over experts; the chosen experts, the largest gate first where the router chose them; and its logits.

        Args:
          given: the experts of each token; the router chooses for a token with a negative one, and for all if None.
        """
        logits = self.router(x)
        chosen = jax.lax.top_k(logits, self.config.per_token)[1].astype(jnp.int32)
        if given is not None:
            known = jnp.all(given >= 0, axis=-1, keepdims=True)
            chosen = jnp.where(known, given.astype(jnp.int32), chosen)
        gates = gates_of(logits, chosen, self.config)
        weights = {
            # Scales stay in float32, as in a merged matrix.
            name: weight if name.endswith("_scale") else weight.astype(x.dtype)
            for name, weight in self.experts(x.shape[-1]).items()
        }
        run = partial(expert_sum, self.config, self.activation)
        return over_experts(run, self.config.count, weights, x, chosen, gates).astype(x.dtype), chosen, logits


def gates_of(
    logits: Float[Array, "*tokens count"], chosen: Int[Array, "*tokens per_token"], experts: Experts
) -> Float[Array, "*tokens per_token"]:
    """The gates of chosen experts: softmax among all experts, or among the chosen."""
    found = jnp.take_along_axis(logits, chosen, axis=-1)
    if experts.normalised:
        return jax.nn.softmax(found, axis=-1)
    return jnp.exp(found - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def expert_sum(
    experts: Experts,
    activation: Activation,
    weights: dict[str, Array],
    first: Int[Array, ""] | int,
    x: Float[Array, "batch tokens hidden"],
    chosen: Int[Array, "batch tokens per_token"],
    gates: Float[Array, "batch tokens per_token"],
) -> Float[Array, "batch tokens hidden"]:
    """Sum of gate * expert(x) over a token's experts among those in `weights`, float32 or wider.

    Args:
      weights: of experts `first`, `first + 1`, …; others are left out.
    """
    flat = x.reshape(-1, x.shape[-1])
    per_token = chosen.shape[-1]
    count = weights["gate_proj"].shape[0]
    local = chosen.reshape(-1) - first
    # Experts of other devices come last, after all groups.
    local = jnp.where((local >= 0) & (local < count), local, count)
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)
    sorted_experts = local[order]
    there = (sorted_experts < count)[:, None]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = partial(jax.lax.ragged_dot, precision=product_precision(x.dtype), preferred_element_type=wide)

    def projected(rows: Array, name: str) -> Array:
        matrix = f"{name}_proj"
        out = product(rows, weights[matrix], sizes)
        if f"{matrix}_lora_A" in weights:
            thin = weights[f"{matrix}_scale"][0] * product(rows, weights[f"{matrix}_lora_A"], sizes)
            out = out + product(thin.astype(x.dtype), weights[f"{matrix}_lora_B"], sizes)
        if experts.bias:
            # Widened first, so that the gradient of an expert's bias is summed over its tokens in `wide`.
            out = out + weights[f"{name}_bias"].astype(wide)[jnp.minimum(sorted_experts, count - 1)]
        return out

    rows = flat[order // per_token]
    gate, up = projected(rows, "gate"), projected(rows, "up")
    if experts.clamp is None:
        inner = (nn.silu(gate) if activation == "silu" else nn.gelu(gate, approximate=True)) * up
    else:
        gate, up = jnp.minimum(gate, experts.clamp), jnp.clip(up, -experts.clamp, experts.clamp)
        inner = gate * nn.sigmoid(ALPHA * gate) * (up + 1)
    out = jnp.where(there, projected(inner.astype(x.dtype), "down"), 0)
    # Back in the order of tokens: the sum over a token's experts has a fixed order on any machine.
    by_token = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(-1, per_token, x.shape[-1])
    return (by_token * gates.reshape(-1, per_token, 1).astype(wide)).sum(1).reshape(x.shape)


def routing_dtype(count: int) -> Any:
    """The smallest integer dtype for indices of `count` experts, and -1 for none."""
    return jnp.int8 if count <= 2**7 else jnp.int16
