"""Preference pairs from the completions of a prompt: the best and the worst, by rewards or by what a judge says.

The `group_size` completions of a prompt are contiguous in the batch; a group gives one pair.

    rewards ─► best_worst ───────────────────┬─► Pairs ─► smd_jax.losses.dpo
    completions ─► judged_ranks ─► pairs_of_ranks ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.pytrees import any_leaves
from smd_jax.shapes import check_shape

# TRL's rank judge, (prompts, completions of each prompt) -> indices of its completions, the best first, the worst last.
Judge = Callable[[list[Any], list[list[str]]], Sequence[Sequence[int]]]


@any_leaves
class Pairs(struct.PyTreeNode):
    """One pair a group.

    Attributes:
      chosen, rejected: `[groups]` rows of the batch.
      signal: `[groups]`, whether one was better; the others must weigh nothing.
    """

    chosen: Int[Array, " groups"]
    rejected: Int[Array, " groups"]
    signal: Bool[Array, " groups"]


def best_worst(
    rewards: Float[Array, " batch"], group_size: int, rewarded_rows: Bool[Array, " batch"] | None = None
) -> Pairs:
    """The completion with the highest reward of its group, and the one with the lowest.

    Of equal ones the first is chosen and the last rejected, as TRL does with its two completions. A group of equal
    rewards has no signal; TRL trains it on the order in which it was sampled. A group with a NaN has none either.

    Args:
      rewarded_rows: `[batch]`, false for completions without a reward, which are not looked at; a group that has less
        than two others has no signal. None: all have one.

    Raises:
      ValueError: if the batch does not divide into groups of at least two.
    """
    check_shape("rewards", rewards, ("batch",))
    check_group_size(group_size)
    if rewards.shape[0] % group_size:
        raise ValueError(f"expected a batch that divides into groups of {group_size}; got {rewards.shape[0]} rewards")
    best = worst = rewards.reshape(-1, group_size)
    if rewarded_rows is not None:
        check_shape("rewarded_rows", rewarded_rows, rewards.shape)
        rewarded = rewarded_rows.reshape(-1, group_size)
        best, worst = jnp.where(rewarded, best, -jnp.inf), jnp.where(rewarded, worst, jnp.inf)
    first_best = jnp.argmax(best, axis=1)
    # argmin takes the first of equal ones. Read backwards, that is the last, so that two equal ones are not one row.
    last_worst = group_size - 1 - jnp.argmin(worst[:, ::-1], axis=1)
    return _pairs(first_best, last_worst, group_size, best.max(axis=1) > worst.min(axis=1))


def pairs_of_ranks(ranks: Int[np.ndarray, "groups group_size"]) -> Pairs:
    """The first and the last of each order, see `judged_ranks`. A judge always prefers: every pair has signal.

    Raises:
      ValueError: if the groups have less than two completions.
    """
    groups, group_size = ranks.shape
    check_group_size(group_size)
    return _pairs(jnp.asarray(ranks[:, 0]), jnp.asarray(ranks[:, -1]), group_size, jnp.ones(groups, bool))


def judged_ranks(
    judge: Judge, prompts: Sequence[Any], completions: Sequence[Sequence[str]]
) -> Int[np.ndarray, "groups group_size"]:
    """Asks the judge and checks what comes back. TRL: trl/experimental/judges/judges.py, BaseRankJudge.

    Args:
      judge: called as `judge(prompts, completions)`; TRL's judges are given as their bound method, `judge.judge`.
      prompts: one per group.
      completions: those of each group, as many in each.

    Returns:
      int32, in each row the indices of the group's completions from best to worst.

    Raises:
      ValueError: if there is not one answer per prompt, or one is no order of all completions.
    """
    answers = judge(list(prompts), [list(group) for group in completions])
    if not isinstance(answers, Sized) or len(answers) != len(prompts):
        got = f"{len(answers)} answers" if isinstance(answers, Sized) else repr(answers)
        raise ValueError(f"expected {len(prompts)} orders from the judge, one per prompt; got {got}")
    sizes = (len(group) for group in completions)
    rows = [_checked(index, *pair) for index, pair in enumerate(zip(answers, sizes, strict=True))]
    return np.array(rows, np.int32)


def check_group_size(group_size: int) -> None:
    """Raises ValueError for groups that give no pair."""
    if group_size < 2:
        raise ValueError(f"expected groups of at least 2 completions, to make a pair; got group_size {group_size}")


def _pairs(
    best: Int[Array, " groups"], worst: Int[Array, " groups"], group_size: int, signal: Bool[Array, " groups"]
) -> Pairs:
    """The pairs as rows of the batch, from places within the groups."""
    first = group_size * jnp.arange(best.shape[0], dtype=jnp.int32)
    return Pairs(first + best.astype(jnp.int32), first + worst.astype(jnp.int32), signal)


def _checked(index: int, answer: Any, group_size: int) -> list[int]:
    """Refuses an answer that is no order: judges report failure as -1, None or a text."""
    # As objects: numpy would otherwise make numbers of what is none, such as True, before it can be looked at.
    order = np.asarray(answer, dtype=object)
    numbers = [int(x) for x in order.ravel() if isinstance(x, int | np.integer) and not isinstance(x, bool)]
    if order.shape != (group_size,) or sorted(numbers) != list(range(group_size)):
        raise ValueError(
            f"expected the judge to order all completions of a prompt, the indices 0 to {group_size - 1} from best to "
            f"worst; prompt {index} got {answer!r}"
        )
    return numbers
