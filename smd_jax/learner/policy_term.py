"""Policy loss term: correction of the mismatch, token selection, KL to the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.corrections.base import Correction, CorrectionInputs, CorrectionTerms, Shadow, terms_of
from smd_jax.corrections.chain import flat_parts, split_by_time
from smd_jax.learner.entropy_term import TokenChoice
from smd_jax.learner.forward import Visibility
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.learner.terms import LearnerSetup, Minibatch, Needs, Term, TermInputs, TermOutputs, TermResults
from smd_jax.losses.policy import LossConfig, LossInputs, LossTerms, policy_loss, surrogate_metrics
from smd_jax.metrics import correction_metrics, token_mean
from smd_jax.pytrees import any_leaves
from smd_jax.typed_fields import check_types


@any_leaves
class PolicyWeights(struct.PyTreeNode):
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


@any_leaves
class PolicyRows(struct.PyTreeNode):
    """Per-token results for the metrics."""

    loss: LossTerms
    correction_weights: Float[Array, "rows R"]


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
        if not self.coef >= 0:
            raise ValueError(f"expected policy_coef > 0, or 0 with another term to learn from; got {self.coef}")
        if self.loss.beta > 0 and self.coef == 0:
            raise ValueError(f"expected beta 0 with policy_coef 0, which disables the KL; got {self.loss.beta}")
        choice = self.choice
        if self.coef == 0 and choice.quantile < 1:
            raise ValueError(
                "expected top_entropy_quantile 1 with policy_coef 0, which leaves no policy loss to choose tokens for; "
                f"got {choice.quantile}"
            )
        self._check_kl()
        check_correction(self.correction, self.visibility)
        self._check_clipping()

    def _check_kl(self) -> None:
        """Refuses options that would be ignored."""
        if self.kl_in_reward and self.loss.beta == 0:
            raise ValueError("expected beta > 0 with kl_in_reward; got 0")
        if self.kl_in_reward and self.loss.kl_estimator != "k1":
            raise ValueError(
                f"expected kl_estimator 'k1' with kl_in_reward, because as a reward no other estimate has the gradient "
                f"of the KL; got {self.loss.kl_estimator!r}"
            )

    def _check_clipping(self) -> None:
        traits, name = self.correction.traits, type(self.correction).__name__
        # `used_loss` replaces the surrogate for such a correction, so the surrogate may only clip.
        plain = self.loss.surrogate.only_clips and self.loss.ratio_level == "token"
        if not traits.clips and not plain:
            raise ValueError(
                f"expected the plain token ratio (Clip without delta, ratio_level 'token') with {name}, which replaces "
                f"its clipping; got {self.loss}"
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
        if self.kl_in_reward:
            return replace(loss, beta=0.0, kl_estimator="k3", use_bias_correction_kl=False)
        return loss

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
        weights = self._correction_weights(inputs, logprobs)
        reference = inputs.reference_logprobs[self.visibility] if self.used_loss.beta else None
        loss_inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=self._ratio_to(inputs, logprobs),
            reference_logprobs=reference,
            advantages=inputs.batch.advantages,
            weights=prepared.weights,
            # A token that is not selected loses only its surrogate, like a token of correction weight 0. It still
            # counts in the KL and in the denominators.
            correction_weights=weights if prepared.chosen is None else jnp.where(prepared.chosen, weights, 0.0),
        )
        loss, terms = policy_loss(loss_inputs, self.used_loss)
        return TermOutputs(loss, rows=PolicyRows(terms, weights))

    def _ratio_to(self, inputs: TermInputs, logprobs: Float[Array, "rows R"]) -> Float[Array, "rows R"]:
        """Log-probabilities of the policy in the denominator of the ratio."""
        if self.correction.traits.ratio_to == "sampler":
            return inputs.trajectory.logprobs
        # Without recorded ones the old policy is the current one: every ratio is 1, with the gradient of log p.
        # A replay of another program would differ by rounding, which GSPO's bounds may clip.
        old = self.old_logprobs(inputs.batch)
        return jax.lax.stop_gradient(logprobs) if old is None else old

    def _correction_weights(self, inputs: TermInputs, logprobs: Float[Array, "rows R"]) -> Float[Array, "rows R"]:
        """Weights computed before the forward pass times those of the correction's late part."""
        prepared: PolicyWeights = inputs.prepared
        late = split_by_time(self.correction)[1]
        if late is None:
            return prepared.correction.weights
        # Weights are constants of the step, without gradient.
        present = jax.lax.stop_gradient(logprobs)
        terms = terms_of(late, _correction_inputs(inputs.batch, inputs.mask, prepared.old_logprobs, present))
        # The denominators were computed before the forward pass, so a late rejection only sets the weight to 0.
        return prepared.correction.weights * jnp.where(terms.counted, terms.weights, 0.0)

    def metrics(self, results: TermResults) -> Metrics:
        """Means over the counted tokens."""
        rows: PolicyRows = results.rows
        counted = results.prepared.correction.counted
        metrics = surrogate_metrics(rows.loss, counted, self.loss, results.batch.counted_rows)
        metrics |= correction_metrics(rows.correction_weights, counted, results.mask)
        # A KL in the reward is logged by the loop, over the whole rollout.
        return metrics | ({"kl": token_mean(rows.loss.kl, counted)} if self.used_loss.beta else {})

    def learns(self, results: TermResults) -> Bool[Array, ""]:
        return results.prepared.correction.counted.any()


def check_correction(correction: Correction, visibility: Visibility) -> None:
    """Raises ValueError for the correction `Shadow()` without visibility "shadow"."""
    if visibility == "dense" and any(isinstance(part, Shadow) for part in flat_parts(correction)):
        raise ValueError(
            "expected visibility 'shadow' with the correction Shadow(), which claims that there is no mismatch; got "
            "'dense'. Choose another correction: Naive() ignores the mismatch"
        )


def _correction_inputs(
    batch: TrainBatch,
    mask: Bool[Array, "batch R"],
    old: Float[Array, "batch R"] | None,
    logprobs: Float[Array, "batch R"] | None = None,
) -> CorrectionInputs:
    """Inputs of the correction; `logprobs` of the current learner after its forward pass."""
    sampler = batch.trajectory.logprobs
    return CorrectionInputs(sampler, sampler if old is None else old, logprobs, batch.advantages, mask)
