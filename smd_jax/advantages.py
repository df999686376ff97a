"""Advantages: how much better a completion did than the others of its prompt."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4  # added to the standard deviation, as TRL's GRPOTrainer does


def group_relative(rewards: Float[Array, " batch"], group_size: int, scale: Scale = "group") -> Float[Array, " batch"]:
    """GRPO (arXiv:2402.03300 eq. 3): reward less the mean of its group, divided by a standard deviation.

    Args:
      rewards: `[batch]`, the `group_size` completions of a prompt contiguous.
      scale: the deviation is that of the "group", of the whole "batch", or 1 ("none", Dr. GRPO arXiv:2503.20783).
        Deviations have Bessel's correction, as in TRL.

    Raises:
      ValueError: if the batch does not divide into groups, or a group is one completion, whose advantage is always 0.
    """
    if group_size < 2:
        raise ValueError(
            f"expected groups of at least 2 completions, because an advantage is a reward less the mean of its group; "
            f"got group_size {group_size}"
        )
    if rewards.shape[0] % group_size:
        raise ValueError(f"expected a batch that divides into groups of {group_size}; got {rewards.shape[0]} rewards")
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(1, keepdims=True)
    if scale == "group":
        centred = centred / (groups.std(1, ddof=1, keepdims=True) + EPSILON)
    if scale == "batch":
        centred = centred / (groups.std(ddof=1) + EPSILON)
    return centred.reshape(-1)
