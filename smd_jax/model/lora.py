"""LoRA: low-rank adapters of frozen matrices (https://arxiv.org/abs/2106.09685).

    x W   becomes   x W + scale * (x A) B            A [in, rank] random, B [rank, out] initially zero

The adapters are stored in the parameters:

    embed, layers_0, …, norm                                  the frozen base
    lora/matrices/layers_0/attention/q_proj/lora_A            [hidden, rank]
    lora/matrices/layers_0/attention/q_proj/lora_B            [rank, heads * head_dim]
    lora/matrices/layers_0/mlp/experts/up_proj/lora_A         [experts, hidden, rank]       every expert has its own

The scale is stored with them. The same model is the policy with adapters and the base without them. So the base is the
reference policy and the frozen teacher, without a copy.

Sampler and learner use the same adapters. Merged weights would be a second copy of the model and, in 16 bits, a
different function, because rounding removes most of a small adapter. `Projection` is the dense layer that applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, no_type_check
from zlib import crc32

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Key

from smd_jax.model.layer_runs import layers_in_name
from smd_jax.model.shared_prompt import SharedPrompt
from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types

LORA = "lora"
EXPERTS = "experts"  # module that stacks the matrices of a layer's experts, `smd_jax.model.mixture`

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Targets and sizes of adapters; rank and alpha have TRL's defaults.

    There is no dropout, because sampler and learner would be two policies.

    Attributes:
      rank: rank of A and B.
      alpha: the scale is alpha / rank, so that the learning rate does not depend on the rank.
      targets: projections that get an adapter, in every layer. The default, all seven, leaves out those that the model
        lacks: AFM has no gate_proj.
      rank_stabilised: use the scale alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[Target, ...] = TARGETS
    rank_stabilised: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.rank < 1:
            raise ValueError(f"expected a rank >= 1; got {self.rank}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"expected a finite alpha > 0; got {self.alpha}")
        if not self.targets or len(set(self.targets)) < len(self.targets) or set(self.targets) - set(TARGETS):
            raise ValueError(f"expected targets, each once, of {', '.join(TARGETS)}; got {self.targets}")

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class Adapters(PyTreeNode):
    """The adapters of a model.

    Attributes:
      matrices: `lora_A` `[in, rank]` and `lora_B` `[rank, out]`, float32 or wider, at the paths of their modules; of
        experts `[experts, in, rank]` and `[experts, rank, out]`.
      config: static, so trees with different scales have different structures in JAX.
    """

    matrices: dict[str, Any]
    config: LoraConfig = struct.field(pytree_node=False)


def has_lora(params: Any) -> bool:
    """Whether these parameters have adapters; false for parameters that are not a mapping."""
    return isinstance(params, Mapping) and LORA in params


def check_reads_lora(model: object, params: Any) -> None:
    """Checks that a model reads the adapters of its parameters, which it declares by `reads_lora = True`.

    Raises:
      TypeError: another model with adapters of `add_lora`, which would compute the base and train nothing.
    """
    model = model.model if isinstance(model, SharedPrompt) else model
    if has_lora(params) and isinstance(params[LORA], Adapters) and not getattr(model, "reads_lora", False):
        raise TypeError(
            "expected a model with reads_lora = True, which reads params['lora'] (smd.model.lora.variables_of) as "
            f"Decoder does; got {type(model).__name__}, whose adapters would never be trained"
        )


def add_lora(params: Mapping[str, Any], config: LoraConfig, key: Key[Array, ""]) -> dict[str, Any]:
    """Adds new adapters, which do not change the model's function.

    A is uniform in ±1 / sqrt(in), as in PEFT, and B zero. Adapters are in float32, or wider if the matrix is.

    Args:
      params: parameters of the policy, a mapping; its leaves are not copied.
      key: consumed.

    Raises:
      ValueError: if there are adapters already, or the model lacks a target. Of the default targets it needs only one;
        the config in the result has those that exist.
    """
    if has_lora(params):
        raise ValueError("expected parameters without adapters; got some: merge_lora(params) merges them")
    # The stacked experts of a layer are one module per target.
    flat: dict[Any, Any] = flatten_dict(dict(params))
    found = {path[:-1]: leaf for path, leaf in flat.items() if path[-1] == "kernel"}
    found |= {path: leaf for path, leaf in flat.items() if path[-2:-1] == (EXPERTS,) and path[-1] in TARGETS}
    there = {path[-1] for path in found}
    targets = tuple(target for target in config.targets if target in there)
    # The default, all seven, leaves out those that the model lacks.
    if len(targets) < len(config.targets) and (not targets or len(config.targets) < len(TARGETS)):
        known = [target for target in TARGETS if target in there]
        missing = [target for target in config.targets if target not in there]
        raise ValueError(f"expected targets among the matrices of the model, {known}; got {missing}, too")
    config = replace(config, targets=targets)
    kernels = {path: kernel for path, kernel in found.items() if path[-1] in targets}
    matrices = {}
    for path, kernel in kernels.items():
        *experts, width_in, width_out = kernel.shape
        dtype = jnp.promote_types(kernel.dtype, jnp.float32)
        bound = width_in**-0.5
        # The key depends on the matrix's name, so that its initial adapter does not depend on the other targets.
        adapter_key = jax.random.fold_in(key, crc32("/".join(path).encode()))
        drawn = jax.random.uniform(adapter_key, (*experts, width_in, config.rank), dtype, -bound, bound)
        matrices[path] = {"lora_A": drawn, "lora_B": jnp.zeros((*experts, config.rank, width_out), dtype)}
    return {**params, LORA: Adapters(unflatten_dict(matrices), config)}


def base_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without adapters: the frozen base. Its leaves are not copied."""
    return {name: part for name, part in params.items() if name != LORA}


