"""A dense learner on the same weights, as a second policy loss.

    loss = (1 - share) * policy loss(shadow masks) + share * policy loss(full context, corrected)

Shadow masks train the sampling policy but not the full-cache policy; a corrected dense learner does the opposite. For
cost and gain see REPORT.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from smd_jax.corrections.base import Correction
from smd_jax.corrections.mismatch import TIS
from smd_jax.learner.forward import Visibility
from smd_jax.learner.policy_term import PolicyTerm
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.learner.terms import LearnerSetup, TermInputs, TermOutputs, TermResults
from smd_jax.learner.value_term import ValueTerm
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class DenseLearner:
    """A dense learner on the same weights, at the cost of a second forward and backward pass.

    Attributes:
      share: its share of the policy loss, between 0 and 1.
      correction: correction of its mismatch with the sampler.
    """

    share: float = 0.5
    correction: Correction = TIS()

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.share < 1:
            raise ValueError(
                "expected a share between 0 and 1, because 0 and 1 are a single learner with visibility 'shadow' or "
                f"'dense'; got {self.share}"
            )


@dataclass(frozen=True)
class DensePolicyTerm(PolicyTerm):
    """Policy loss of the dense learner. Entropy bonus and metrics are those of the learner with shadow masks.

    Attributes:
      share: share of the policy loss; `coef` is the coefficient of both learners together.
    """

    visibility: Visibility = "dense"
    share: float = 0.5

    def check(self, setup: LearnerSetup) -> None:
        super().check(setup)
        critic = any(isinstance(term, ValueTerm) for term in setup.terms)
        if setup.visibility == "dense" or self.coef == 0 or critic:
            raise ValueError(
                "expected visibility 'shadow', a policy_coef > 0 and no critic with a dense_learner, which shares the "
                f"policy loss; got {setup.visibility!r}, {self.coef} and {'a' if critic else 'no'} critic"
            )

    def coefficient(self, step: Array) -> float:
        return self.share

    def old_logprobs(self, batch: TrainBatch) -> Float[Array, "batch R"] | None:
        return batch.dense_old_logprobs

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        loss = self.coef * super().evaluate(inputs).loss
        return TermOutputs(loss, {"loss/dense_avg": loss})

    def metrics(self, results: TermResults) -> Metrics:
        return {}
