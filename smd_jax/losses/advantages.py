"""Advantages: how much better a completion did than the others of its prompt.

Everywhere the `group_size` completions of a prompt lie side by side in `rewards`, `[batch]`.
"""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice
from smd_jax.shapes import check_shape

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4  # added to the standard deviation, as TRL's GRPOTrainer does


def group_relative(rewards: Float[Array, " batch"], group_size: int, scale: Scale = "group") -> Float[Array, " batch"]:
    """GRPO (arXiv:2402.03300 eq. 3): reward less the mean of its group, divided by a standard deviation.

    Args:
      rewards: `[batch]`, the `group_size` completions of a prompt contiguous.
      scale: TRL's scale_rewards: the deviation is that of the "group", of the whole "batch" (arXiv:2508.08221), or 1
        ("none", Dr. GRPO arXiv:2503.20783). Deviations have Bessel's correction, as in TRL.

    Raises:
      ValueError: if the rewards are not `[batch]`, the batch does not divide into groups, a group is one completion,
        whose advantage is always 0, or there is no such scale.
    """
    check_choice("scale_rewards", scale, get_args(Scale))
    groups = _groups(rewards, group_size)
    centred = groups - groups.mean(1, keepdims=True)
    if scale == "group":
        centred = centred / (groups.std(1, ddof=1, keepdims=True) + EPSILON)
    if scale == "batch":
        # The deviation of the rewards themselves, whose groups may differ in their means; not that of `centred`.
        centred = centred / (groups.std(ddof=1) + EPSILON)
    return centred.reshape(-1)


def leave_one_out(rewards: Float[Array, " batch"], group_size: int) -> Float[Array, " batch"]:
    """RLOO (arXiv:2402.14740): reward less the mean reward of the *other* completions of its prompt, `[batch]`.

    This baseline does not depend on the completion that it is subtracted from, so the gradient stays unbiased. It is
    `group_relative(..., scale="none")` times group_size / (group_size - 1).

    Raises:
      ValueError: if the batch does not divide into groups, or a group is one completion, which has no others.
    """
    groups = _groups(rewards, group_size)
    others = (groups.sum(1, keepdims=True) - groups) / (group_size - 1)
    return (groups - others).reshape(-1)


def groups_with_signal(rewards: Float[Array, " batch"], group_size: int) -> Bool[Array, " groups"]:
    """Which groups have unequal rewards; in the others every advantage is 0 (dynamic sampling, arXiv:2503.14476).

    A loop that drops the others, or samples more in their place, keeps or drops whole groups. The share of the others
    is the metric `frac_reward_zero_std`. A group with a NaN has none.

    Raises:
      ValueError: if the batch does not divide into groups of at least two.
    """
    groups = _groups(rewards, group_size)
    # An order rather than a standard deviation above 0: the mean of equal floats need not be that float.
    return groups.max(1) > groups.min(1)


def _groups(rewards: Float[Array, " batch"], group_size: int) -> Float[Array, "groups group_size"]:
    check_shape("rewards", rewards, ("batch",))
    if group_size < 2:
        raise ValueError(
            f"expected groups of at least 2 completions, because an advantage is a reward less the mean of its group; "
            f"got group_size {group_size}"
        )
    if rewards.shape[0] % group_size:
        raise ValueError(f"expected a batch that divides into groups of {group_size}; got {rewards.shape[0]} rewards")
    return rewards.reshape(-1, group_size)
