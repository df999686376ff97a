"""Policy loss terms: correction of the mismatch, token selection, KL to the reference; and a dense learner's share.

    loss = (1 - share) * policy loss(shadow masks) + share * policy loss(full context, corrected)

Shadow masks train the sampling policy but not the full-cache policy; a corrected dense learner on the same weights does
the opposite. For cost and gain see REPORT.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.corrections.base import Correction, CorrectionInputs, CorrectionTerms, Shadow, terms_of
from smd_jax.corrections.chain import claims_no_mismatch, split_by_time
from smd_jax.corrections.mismatch import TIS
from smd_jax.learner.auxiliary_terms import TokenChoice, ValueTerm
from smd_jax.learner.forward import Visibility
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.learner.terms import LearnerSetup, Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.policy import LossConfig, LossInputs, policy_loss, surrogate_metrics
from smd_jax.metrics import correction_metrics, token_mean
from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types


class PolicyWeights(PyTreeNode):
    """Inputs of the policy loss that depend on the whole minibatch, `[batch, R]`.

    Attributes:
      correction: terms of the correction's early part, which does not depend on the current policy.
      weights: loss weights of the tokens that the correction does not reject.
      old_logprobs: of the learner at the rollout's parameters, for the correction; None: the correction does not read
        them.
      chosen: tokens selected by entropy; None: all.
    """

    correction: CorrectionTerms
    weights: Float[Array, "batch R"]
    old_logprobs: Float[Array, "batch R"] | None
    chosen: Bool[Array, "batch R"] | None


@dataclass(frozen=True)
class PolicyTerm(Term):
    """Policy loss with its correction; attributes as in `UpdateConfig`."""

    loss: LossConfig = LossConfig()
    coef: float = 1.0
    correction: Correction = Shadow()
    visibility: Visibility = "shadow"
    kl_in_reward: bool = False
    top_entropy_quantile: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        loss, correction = self.loss, self.correction
        if not 0 <= self.coef < math.inf:
            raise ValueError(
                f"expected a finite policy_coef > 0, or 0 with another term to learn from; got {self.coef}"
            )
        if loss.beta > 0 and self.coef == 0:
            raise ValueError(f"expected beta 0 with policy_coef 0, which disables the KL; got {loss.beta}")
        choice = self.choice  # checks the quantile
        if self.coef == 0 and choice.quantile < 1:
            raise ValueError(
                "expected top_entropy_quantile 1 with policy_coef 0, which leaves no policy loss to choose tokens for; "
                f"got {choice.quantile}"
            )
        if self.kl_in_reward and loss.beta == 0:
            raise ValueError("expected beta > 0 with kl_in_reward; got 0")
        if self.kl_in_reward and loss.kl_estimator != "k1":
            raise ValueError(
                f"expected kl_estimator 'k1' with kl_in_reward, because as a reward no other estimate has the gradient "
                f"of the KL; got {loss.kl_estimator!r}"
            )
        if self.visibility == "dense" and claims_no_mismatch(correction):
            raise ValueError(
                "expected visibility 'shadow' with the correction Shadow(), which claims that there is no mismatch; "
                "got 'dense'. Choose another correction: Naive() ignores the mismatch"
            )
        # `used_loss` replaces the surrogate for a correction with a trust region, so the surrogate may only clip.
        if not correction.traits.clips and not (loss.surrogate.only_clips and loss.ratio_level == "token"):
            raise ValueError(
                f"expected the plain token ratio (Clip without delta, ratio_level 'token') with "
                f"{type(correction).__name__}, which replaces its clipping; got {loss}"
            )

    @property
    def matches_sampler(self) -> bool:
        """Whether this learner and the sampler are one policy up to rounding.

        That is so with shadow masks, unless a correction measures the difference.
        """
        return self.visibility == "shadow" and not self.correction.traits.uses_mismatch

    @property
    def uses_sampler_logprobs_as_old(self) -> bool:
        """Whether the sampler's recorded log-probabilities are the denominator of the ratio.

        Not for the ratio of a response: in 16 bits, sampler and learner round more differently than GSPO's bounds of
        3e-4 allow.
        """
        return self.matches_sampler and self.loss.ratio_level == "token"

    @property
    def choice(self) -> TokenChoice:
        """The selection of tokens by entropy."""
        return TokenChoice(self.top_entropy_quantile, self.visibility, recorded=self.matches_sampler)

    @property
    def used_loss(self) -> LossConfig:
        """The loss, without clipping for a correction with a trust region, and without a KL that is in the reward."""
        loss = self.loss if self.correction.traits.clips else self.loss.unclipped()
        return replace(loss, beta=0.0, kl_estimator="k3", use_bias_correction_kl=False) if self.kl_in_reward else loss

    @property
    def needs(self) -> Needs:
        own: frozenset[Visibility] = frozenset((self.visibility,))
        seen = own if self.used_loss.beta else frozenset()
        return Needs(own, reference=self.loss.beta > 0, reference_logprobs=seen)

    def check(self, setup: LearnerSetup) -> None:
        if setup.pack_columns is None:
            return
        late = split_by_time(self.correction)[1]
        judges_responses = late is not None and late.traits.judges_responses
        if self.loss.ratio_level != "token" or judges_responses:
            raise ValueError(
                "expected pack_columns None with ratios of whole responses, or a correction that judges them, because "
                f"responses in one row would share a ratio; got {setup.pack_columns} with {self.loss} and "
                f"{self.correction}"
            )

    def coefficient(self, step: Array) -> float:
        return self.coef

    def old_logprobs(self, batch: TrainBatch) -> Float[Array, "batch R"] | None:
        """The learner's log-probabilities at the rollout's parameters, if the batch has them."""
        return batch.old_logprobs

    def prepare(self, minibatch: Minibatch) -> PolicyWeights:
        batch, mask = minibatch.batch, minibatch.mask
        early = split_by_time(self.correction)[0]
        old = self.old_logprobs(batch)
        # The late part may use the mismatch, too.
        if self.correction.traits.uses_mismatch and old is None:
            old = minibatch.replay(self.visibility).logprobs
        correction = terms_of(early, _correction_inputs(batch, mask, old))
        # Rejected tokens are not in the loss nor in its denominators.
        weights = self.loss.weighting.weights(correction.counted, batch.counted_rows)
        return PolicyWeights(correction, weights, old, self.choice.tokens(minibatch))

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        prepared: PolicyWeights = inputs.prepared
        logprobs = inputs.logprobs_under[self.visibility]
        present = jax.lax.stop_gradient(logprobs)
        weights = prepared.correction.weights
        late = split_by_time(self.correction)[1]
        if late is not None:
            terms = terms_of(late, _correction_inputs(inputs.batch, inputs.mask, prepared.old_logprobs, present))
            # The denominators were computed before the forward pass, so a late rejection only sets the weight to 0.
            weights = weights * jnp.where(terms.counted, terms.weights, 0.0)
        old = self.old_logprobs(inputs.batch)
        if self.correction.traits.ratio_to == "sampler":
            old = inputs.trajectory.logprobs
        elif old is None:
            # Without recorded ones the old policy is the current one: every ratio is 1, with the gradient of log p.
            # A replay of another program would differ by rounding, which GSPO's bounds may clip.
            old = present
        loss_inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            reference_logprobs=inputs.reference_logprobs[self.visibility] if self.used_loss.beta else None,
            advantages=inputs.batch.advantages,
            weights=prepared.weights,
            # A token that is not selected loses only its surrogate, like a token of correction weight 0. It still
            # counts in the KL and in the denominators.
            correction_weights=weights if prepared.chosen is None else jnp.where(prepared.chosen, weights, 0.0),
        )
        loss, terms = policy_loss(loss_inputs, self.used_loss)
        return TermOutputs(loss, rows=(terms, weights))

    def metrics(self, results: TermResults) -> Metrics:
        """Means over the counted tokens."""
        terms, weights = results.rows
        counted = results.prepared.correction.counted
        metrics = surrogate_metrics(terms, counted, self.loss, results.batch.counted_rows)
        metrics |= correction_metrics(weights, counted, results.mask)
        # A KL in the reward is logged by the loop, over the whole rollout.
        return metrics | ({"kl": token_mean(terms.kl, counted)} if self.used_loss.beta else {})

    def learns(self, results: TermResults) -> Bool[Array, ""]:
        return results.prepared.correction.counted.any()


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
                f"policy loss; got {setup.shown_visibility}, {self.coef} and {'a' if critic else 'no'} critic"
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


def _correction_inputs(
    batch: TrainBatch,
    mask: Bool[Array, "batch R"],
    old: Float[Array, "batch R"] | None,
    logprobs: Float[Array, "batch R"] | None = None,
) -> CorrectionInputs:
    """Inputs of the correction; `logprobs` of the current learner after its forward pass."""
    sampler = batch.trajectory.logprobs
    return CorrectionInputs(sampler, sampler if old is None else old, logprobs, batch.advantages, mask)
