"""Parameters with nonzero LoRA adapters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.model.lora import LORA, Adapters, LoraConfig, add_lora, by_module
from smd_jax.model.protocol import Params

# alpha / sqrt(rank) is not a power of two, so that a missing or rounded scale changes results.
SMALL = LoraConfig(rank=3, alpha=2.0, rank_stabilised=True)


def adapted(params: Params, config: LoraConfig = SMALL, seed: int = 0, size: float = 0.3) -> dict[str, Any]:
    """Adds adapters whose B is not zero; the base's leaves stay the same objects."""
    with_adapters = add_lora(params, config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def filled(path: Any, leaf: jax.Array) -> jax.Array:
        if path[-1].key == "lora_A":
            return leaf
        return jnp.asarray(size * rng.normal(size=leaf.shape), leaf.dtype)

    return {**with_adapters, LORA: jax.tree_util.tree_map_with_path(filled, with_adapters[LORA])}


def merged_in_float64(params: Params) -> dict[str, Any]:
    """W + scale * A B, module by module in NumPy, rounded to float32 at the end."""
    adapters: Adapters = params[LORA]
    base: dict[str, Any] = jax.tree.map(np.asarray, {name: part for name, part in params.items() if name != LORA})
    for path, pair in by_module(adapters).items():
        parent = module = base
        for name in path:
            parent, module = module, module[name]
        a, b = np.float64(pair["lora_A"]), np.float64(pair["lora_B"])
        weights, name = (parent, path[-1]) if path[-2] == "experts" else (module, "kernel")
        weights[name] = np.float32(np.float64(weights[name]) + scale_of(adapters.config) * a @ b)
    return jax.tree.map(jnp.asarray, base)


def scale_of(config: LoraConfig) -> Any:
    return np.float64(config.alpha / (config.rank**0.5 if config.rank_stabilised else config.rank))
