"""Rewards of a batch of completions, and the failures among them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

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
