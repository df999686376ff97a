"""The seam of corrections: log-probabilities in, weights and counted tokens out.

Three policies are in play (verl calls this decoupled): pi_sampler drew the tokens, pi_old is the learner at the
rollout's parameters, pi is the learner now. The mismatch ratio is xi = pi_old / pi_sampler, the staleness ratio
r = pi / pi_old. A correction says how much each token weighs, and which tokens leave the loss:

    loss = mean over counted tokens of  weights * surrogate(pi / pi_ratio_to, advantage)  +  KL, which stays as it is

The corrections, by what they do about xi: those of `uncorrected` nothing; `importance` weighs by it; `rejection` drops
tokens and responses; `trust_region` looks at the learner now; a `chain` is several at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.pytrees import any_leaves
from smd_jax.ratios import Level, at_level, bounded_exp, log_ratio_inside

RatioTo = Literal["old", "sampler"]


@any_leaves
class CorrectionInputs(struct.PyTreeNode):
    """What a correction looks at. Log-probabilities of the sampled tokens, `[batch, R]`, nats, float32 or wider.

    Attributes:
      sampler_logprobs: those of pi_sampler, as the rollout recorded them; None where it recorded none.
      old_logprobs: those of pi_old, the learner (under its own mask) at the rollout's parameters.
      logprobs: those of pi, the learner now, without gradient; None before its forward pass.
      advantages: `[batch]`, or `[batch, R]` where every token has its own.
      mask: the tokens of the response. Outside it the arrays may hold anything.
    """

    sampler_logprobs: Float[Array, "batch R"] | None
    old_logprobs: Float[Array, "batch R"]
    logprobs: Float[Array, "batch R"] | None
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    mask: Bool[Array, "batch R"]


@any_leaves
class CorrectionTerms(struct.PyTreeNode):
    """What happens to each token, `[batch, R]`. The two ways of losing one differ, and every source has its own.

    Attributes:
      weights: multiply a token's surrogate (not its KL); without gradient; 0 outside the response. A token of weight 0
        still counts in the denominators of the loss.
      counted: tokens that the loss averages over. One that is rejected leaves the denominators too; false outside the
        response.
      high_scale: factor of the upper bound at which the loss clips a token's ratio, 1 outside; None: all 1.
    """

    weights: Float[Array, "batch R"]
    counted: Bool[Array, "batch R"]
    high_scale: Float[Array, "batch R"] | None = None


@dataclass(frozen=True)
class CorrectionTraits:
    """What loss and learner must know of a correction before they ask for its terms. The defaults suit most.

    Attributes:
      ratio_to: whose log-probabilities the loss takes its ratio to: "old", pi / pi_old, or "sampler", pi / pi_sampler.
      weighs: xi is a factor of the weights. Then the loss must not contain xi a second time.
      clips: the loss clips the ratio; false where the correction has a trust region.
      scales_bounds: the terms have a `high_scale`, for a loss that clips the ratio of single tokens.
      whole_batch: rows depend on each other: `terms` must see the whole minibatch, before it is split.
      uses_mismatch: the terms depend on xi, the rollout's learner against the sampler. If not, xi need not be known,
        and `old_logprobs` may be the sampler's own.
      uses_present: the terms depend on `logprobs`, the learner now, so that they wait for its forward pass. A token
        that such a correction rejects weighs 0, because the denominators are made before. It has no `high_scale`, and
        no row depends on another (`split_by_time`).
      per_response: all tokens of a response have one weight and stay or go together, for any advantage.
      judges_responses: the terms need one advantage per response, so that advantages of tokens (PPO) will not do.
    """

    ratio_to: RatioTo = "old"
    weighs: bool = False
    clips: bool = True
    scales_bounds: bool = False
    whole_batch: bool = False
    uses_mismatch: bool = True
    uses_present: bool = False
    per_response: bool = False
    judges_responses: bool = False

    @property
    def needs_old(self) -> bool:
        """Whether pi_old matters at all, in the terms or as the policy that the ratio is taken to."""
        return self.uses_mismatch or self.ratio_to == "old"

    def __or__(self, other: CorrectionTraits) -> CorrectionTraits:
        """The traits of both corrections at once: what one of them asks for, and what neither forbids."""
        return CorrectionTraits(
            # A loss has one ratio: a part that needs it to be taken to the sampler decides for all.
            ratio_to="sampler" if "sampler" in (self.ratio_to, other.ratio_to) else "old",
            weighs=self.weighs or other.weighs,
            clips=self.clips and other.clips,
            scales_bounds=self.scales_bounds or other.scales_bounds,
            whole_batch=self.whole_batch or other.whole_batch,
            uses_mismatch=self.uses_mismatch or other.uses_mismatch,
            uses_present=self.uses_present or other.uses_present,
            # Unlike the others: the whole is one number per response only if all its parts are.
            per_response=self.per_response and other.per_response,
            judges_responses=self.judges_responses or other.judges_responses,
        )


@dataclass(frozen=True)
class Correction:
    """Base of all corrections: a frozen dataclass, hashable, so that one can be a static argument.

    A subclass defines `terms`, and `traits` where the defaults do not describe it.
    """

    @property
    def traits(self) -> CorrectionTraits:
        """What loss and learner must know before they ask for the terms."""
        return CorrectionTraits()

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        """What happens to each token.

        Raises:
          ValueError: if the correction needs log-probabilities that are None.
        """
        raise TypeError(f"{type(self).__name__} has no terms: its class must define them")


def combine_terms(first: CorrectionTerms, second: CorrectionTerms) -> CorrectionTerms:
    """Both at once: weights and bounds multiply, and a token counts if it counts for both."""
    # None means all 1: the other factor is the product.
    high_scale = first.high_scale if second.high_scale is None else second.high_scale
    if first.high_scale is not None and second.high_scale is not None:
        high_scale = first.high_scale * second.high_scale
    return CorrectionTerms(first.weights * second.weights, first.counted & second.counted, high_scale)


# --- configurations


def check_positive(name: str, value: float) -> None:
    # No `<=`, which is false for NaN: that is refused, too.
    if not value > 0:
        raise ValueError(f"expected {name} > 0; got {value}")


def check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    for name, value in ((low_name, low), (high_name, high)):
        if value is not None:
            check_positive(name, value)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"expected {low_name} < {high_name}; got {low} and {high}")


def bounds_of(low: float | None, high: float | None) -> tuple[float, float]:
    """Both bounds as numbers; 0 and infinity for no bound."""
    return 0.0 if low is None else low, math.inf if high is None else high


# --- arithmetic


def weighing(inputs: CorrectionInputs, weights: Float[Array, "batch R"]) -> CorrectionTerms:
    """These weights inside the response, of which every token counts."""
    # A weight of 0 inside the response is no rejection: the token still counts in the denominators.
    return CorrectionTerms(jnp.where(inputs.mask, weights, 0.0), inputs.mask)


def rejecting(inputs: CorrectionInputs, acceptable: Bool[Array, "batch _"]) -> CorrectionTerms:
    """Weights of 1; tokens `[batch, R]` or whole responses `[batch, 1]` that are not acceptable leave the loss."""
    return CorrectionTerms(inputs.mask.astype(inputs.old_logprobs.dtype), inputs.mask & acceptable)


def sampler_logprobs_of(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.sampler_logprobs is None:
        raise ValueError("expected the sampler's log-probabilities (sampler_logprobs) for this correction; got None")
    return jax.lax.stop_gradient(inputs.sampler_logprobs)


def present_logprobs_of(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.logprobs is None:
        raise ValueError("expected the learner's present log-probabilities (logprobs) for this correction; got None")
    # Weights are constants of a step, also where they follow from the policy that it trains.
    return jax.lax.stop_gradient(inputs.logprobs)


def log_mismatch(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    """log xi of every token, 0 outside the response."""
    return log_ratio_inside(jax.lax.stop_gradient(inputs.old_logprobs), sampler_logprobs_of(inputs), inputs.mask)


def mismatch_ratio(inputs: CorrectionInputs, level: Level) -> Float[Array, "batch R"]:
    """xi of every token, at the given level."""
    # Added up in logarithms and cut at ±20 afterwards, so that a product over a long response cannot overflow.
    return bounded_exp(at_level(log_mismatch(inputs), inputs.mask, level))
