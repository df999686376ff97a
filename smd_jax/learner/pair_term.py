"""The preference loss of online DPO as a term: two adjacent rows are a pair, first the chosen response, then the
rejected one.

    row            0        1          2        3          4        5
    response       chosen   rejected   chosen   rejected   chosen   rejected
    advantage      +1       -1         +1       -1          0        0          a pair of equal rewards: no signal

The term does not know the eviction policy. Its log-probabilities are at the sampler's temperature; TRL's are at 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from smd_jax.learner.forward import Visibility
from smd_jax.learner.state import Metrics
from smd_jax.learner.terms import LearnerSetup, Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.dpo import DPOConfig, DPOInputs, dpo_loss, dpo_metrics, pair_weights, sequence_logprobs
from smd_jax.losses.kl import k3
from smd_jax.metrics import token_mean
from smd_jax.shapes import check_shape


@dataclass(frozen=True)
class PairTerm(Term):
    """The preference loss; attributes as in `UpdateConfig`, whose `pairs` makes it."""

    loss: DPOConfig
    visibility: Visibility

    def check(self, setup: LearnerSetup) -> None:
        if len(setup.terms) > 1 or setup.visibility != self.visibility:
            raise ValueError(
                "expected a PairTerm from UpdateConfig(pairs=...), which keeps pairs in one microbatch; got the terms "
                f"{setup.terms}"
            )

    @property
    def needs(self) -> Needs:
        return Needs(reference_logprobs=frozenset((self.visibility,)))

    def prepare(self, minibatch: Minibatch) -> Float[Array, " batch"]:
        """The weight of each row's pair in the loss."""
        advantages = minibatch.batch.advantages
        check_shape("advantages", advantages, minibatch.mask.shape[:1])
        if len(advantages) % 2:
            raise ValueError(f"expected two rows for each pair; got {len(advantages)} rows")
        # A response without tokens makes no pair.
        counted = minibatch.mask.any(axis=1) & (advantages != 0)
        return _of_rows(pair_weights(counted.reshape(-1, 2).all(axis=1)))

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        reference = inputs.reference_logprobs[self.visibility]
        policy, frozen = (sequence_logprobs(x, inputs.mask).reshape(-1, 2) for x in (inputs.logprobs, reference))
        weights = _of_pairs(inputs.prepared)
        loss, pairs = dpo_loss(DPOInputs(policy[:, 0], policy[:, 1], frozen[:, 0], frozen[:, 1], weights), self.loss)
        return TermOutputs(loss, rows=(k3(inputs.logprobs, reference), jax.tree.map(_of_rows, pairs)))

    def metrics(self, results: TermResults) -> Metrics:
        """Those of `dpo_metrics`, and the KL to the reference over the tokens of all responses."""
        kl, pairs = results.rows
        metrics = dpo_metrics(jax.tree.map(_of_pairs, pairs), _of_pairs(results.prepared))
        return metrics | {"kl": token_mean(kl, results.mask)}

    def learns(self, results: TermResults) -> Int[Array, ""]:
        """The number of counted pairs."""
        return (_of_pairs(results.prepared) > 0).sum()


def _of_rows(x: Shaped[Array, " pairs"]) -> Shaped[Array, " rows"]:
    """A number of each pair, for both of its rows."""
    return jnp.repeat(x, 2)


def _of_pairs(x: Shaped[Array, " rows"]) -> Shaped[Array, " pairs"]:
    """The inverse of `_of_rows`."""
    return x[::2]
