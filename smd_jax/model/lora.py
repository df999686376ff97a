"""LoRA: adapters of low rank beside frozen matrices (https://arxiv.org/abs/2106.09685).

    x W   becomes   x W + scale * (x A) B            A [in, rank] random, B [rank, out] zeros at first

The adapters lie in the parameters, under a name beside the model's own:

    embed, layers_0, …, norm                                  the base, which nothing changes
    lora/matrices/layers_0/attention/q_proj/lora_A            [hidden, rank]
    lora/matrices/layers_0/attention/q_proj/lora_B            [rank, heads * head_dim]

The scale travels with them. So one model is the policy of parameters with adapters and the base of the same parameters
without them: the base is the reference policy and the frozen teacher, and there is one copy of it.

Sampler and learner multiply with the same two thin matrices. Merged weights would be another function in 16 bits, where
most of what a small adapter adds is rounded away, and a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args
from zlib import crc32

import jax
import jax.numpy as jnp
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Key

from smd_jax.pytrees import any_leaves
from smd_jax.typed_fields import check_types

LORA = "lora"

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True)
class LoraConfig:
    """Which matrices have adapters, and of which size; the defaults of rank and alpha are TRL's.

    There is no dropout: sampler and learner would be two policies.

    Attributes:
      rank: of A and B.
      alpha: what the adapters add is scaled by alpha / rank, so that another rank needs no other learning rate.
      targets: projections of every layer that have adapters.
      rank_stabilised: scaled by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732).
    """

    rank: int = 16
    alpha: float = 32.0
    _: KW_ONLY
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
        """What the product of A and B is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


@any_leaves
class Adapters(struct.PyTreeNode):
    """The adapters of a model.

    Attributes:
      matrices: `lora_A` `[in, rank]` and `lora_B` `[rank, out]`, float32 or wider, at the paths of the modules that
        they belong to.
      config: no array. Two trees with other scales are other trees, to JAX as well.
    """

    matrices: dict[str, Any]
    config: LoraConfig = struct.field(pytree_node=False)


def has_lora(params: Any) -> bool:
    """Whether there are adapters in these parameters; in those that are no mapping there are none."""
    return isinstance(params, Mapping) and LORA in params


def add_lora(params: Mapping[str, Any], config: LoraConfig, key: Key[Array, ""]) -> dict[str, Any]:
    """The parameters with fresh adapters, under which the model is what it was.

    A is uniform in ±1 / sqrt(in), as PEFT draws it, and B zero. Adapters are in float32, or wider where the matrix is.

    Args:
      params: of the policy, a mapping; its leaves stay the same objects. key: consumed.

    Raises:
      ValueError: if there are adapters already, or a target that no layer has.
    """
    if has_lora(params):
        raise ValueError("expected parameters without adapters, which would be lost: merge_lora(params) keeps them")
    matrices = {}
    for path, kernel in _kernels(params, config).items():
        width_in, width_out = kernel.shape
        dtype = jnp.promote_types(kernel.dtype, jnp.float32)
        bound = width_in**-0.5
        # Every matrix draws by its own name: whatever else has adapters, it starts alike.
        own = jax.random.fold_in(key, crc32("/".join(path).encode()))
        drawn = jax.random.uniform(own, (width_in, config.rank), dtype, -bound, bound)
        matrices[path] = {"lora_A": drawn, "lora_B": jnp.zeros((config.rank, width_out), dtype)}
    return {**params, LORA: Adapters(unflatten_dict(matrices), config)}


def base_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without adapters: the frozen base. Its leaves are the same objects, no copies."""
    return {name: part for name, part in params.items() if name != LORA}


def merge_lora(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with the adapters in their matrices, W + scale * A B, for `save_checkpoint`; a copy of those
    matrices. Parameters without adapters stay as they are.

    Summed in float32 or wider, then rounded to the dtype of W.
    """
    if not has_lora(params):
        return dict(params)
    adapters: Adapters = params[LORA]
    flat = flatten_dict(base_params(params))
    for path, pair in by_module(adapters).items():
        kernel = flat[*path, "kernel"]
        flat[*path, "kernel"] = _merged(kernel, pair["lora_A"], pair["lora_B"], _scale(adapters, pair))
    return unflatten_dict(flat)


def by_module(adapters: Adapters) -> dict[tuple[str, ...], dict[str, Array]]:
    """Path of every module with adapters, such as `("layers_0", "mlp", "up_proj")` -> its `lora_A` and `lora_B`."""
    modules: dict[tuple[str, ...], dict[str, Array]] = {}
    flat: dict[Any, Any] = flatten_dict(adapters.matrices)
    for path, leaf in flat.items():
        modules.setdefault(path[:-1], {})[path[-1]] = leaf
    return modules


def variables_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """What Flax's `apply` takes for these parameters: adapters are a collection of their own, which
    `smd_jax.model.projection.Projection` reads."""
    if not has_lora(params):
        return {"params": params}
    adapters: Adapters = params[LORA]
    # The scale goes along as an array, because the layers are traced once for all and take no static arguments here.
    scaled = {path: pair | {"scale": _scale(adapters, pair)} for path, pair in by_module(adapters).items()}
    return {"params": base_params(params), LORA: unflatten_dict(scaled)}


def _kernels(params: Mapping[str, Any], config: LoraConfig) -> dict[tuple[str, ...], Any]:
    """Path of every module that is to have adapters -> its kernel."""
    found = {path[:-1]: leaf for path, leaf in flatten_dict(dict(params)).items() if path[-1] == "kernel"}
    kernels = {path: kernel for path, kernel in found.items() if path[-1] in config.targets}
    missing = set(config.targets) - {path[-1] for path in kernels}
    if missing:
        there = sorted({path[-1] for path in found})
        raise ValueError(f"expected targets among the matrices of the model, {there}; got {sorted(missing)}, too")
    return kernels


def _scale(adapters: Adapters, pair: Mapping[str, Array]) -> Float[Array, ""]:
    # Not in the adapters' own dtype: a copy of them in 16 bits must have the same scale.
    return jnp.asarray(adapters.config.scale, jnp.promote_types(pair["lora_A"].dtype, jnp.float32))


@jax.jit
def _merged(
    kernel: Float[Array, "in out"], a: Float[Array, "in rank"], b: Float[Array, "rank out"], scale: Float[Array, ""]
) -> Float[Array, "in out"]:
    added = scale * jnp.matmul(a, b, precision="highest")
    return (kernel.astype(added.dtype) + added).astype(kernel.dtype)
