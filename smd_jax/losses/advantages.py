"""Advantages: the reward of a completion relative to the others of its prompt.

The `group_size` completions of a prompt are contiguous in `rewards`, `[batch]`. `rewarded_rows`, `[batch]`, is false
for completions without a reward; None: all have one. Such completions have advantage 0 and are left out of their group.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice
from smd_jax.shapes import check_shape

Scale = Literal["group", "batch", "none"]
Rewards = Float[Array, " batch"] | Bool[Array, " batch"]

EPSILON = 1e-4  # added to the standard deviation, as TRL's GRPOTrainer does


def group_relative(
    rewards: Rewards,
    group_size: int,
    scale: Scale = "group",
    rewarded_rows: Bool[Array, " batch"] | None = None,
) -> Float[Array, " batch"]:
    """GRPO (arXiv:2402.03300 eq. 3): reward minus the mean of its group, divided by a standard deviation.

    Args:
      rewards: `[batch]`, the `group_size` completions of a prompt contiguous.
      scale: TRL's scale_rewards: the deviation is that of the "group", of the whole "batch" (arXiv:2508.08221), or 1
        ("none", Dr. GRPO arXiv:2503.20783). Deviations have Bessel's correction, as in TRL.

    Raises:
      ValueError: if the rewards are not `[batch]`, the batch does not divide into groups, a group has one completion,
        whose advantage is always 0, or the scale is unknown.
    """
    check_choice("scale_rewards", scale, get_args(Scale))
    groups = grouped(rewards, group_size)
    rewarded = grouped_rows(rewarded_rows, groups)
    return _among_others(_scaled(_centred(groups, rewarded), groups, scale, rewarded), rewarded).reshape(-1)


def leave_one_out(
    rewards: Rewards, group_size: int, rewarded_rows: Bool[Array, " batch"] | None = None
) -> Float[Array, " batch"]:
    """RLOO (arXiv:2402.14740): reward minus the mean reward of the *other* completions of its prompt, `[batch]`.

    The baseline does not depend on the completion itself, so the gradient is unbiased. The result is
    `group_relative(..., scale="none")` times n / (n - 1), with n completions with a reward in the group.

    Raises:
      ValueError: if the batch does not divide into groups of at least two.
    """
    groups = grouped(rewards, group_size)
    rewarded = grouped_rows(rewarded_rows, groups)
    number = rewarded.sum(1, keepdims=True)
    centred = _centred(groups, rewarded)
    return _among_others(centred * jnp.asarray(number / (number - 1), centred.dtype), rewarded).reshape(-1)


def turn_relative(
    rewards: Float[Array, "batch turns"],
    answered: Bool[Array, "batch turns"],
    group_size: int,
    scale: Scale = "group",
    rewarded_rows: Bool[Array, " batch"] | None = None,
) -> Float[Array, "batch turns"]:
    """Advantages of every turn of a conversation: GRPO with process supervision (arXiv:2402.03300 section 4.1.3).

        A_k = sum over j >= k of (r_j - mean) / std        mean: of the rewards of all turns of the group

    Args:
      rewards: `[batch, turns]` of each turn, the `group_size` conversations of a prompt contiguous.
      answered: false for turns that a conversation does not have.
      scale: std as in `group_relative`, over turns.

    Raises:
      ValueError: as `group_relative`.
    """
    check_choice("scale_rewards", scale, get_args(Scale))
    first = grouped(rewards[:, 0], group_size)  # checks the batch
    rewarded = grouped_rows(rewarded_rows, first)
    counted = answered.reshape(*first.shape, -1) & rewarded[..., None]
    groups = _floating(rewards).reshape(counted.shape)
    scaled = _scaled(_centred(groups, counted), groups, scale, counted)
    # A group with one reward has no deviation, and nothing to compare with.
    scaled = jnp.where(counted & (counted.sum((1, 2), keepdims=True) > 1), scaled, 0.0)
    return jnp.cumsum(scaled[..., ::-1], axis=-1)[..., ::-1].reshape(rewards.shape)


def groups_with_signal(
    rewards: Rewards, group_size: int, rewarded_rows: Bool[Array, " batch"] | None = None
) -> Bool[Array, " groups"]:
    """Groups with unequal rewards; in other groups every advantage is 0 (dynamic sampling, arXiv:2503.14476).

    The share of other groups is the metric `frac_reward_zero_std`. A group with a NaN among `rewarded_rows` has no
    signal.

    Raises:
      ValueError: if the batch does not divide into groups of at least two.
    """
    groups = grouped(rewards, group_size)
    rewarded = grouped_rows(rewarded_rows, groups)
    # Compares rewards instead of a standard deviation with 0: the mean of equal floats may differ from them.
    return jnp.where(rewarded, groups, -jnp.inf).max(1) > jnp.where(rewarded, groups, jnp.inf).min(1)


def check_group_size(group_size: int) -> None:
    """Raises ValueError for groups in which nothing can be compared."""
    if group_size < 2:
        raise ValueError(f"expected groups of at least 2 completions, to compare them; got group_size {group_size}")


def grouped(rewards: Rewards, group_size: int) -> Float[Array, "groups group_size"]:
    """Rewards by group; raises ValueError unless the batch divides into groups of at least two."""
    check_shape("rewards", rewards, ("batch",))
    check_group_size(group_size)
    if rewards.shape[0] % group_size:
        raise ValueError(f"expected a batch that divides into groups of {group_size}; got {rewards.shape[0]} rewards")
    # A JAX array: NumPy takes the `where=None` of sums and means for false.
    return _floating(rewards).reshape(-1, group_size)


def grouped_rows(
    rewarded_rows: Bool[Array, " batch"] | None, groups: Float[Array, "groups group_size"]
) -> Bool[Array, "groups group_size"]:
    check_shape("rewarded_rows", rewarded_rows, (groups.size,))
    return jnp.ones(groups.shape, bool) if rewarded_rows is None else rewarded_rows.reshape(groups.shape)


def _floating(rewards: Array) -> Float[Array, ...]:
    """Rewards may be booleans or whole numbers."""
    return jnp.asarray(rewards).astype(jnp.result_type(rewards, float))


def _centred(
    rewards: Float[Array, "groups group_size *turns"], counted: Bool[Array, "groups group_size *turns"]
) -> Float[Array, "groups group_size *turns"]:
    """Rewards minus the mean of the counted ones of their group, exactly 0 if these are equal."""
    axes = tuple(range(1, rewards.ndim))
    # The mean of equal floats may differ from them; the mean of zeros does not.
    above = rewards - rewards.max(axes, keepdims=True, where=counted, initial=-jnp.inf)
    return above - above.mean(axes, keepdims=True, where=counted)


def _scaled(
    centred: Float[Array, "groups group_size *turns"],
    rewards: Float[Array, "groups group_size *turns"],
    scale: Scale,
    counted: Bool[Array, "groups group_size *turns"],
) -> Float[Array, "groups group_size *turns"]:
    """Divides by the deviation of the counted rewards of a group, or of all groups."""
    if scale == "none":
        return centred
    # Of the rewards for a batch, whose groups may have different means. Of `centred` for a group: exactly 0 if equal.
    axes = None if scale == "batch" else tuple(range(1, rewards.ndim))
    spread = (rewards if scale == "batch" else centred).std(axes, ddof=1, keepdims=True, where=counted)
    return centred / (spread + EPSILON)


def _among_others(
    advantages: Float[Array, "groups group_size"], rewarded: Bool[Array, "groups group_size"]
) -> Float[Array, "groups group_size"]:
    """Sets advantages to 0 for completions without a reward, and for the only completion with one in its group."""
    return jnp.where(rewarded & (rewarded.sum(1, keepdims=True) > 1), advantages, 0.0)
