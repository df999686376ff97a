"""95 % t intervals over seeds: of means, and of differences within a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t


class Estimate(NamedTuple):
    """A mean over `count` seeds, and half the width of its interval: NaN for a single seed."""

    mean: float
    half: float
    count: int

    @property
    def established(self) -> bool:
        """Whether the interval excludes 0 and has three seeds or more. Two equal differences have an interval of width
        zero."""
        return self.count > 2 and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """mean ± t(0.975, n - 1) · s / √n.

    Over five seeds a percentile bootstrap is about half as wide, because it takes the spread of the five for that of
    all seeds. The ends may exceed the range of a reward.

    Raises:
      ValueError: for no values.
    """
    count = len(values)
    if not count:
        raise ValueError("expected one value or more; got none")
    mean = float(np.mean(values))
    if count == 1:
        return Estimate(mean, math.nan, 1)
    half = student_t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Estimate(mean, float(half), count)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """The mean difference of two arms over their common seeds.

    Raises:
      ValueError: if they have no seed in common.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ValueError(f"expected a seed in common; got {sorted(ours)} and {sorted(theirs)}")
    return estimate([ours[seed] - theirs[seed] for seed in seeds])
