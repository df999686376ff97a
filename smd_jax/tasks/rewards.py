"""From what a reward function returns to numbers that training can trust."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from smd_jax.tasks.task import Prompt

RewardFunction = Callable[..., Iterable[float]]  # TRL's (prompts, completions, **columns) -> list[float]


def compute_rewards(
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Float[np.ndarray, " batch"]:
    """Calls `reward` (of a task, or any function written for TRL) and checks what comes back.

    Args:
      reward: called as `reward(prompts=..., completions=..., **columns)`.
      prompts: one per completion, repeated for every member of its group.
      completions: the sampled texts.
      columns: the other fields of the rows, one value per completion.

    Returns:
      float32 `[batch]`, every value finite.

    Raises:
      ValueError: prompts or a column of another length than the completions; not one reward per completion; a reward
        that is NaN, infinite (also after rounding to float32), None, or no number.
    """
    for name, values in {"prompts": prompts, **columns}.items():
        if len(values) != len(completions):
            raise ValueError(f"expected {len(completions)} values in {name!r}, one per completion; got {len(values)}")
    rewards = list(reward(prompts=list(prompts), completions=list(completions), **columns))
    if len(rewards) != len(completions):
        raise ValueError(f"expected {len(completions)} rewards, one per completion; got {len(rewards)}")
    return np.array([_checked(row, value) for row, value in enumerate(rewards)], np.float32)


def _checked(row: int, value: Any) -> np.float32:
    """TRL skips a reward of None; here every completion needs a number, because its group is normalised by it."""
    array = np.asarray(value)
    # Booleans, signed and unsigned integers, floats.
    if array.ndim or array.dtype.kind not in "biuf":
        raise ValueError(f"expected a number as the reward of every completion; row {row} got {value!r}")
    # What is too large becomes infinity and is refused below; a warning beside the error would say nothing new.
    with np.errstate(over="ignore"):
        number = np.float32(array)
    if not np.isfinite(number):
        raise ValueError(f"expected a finite float32 as the reward of every completion; row {row} got {value!r}")
    return number
