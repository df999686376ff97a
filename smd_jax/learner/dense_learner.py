"""A dense learner beside the one with shadow masks, on the same weights.

    loss = (1 - share) * policy loss(shadow masks) + share * policy loss(full context, corrected)

Shadow masks train the policy that samples, and leave the one with the full cache to itself; a corrected dense learner
does the opposite. What both cost and gain: experiments/map.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.corrections.base import Correction
from smd_jax.corrections.importance import TIS
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class DenseLearner:
    """What the dense learner does; costs a second forward and backward pass of the microbatch.

    Attributes:
      share: of its policy loss, between 0 and 1; the other one keeps the rest.
      correction: of its mismatch with the sampler.

    Raises:
      TypeError: for a value that the type of its field does not allow.
      ValueError: unless 0 < share < 1.
    """

    share: float = 0.5
    correction: Correction = TIS()

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.share < 1:
            raise ValueError(
                "expected a share between 0 and 1: at the ends there is one learner alone, with visibility 'shadow' or "
                f"'dense'; got {self.share}"
            )