def merge_lora(params: Mapping[str, Any]) -> dict[str, Any]:
    """Merges adapters into copies of their matrices, W + scale * A B, for `save_checkpoint`. Parameters without
    adapters are unchanged.

    Summed in float32 or wider, then rounded to the dtype of W.
    """
    if not has_lora(params):
        return dict(params)
    adapters: Adapters = params[LORA]
    flat = flatten_dict(base_params(params))
    for path, pair in by_module(adapters).items():
        place = path if path[-2:-1] == (EXPERTS,) else (*path, "kernel")
        flat[place] = _merged(flat[place], pair["lora_A"], pair["lora_B"], _scale(adapters, pair))
    return unflatten_dict(flat)


def by_module(adapters: Adapters) -> dict[tuple[str, ...], dict[str, Array]]:
    """Maps the path of each module with adapters, such as `("layers_0", "mlp", "up_proj")`, to its adapter."""
    flat: Any = flatten_dict(adapters.matrices, is_leaf=lambda path, tree: "lora_A" in tree)
    return flat


def variables_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The variables for Flax's `apply`, with adapters as a separate collection, which Projection reads."""
    if not has_lora(params):
        return {"params": params}
    adapters: Adapters = params[LORA]
    # The scale is an array, because layers share one trace and have no static arguments here.
    scaled = {}
    for path, pair in by_module(adapters).items():
        scale, layers = _scale(adapters, pair), layers_in_name(path[0])
        scaled[path] = pair | {"scale": scale if layers is None else jnp.broadcast_to(scale, (len(layers),))}
    return {"params": base_params(params), LORA: unflatten_dict(scaled)}


@no_type_check  # the annotations of nn.Dense cannot be checked
class Projection(nn.Dense):
    """`nn.Dense`; and with `lora_A`, `lora_B` and `scale` in Flax's collection "lora" (`variables_of`), plus
    scale * (x A) B."""

    def __call__(self, inputs: Float[Array, "*tokens in"]) -> Float[Array, "*tokens out"]:
        out = super().__call__(inputs)
        if not self.has_variable(LORA, "lora_A"):
            return out
        a, b = (self.get_variable(LORA, name).astype(out.dtype) for name in ("lora_A", "lora_B"))
        # Scales the narrow product in float32, so that the scale equals that of a merged matrix.
        wide = jnp.promote_types(out.dtype, jnp.float32)
        thin = jnp.matmul(inputs.astype(out.dtype), a, precision=self.precision, preferred_element_type=wide)
        thin = (self.get_variable(LORA, "scale") * thin).astype(out.dtype)
        return out + jnp.matmul(thin, b, precision=self.precision)


def _scale(adapters: Adapters, pair: Mapping[str, Array]) -> Float[Array, ""]:
    # Float32 or wider, so that a 16-bit copy of the adapters has the same scale.
    return jnp.asarray(adapters.config.scale, jnp.promote_types(pair["lora_A"].dtype, jnp.float32))


@jax.jit
def _merged(
    kernel: Float[Array, "*experts in out"],
    a: Float[Array, "*experts in rank"],
    b: Float[Array, "*experts rank out"],
    scale: Float[Array, ""],
) -> Float[Array, "*experts in out"]:
    added = scale * jnp.matmul(a, b, precision="highest")
    return (kernel.astype(added.dtype) + added).astype(kernel.dtype)
