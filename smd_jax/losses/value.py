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
    """The critic's part of the loss; defaults as TRL's PPOConfig (1.12).

    Attributes:
      coef: weight of the value loss. TRL: vf_coef.
      clip_range: how far a value may move from the rollout's before moving on brings nothing; None: no bound. It is in
        units of the reward. TRL: cliprange_value.
    """

    coef: float = 0.1
    clip_range: float | None = 0.2

    def __post_init__(self) -> None:
        check_types(self)
        if not self.coef > 0:
            raise ValueError(f"expected coef > 0, because a critic that does not learn is none; got {self.coef}")
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

    PPO's clipped value loss, as in trl/experimental/ppo/ppo_trainer.py (vf_loss): the larger of two errors, so that a
    value has no gradient where it has left the range towards the return, and one where it has left it the wrong way.

    Args:
      values: the critic's values at the present parameters; the only argument with a gradient.
      old_values: its values at the rollout's parameters.
      returns: G, see `smd_jax.losses.returns.gae`.
      weights: how much each token weighs, 0 outside the response; there the other arrays may hold anything.

    Returns:
      The loss, and where the clipped error was the larger one.

    Raises:
      ValueError: if the arrays are not all `[batch, R]`.
    """
    check_shape("values", values, ("batch", "R"))
    check_shape("old_values", old_values, values.shape)
    check_shape("returns", returns, values.shape)
    check_shape("weights", weights, values.shape)
    inside = weights > 0
    # Replaced before any arithmetic: a NaN times a weight of 0 would still be NaN, and so would its gradient.
    values = jnp.where(inside, values, 0.0)
    old_values = jnp.where(inside, old_values, 0.0)
    returns = jnp.where(inside, returns, 0.0)
    error = jnp.square(values - returns)
    if config.clip_range is None:
        return 0.5 * jnp.sum(weights * error), jnp.zeros_like(inside)
    # Where the clip holds, this error has no gradient; the larger of the two errors decides which one counts.
    near = jnp.clip(values, old_values - config.clip_range, old_values + config.clip_range)
    bounded = jnp.square(near - returns)
    return 0.5 * jnp.sum(weights * jnp.maximum(error, bounded)), bounded > error
