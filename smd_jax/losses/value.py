"""PPO's critic, whose head is in `smd_jax.model.value_head`: its targets, and its clipped loss.

    rewards [batch] ─ terminal_rewards ─► [batch, R] ─┐
    values [batch, R], of the critic ─────────────────┴─ gae ─► returns, the critic's target ─► value_loss
                                                             └► advantages ─ whiten ─► policy loss

Arrays may hold any value outside the mask; results there are 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.ratios import masked_mean
from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types


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
        if not 0 < self.coef < math.inf:
            raise ValueError(f"expected a finite coef > 0, because the critic must learn; got {self.coef}")
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
      returns: G, see `gae`.
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
    values, old_values, returns = (jnp.where(inside, x, 0.0) for x in (values, old_values, returns))
    error = jnp.square(values - returns)
    if config.clip_range is None:
        return 0.5 * jnp.sum(weights * error), jnp.zeros_like(inside)
    # A clipped value has no gradient through this error; the larger of the two errors counts.
    near = jnp.clip(values, old_values - config.clip_range, old_values + config.clip_range)
    bounded = jnp.square(near - returns)
    return 0.5 * jnp.sum(weights * jnp.maximum(error, bounded)), bounded > error


def terminal_rewards(rewards: Float[Array, " batch"], mask: Bool[Array, "batch R"]) -> Float[Array, "batch R"]:
    """The reward of each response at its last token, 0 elsewhere; a response without tokens gets nothing.

    As in verl (token_level_scores). TRL's PPO (1.12) puts it one column later if there is one, on the state after the
    last token, whose value its critic also learns.
    """
    check_shape("mask", mask, ("batch", "R"))
    check_shape("rewards", rewards, (mask.shape[0],))
    # Summed from the right: at the last token of a response the sum is one.
    following = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # tokens from here on
    return jnp.where(mask & (following == 1), rewards[:, None], 0.0)


def gae(
    rewards: Float[Array, "batch R"],
    values: Float[Array, "batch R"],
    mask: Bool[Array, "batch R"],
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Array, "batch R"], Float[Array, "batch R"]]:
    """GAE (arXiv:1506.02438 eq. 16), over the tokens of a row in their order:

        delta_t = r_t + gamma V_{t+1} - V_t          the value after a row's last token is 0
        A_t     = delta_t + gamma lam A_{t+1}

    `lam` 0 uses the critic for everything after a token; 1 uses the actual rewards minus the critic's value. A
    truncated response ends like any other.

    Returns:
      advantages A, and returns A + V, float32 or wider; both 0 outside the mask.

    Raises:
      ValueError: if the arrays are not all `[batch, R]`.
    """
    check_shape("mask", mask, ("batch", "R"))
    check_shape("rewards", rewards, mask.shape)
    check_shape("values", values, mask.shape)
    # A sum over a whole response needs more than 16 bits.
    wide = jnp.promote_types(jnp.result_type(rewards, values), jnp.float32)
    rewards = jnp.where(mask, rewards, 0.0).astype(wide)
    values = jnp.where(mask, values, 0.0).astype(wide)

    def back(later: tuple[Array, Array], column: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = later
        reward, value, inside = column
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        # Columns outside the mask are not time steps: skip them.
        earlier = jnp.where(inside, value, next_value), jnp.where(inside, advantage, next_advantage)
        return earlier, jnp.where(inside, advantage, 0.0)

    nothing = jnp.zeros(mask.shape[0], wide)
    # From the last column to the first, over [R, batch]: scan runs over the leading axis.
    _, columns = jax.lax.scan(back, (nothing, nothing), (rewards.T, values.T, mask.T), reverse=True)
    return columns.T, columns.T + values


def whiten(advantages: Float[Array, "batch R"], mask: Bool[Array, "batch R"]) -> Float[Array, "batch R"]:
    """Normalises to mean 0 and variance 1 over all tokens of the batch; 0 outside the mask.

    `(x - mean) / sqrt(variance + 1e-8)` with Bessel's correction, as masked_whiten with shift_mean in
    trl/experimental/ppo/ppo_trainer.py. A single token becomes 0.
    """
    check_shape("mask", mask, ("batch", "R"))
    check_shape("advantages", advantages, mask.shape)
    centred = _centred(advantages, mask)
    # At least 1: avoids 0 / 0 for a single token.
    variance = jnp.square(centred).sum() / jnp.maximum(mask.sum() - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def explained_variance(
    values: Float[Array, "batch R"], returns: Float[Array, "batch R"], mask: Bool[Array, "batch R"]
) -> Float[Array, ""]:
    """`1 - var(returns - values) / (var(returns) + 1e-5)` over all tokens, as verl's critic/vf_explained_var.

    1 for a perfect critic, 0 for a constant one, negative for a worse one.
    """
    check_shape("mask", mask, ("batch", "R"))
    check_shape("values", values, mask.shape)
    check_shape("returns", returns, mask.shape)
    unexplained = masked_mean(jnp.square(_centred(returns - values, mask)), mask, empty=0.0)
    of_returns = masked_mean(jnp.square(_centred(returns, mask)), mask, empty=0.0)
    return 1.0 - unexplained / (of_returns + 1e-5)


def _centred(x: Float[Array, "batch R"], mask: Bool[Array, "batch R"]) -> Float[Array, "batch R"]:
    """`x` minus its mean over the mask; 0 outside."""
    return jnp.where(mask, x - masked_mean(x, mask, empty=0.0), 0.0)
