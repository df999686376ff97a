"""The clipped loss of PPO's critic, whose head is in `smd_jax.model.value_head`."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types

VALUE_METRICS: dict[str, str] = {
    "loss/value_avg": "value loss, before its coefficient",
    "val/clipfrac_avg": "share of tokens whose value has left its range towards the return: no gradient",
    "critic/values/mean": "mean over tokens of the critic's values, before the update",
    "critic/returns/mean": "mean over tokens of the returns, the critic's targets",
    "critic/vf_explained_var": "1 - var(returns - values) / var(returns) over tokens, before the update",
}


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """The value loss, with the defaults of TRL's PPOConfig (1.12).

    Attributes:
      coef: weight of the value loss. TRL: vf_coef.
      clip_range: largest useful change of a value since the rollout, in units of the reward; None: no bound. TRL:
        cliprange_value.
    """

    coef: float = 0.1
    clip_range: float | None = 0.2

    def __post_init__(self) -> None:
        check_types(self)
        if not self.coef > 0:
            raise ValueError(f"expected coef > 0, because the critic must learn; got {self.coef}")
        if self.clip_range is not None and not self.clip_range > 0:
            raise ValueError(f"expected clip_range > 0, or None for no bound; got {self.clip_range}")


def value_loss(
    values: Float[Array, "batch R"],
    old_values: Float[Array, "batch R"],
    returns: Float[Array, "batch R"],
    weights: Float[Array, "batch R"],
    config: ValueConfig,
) -> tuple[Float[Array, ""], Bool[Array, "batch R"]]:
    """`sum(weights * 0.5 * max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2))`, before `coef`.

    PPO's clipped value loss, as in trl/experimental/ppo/ppo_trainer.py (vf_loss). A value outside the range has a
    gradient only if it moved away from the return.

    Args:
      values: the critic's values at the current parameters; the only argument with a gradient.
      old_values: its values at the rollout's parameters.
      returns: G, see `smd_jax.losses.returns.gae`.
      weights: weight of each token, 0 outside the response, where the other arrays may hold any value.

    Returns:
      The loss, and a mask of the tokens whose clipped error was larger.

    Raises:
      ValueError: if the arrays are not all `[batch, R]`.
    """
    check_shape("values", values, ("batch", "R"))
    check_shape("old_values", old_values, values.shape)
    check_shape("returns", returns, values.shape)
    check_shape("weights", weights, values.shape)
    inside = weights > 0
    # Masked before any arithmetic: a NaN times a weight of 0 is NaN.
    values = jnp.where(inside, values, 0.0)
    old_values = jnp.where(inside, old_values, 0.0)
    returns = jnp.where(inside, returns, 0.0)
    error = jnp.square(values - returns)
    if config.clip_range is None:
        return 0.5 * jnp.sum(weights * error), jnp.zeros_like(inside)
    # A clipped value has no gradient through this error; the larger of the two errors counts.
    near = jnp.clip(values, old_values - config.clip_range, old_values + config.clip_range)
    bounded = jnp.square(near - returns)
    return 0.5 * jnp.sum(weights * jnp.maximum(error, bounded)), bounded > error
