"""PPO's critic: a linear head on the policy's hidden states. For its loss see `smd_jax.losses.value`.

The head is stored in the parameters under a name that models ignore, so optimizer, sharding and checkpoints include it.
The hidden states are those of the learner under its mask, so with shadow masks the critic sees the same keys as the
sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.config import ModelConfig
from smd_jax.model.protocol import ModelShape

VALUE_HEAD = "value_head"


def add_value_head(params: Mapping[str, Any], config: ModelConfig | ModelShape) -> dict[str, Any]:
    """Adds a value head: `kernel` `[hidden, 1]` and `bias` `[1]`, float32 or wider, initially zero.

    With a zero head the first advantages are discounted returns without noise, and the first gradient of the value loss
    changes only the head, not the layers shared with the policy.

    Args:
      params: parameters of the policy, a mapping.
      config: `model.config` or `model.shape`, for the hidden size.

    Raises:
      ValueError: if there is a value head already.
    """
    if VALUE_HEAD in params:
        raise ValueError(f"expected parameters without a value head, which would be lost; got {sorted(params)}")
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    return {**params, VALUE_HEAD: {"kernel": jnp.zeros((config.hidden_size, 1), dtype), "bias": jnp.zeros(1, dtype)}}


def drop_value_head(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without the value head, for `save_checkpoint`."""
    return {name: leaf for name, leaf in params.items() if name != VALUE_HEAD}


def check_value_head(params: Mapping[str, Any]) -> None:
    """Raises ValueError for parameters without a value head."""
    if VALUE_HEAD not in params:
        raise ValueError(
            f"expected parameters with {VALUE_HEAD!r}, because PPO needs a value head: "
            f"smd.model.add_value_head(params, model.config); got {sorted(params)}"
        )


def values(params: Mapping[str, Any], hidden: Float[Array, "batch R hidden"]) -> Float[Array, "batch R"]:
    """The critic's estimate of the return from each response token on, before that token is sampled.

    Args:
      hidden: states that predict the tokens, see `smd_jax.learner.forward.response_hidden`.

    Returns:
      float32 or wider.

    Raises:
      ValueError: if the parameters have no value head.
    """
    check_value_head(params)
    head = params[VALUE_HEAD]
    wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    # "highest": accelerators multiply float32 in fewer bits by default, and one output costs little.
    return (jnp.matmul(wide, head["kernel"], precision="highest") + head["bias"][None, None])[..., 0]
