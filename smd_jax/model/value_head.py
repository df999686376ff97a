"""PPO's critic: a linear head on the policy's own hidden states. Its loss is in `smd_jax.losses.value`.

The head lies in the parameters, under a name that no model looks at: optimizer, sharding and checkpoints
carry it along. The hidden states are those of the learner under its mask, so with shadow masks the critic judges a
token by what the sampler could still see when it drew that token.
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
    """The parameters with a value head: `kernel` `[hidden, 1]` and `bias` `[1]`, float32 or wider, all zeros.

    A critic that has seen no reward had better say 0 everywhere than something random: the first advantages are then
    discounted returns, without noise from the head, and the first gradient of the value loss moves the head alone, not
    the layers that it shares with the policy. One output has no symmetry that zeros would have to break.

    Args:
      params: of the policy, a mapping. config: of the model, `model.config` or `model.shape`: its hidden size is used.

    Raises:
      ValueError: if there is a value head already.
    """
    if VALUE_HEAD in params:
        raise ValueError(f"expected parameters without a value head, which would be lost; got {sorted(params)}")
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    return {**params, VALUE_HEAD: {"kernel": jnp.zeros((config.hidden_size, 1), dtype), "bias": jnp.zeros(1, dtype)}}


def drop_value_head(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the policy alone, for `save_checkpoint`."""
    return {name: leaf for name, leaf in params.items() if name != VALUE_HEAD}


def check_value_head(params: Mapping[str, Any]) -> None:
    """Raises ValueError for parameters without a value head."""
    if VALUE_HEAD not in params:
        raise ValueError(
            f"expected parameters with {VALUE_HEAD!r}, because PPO needs a value head: "
            f"smd.model.add_value_head(params, model.config); got {sorted(params)}"
        )


def values(params: Mapping[str, Any], hidden: Float[Array, "batch R hidden"]) -> Float[Array, "batch R"]:
    """The critic's estimate of the return from each response token on, before that token is drawn.

    Args:
      hidden: from which the tokens are predicted, see `smd_jax.learner.forward.response_hidden`.

    Returns:
      float32 or wider.

    Raises:
      ValueError: if the parameters have no value head.
    """
    check_value_head(params)
    head = params[VALUE_HEAD]
    wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    # One output: the precision of the product costs nothing, and the default on accelerators is not float32's.
    return (jnp.matmul(wide, head["kernel"], precision="highest") + head["bias"][None, None])[..., 0]
