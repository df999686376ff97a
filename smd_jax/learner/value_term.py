"""Value loss of PPO's critic."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array

from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.value import ValueConfig, value_loss
from smd_jax.metrics import token_mean


@dataclass(frozen=True)
class ValueTerm(Term):
    """The critic's loss over all counted tokens, including those that a correction rejects: it learns the sampled
    returns and uses no ratio."""

    config: ValueConfig = ValueConfig()

    @property
    def needs(self) -> Needs:
        return Needs(values=True)

    def coefficient(self, step: Array) -> float:
        return self.config.coef

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        batch = inputs.batch
        if batch.old_values is None or batch.returns is None:
            raise ValueError(
                "expected old_values and returns in the batch for the value loss, as from PPOLoop; got None"
            )
        assert inputs.values is not None  # it needs them
        loss, clipped = value_loss(inputs.values, batch.old_values, batch.returns, inputs.prepared, self.config)
        return TermOutputs(loss, {"loss/value_avg": loss}, clipped)

    def metrics(self, results: TermResults) -> Metrics:
        return {"val/clipfrac_avg": token_mean(results.rows, results.mask)}
