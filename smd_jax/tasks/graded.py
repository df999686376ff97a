"""Rewards of a batch of completions, and the failures among them."""

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
      function: name of the function that failed; empty if no single one did, such as for None from all of them.
      kind: the exception's class, or a word such as "time"; each kind is reported once.
      message: what was expected, and what came.
    """

    row: int
    function: str
    kind: str
    message: str

    def described(self) -> str:
        """Describes the failure; escapes control characters, because a message may quote a completion."""
        whose = f"reward {self.function!r}" if self.function else "the sum of the rewards"
        return f"{whose} failed on completion {self.row}: {visible(self.message)}"


class Graded(NamedTuple):
    """The rewards of a batch of completions.

    Attributes:
      rewards: float32 `[batch]`, the weighted sum; NaN for a failed completion.
      parts: float32 `[batch]` of each function, before weighting; NaN where it failed or does not apply (None).
      failures: at most one per completion and function, and at least one per failed completion.
    """

    rewards: Float[np.ndarray, " batch"]
    parts: dict[str, Float[np.ndarray, " batch"]]
    failures: tuple[Failure, ...]

    @property
    def rewarded_rows(self) -> Bool[np.ndarray, " batch"] | None:
        """Mask of the completions with a reward; None if all have one."""
        failed = np.isnan(self.rewards)
        return ~failed if failed.any() else None


def part_of(name: str, outcomes: Sequence[Outcome]) -> tuple[np.ndarray, list[Failure]]:
    """The rewards of one function, float32 `[batch]` with NaN where there is no number, and its failures."""
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
    """Failures of completions for which every function returned None."""
    nothing = np.all([np.isnan(part) for part in parts.values()], axis=0)
    known = {failure.row for failure in failures}
    message = "expected a number from at least one; got None from all"
    return [Failure(int(row), "", "None", message) for row in np.flatnonzero(nothing) if int(row) not in known]
