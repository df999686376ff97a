"""Preference pairs: the completions of a prompt with the highest and the lowest reward.

The `group_size` completions of a prompt are contiguous in the batch; a group gives one pair, for `smd_jax.losses.dpo`.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.losses.advantages import grouped, grouped_rows
from smd_jax.pytrees import any_leaves


@any_leaves
class Pairs(struct.PyTreeNode):
    """One pair per group.

    Attributes:
      chosen, rejected: `[groups]` rows of the batch.
      signal: `[groups]`, whether the rewards differ; other pairs must have weight 0.
    """

    chosen: Int[Array, " groups"]
    rejected: Int[Array, " groups"]
    signal: Bool[Array, " groups"]


def best_worst(
    rewards: Float[Array, " batch"], group_size: int, rewarded_rows: Bool[Array, " batch"] | None = None
) -> Pairs:
    """The completion with the highest reward of its group, and the one with the lowest.

    Among equal rewards the first is chosen and the last rejected, as in TRL. A group of equal rewards has no signal;
    TRL trains on its sampling order. A group with a NaN has no signal either.

    Args:
      rewarded_rows: `[batch]`, false for completions without a reward, which are ignored. A group with fewer than two
        rewards has no signal. None: all have one.

    Raises:
      ValueError: if the batch does not divide into groups of at least two.
    """
    best = worst = grouped(rewards, group_size)
    rewarded = grouped_rows(rewarded_rows, best)
    if rewarded is not None:
        best, worst = jnp.where(rewarded, best, -jnp.inf), jnp.where(rewarded, worst, jnp.inf)
    first_best = jnp.argmax(best, axis=1)
    # argmin returns the first of equal values. Reversed, that is the last, so that the pair has two different rows.
    last_worst = group_size - 1 - jnp.argmin(worst[:, ::-1], axis=1)
    # Converts indices within the groups to rows of the batch.
    first = group_size * jnp.arange(best.shape[0], dtype=jnp.int32)
    signal = best.max(axis=1) > worst.min(axis=1)
    return Pairs(first + first_best.astype(jnp.int32), first + last_worst.astype(jnp.int32), signal)
