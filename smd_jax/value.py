"""PPO's critic: a linear head on the policy's own hidden states, and its clipped loss.

The head lies in the parameters, under a name that the decoder does not look at: optimizer, sharding and checkpoints
carry it along. The hidden states are those of the learner under its mask, so with shadow masks the critic judges a
token by what the sampler could still see when it drew that token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import ModelConfig

VALUE_HEAD = "value_head"

VALUE_METRICS: dict[str, str] = {
    "loss/value_avg": "value loss, before its coefficient",
    "val/clipfrac_avg": "share of tokens whose value has left its range towards the return: no gradient",
    "critic/values/mean": "mean over tokens of the critic's values, before the update",
    "critic/returns/mean": "mean over tokens of the returns, the critic's targets",
    "critic/vf_explained_var": "1 - var(returns - values) / var(returns) over tokens, before the update",
}


@dataclass(frozen=True)
class ValueConfig:
    """The critic's part of the loss; defaults as TRL's PPOConfig (1.12).

    Attributes:
      coef: weight of the value loss beside the policy loss. TRL: vf_coef.
      clip_range: how far a value may move from the rollout's before moving on brings nothing; None: no bound. It is in
        units of the reward. TRL: cliprange_value.
    """

    coef: float = 0.1
    clip_range: float | None = 0.2

    def __post_init__(self) -> None:
        if not self.coef > 0:
            raise ValueError(f"expected coef > 0, because a critic that does not learn is none; got {self.coef}")
        if self.clip_range is not None and not self.clip_range > 0:
            raise ValueError(f"expected clip_range > 0, or None for no bound; got {self.clip_range}")


def add_value_head(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The parameters with a value head: `kernel` `[hidden, 1]` and `bias` `[1]`, float32 or wider, all zeros.

    A critic that has seen no reward had better say 0 everywhere than something random: the first advantages are then
    discounted returns, without noise from the head, and the first gradient of the value loss moves the head alone, not
    the layers that it shares with the policy. One output has no symmetry that zeros would have to break.

    Raises:
      ValueError: if there is a value head already.
    """
    if VALUE_HEAD in params:
        raise ValueError(f"expected parameters without a value head, which would be lost; got {sorted(params)}")
    dtype = jnp.promote_types(params["embed"]["embedding"].dtype, jnp.float32)
    return {**params, VALUE_HEAD: {"kernel": jnp.zeros((config.hidden_size, 1), dtype), "bias": jnp.zeros(1, dtype)}}


def drop_value_head(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the policy alone, for `save_checkpoint`."""
    return {name: leaf for name, leaf in params.items() if name != VALUE_HEAD}


def check_value_head(params: Mapping[str, Any]) -> None:
    """Raises ValueError for parameters without a value head."""
    if VALUE_HEAD not in params:
        raise ValueError(
            f"expected parameters with {VALUE_HEAD!r}, because PPO needs a value head: smd.add_value_head(params, "
            f"model.config); got {sorted(params)}"
        )


def values(params: Mapping[str, Any], hidden: Float[Array, "batch R hidden"]) -> Float[Array, "batch R"]:
    """The critic's estimate of the return from each response token on, before that token is drawn.

    Args:
      hidden: from which the tokens are predicted, see `smd_jax.learner.response_hidden`.

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


def value_loss(
    values: Float[Array, "batch R"],
    old_values: Float[Array, "batch R"],
    returns: Float[Array, "batch R"],
    weights: Float[Array, "batch R"],
    config: ValueConfig,
) -> tuple[Float[Array, ""], Bool[Array, "batch R"]]:
    """`sum(weights * 0.5 * max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2))`, before `coef`.

    PPO's clipped value loss, as in trl/experimental/ppo/ppo_trainer.py (vf_loss): the larger of two errors, so that a
    value has no gradient where it has left the range towards the return, and one where it has left it the wrong way.

    Args:
      values: now; the only argument with a gradient. old_values: at the rollout's parameters. returns: G, see
        `smd_jax.gae.gae`.
      weights: of each token, 0 outside the response; what stands there in the other arrays may be anything.

    Returns:
      The loss, and where the clipped error was the larger one.
    """
    inside = weights > 0
    # Replaced before any arithmetic: a NaN times a weight of 0 would still be NaN, and so would its gradient.
    values, old_values, returns = (jnp.where(inside, x, 0.0) for x in (values, old_values, returns))
    error = jnp.square(values - returns)
    if config.clip_range is None:
        return 0.5 * jnp.sum(weights * error), jnp.zeros_like(inside)
    near = jnp.clip(values, old_values - config.clip_range, old_values + config.clip_range)
    bounded = jnp.square(near - returns)
    return 0.5 * jnp.sum(weights * jnp.maximum(error, bounded)), bounded > error
