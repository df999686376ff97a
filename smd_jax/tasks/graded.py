"""What reward functions said of a batch of completions, and of which they said nothing usable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from smd_jax.tasks.reward_calls import Outcome
from smd_jax.text.visible_text import visible


class Failure(NamedTuple):
    """Why a completion has no reward.

    Attributes:
      row: number of the completion in its batch.
      function: name of the function that failed; empty for what no single one did, such as None from all of them.
      kind: the exception's class, or "time" and the like: what is reported once.
      message: what was expected, what came.
    """

    row: int
    function: str
    kind: str
    message: str

    def described(self) -> str:
        """For a person, whose terminal nothing in it moves: a message may quote what a model wrote."""
        whose = f"reward {self.function!r}" if self.function else "the sum of the rewards"
        return f"{whose} failed on completion {self.row}: {visible(self.message)}"


class Graded(NamedTuple):
    """The rewards of a batch of completions.

    Attributes:
      rewards: float32 `[batch]`, the weighted sum; NaN for a completion that failed.
      parts: float32 `[batch]` of each function, before its weight; NaN where it failed or does not apply (None).
      failures: at most one per completion and function, and in any case one of every completion that failed.
    """

    rewards: Float[np.ndarray, " batch"]
    parts: dict[str, Float[np.ndarray, " batch"]]
    failures: tuple[Failure, ...]

    @property
    def rewarded_rows(self) -> Bool[np.ndarray, " batch"] | None:
        """Which completions have a reward; None: all."""
        failed = np.isnan(self.rewards)
        return ~failed if failed.any() else None


def part_of(name: str, outcomes: Sequence[Outcome]) -> tuple[np.ndarray, list[Failure]]:
    """float32 `[batch]`, NaN where there is no number, and the failures among those."""
    numbers = np.full(len(outcomes), np.nan, np.float32)
    failures = list[Failure]()
    for row, outcome in enumerate(outcomes):
        if isinstance(outcome, tuple):
            failures.append(Failure(row, name, *outcome))
            continue
        (value,) = outcome
        if isinstance(value, tuple):
            wanted, got = value
            failures.append(Failure(row, name, wanted, f"expected {wanted} or None; got {got}"))
        elif value is not None:
            numbers[row] = value
    return numbers, failures


def without_opinion(parts: Mapping[str, np.ndarray], failures: Sequence[Failure]) -> list[Failure]:
    """Completions that every function returned None for."""
    nothing = np.all([np.isnan(part) for part in parts.values()], axis=0)
    known = {failure.row for failure in failures}
    message = "expected a number from at least one; got None from all"
    return [Failure(int(row), "", "None", message) for row in np.flatnonzero(nothing) if int(row) not in known]
