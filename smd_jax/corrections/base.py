"""Interface of corrections: log-probabilities in, weights and counted tokens out.

There are three policies (verl calls this decoupled): pi_sampler sampled the tokens, pi_old is the learner at the
rollout's parameters, pi is the current learner. The mismatch ratio is xi = pi_old / pi_sampler, the staleness ratio
r = pi / pi_old. A correction weights tokens and removes tokens from the loss:

    loss = mean over counted tokens of  weights * surrogate(pi / pi_ratio_to, advantage)  +  KL, which is not corrected

The modules differ in how they use xi: `uncorrected` ignores it, `importance` weights by it, `rejection` drops tokens
and responses, `trust_region` uses the current learner, `chain` combines corrections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_instance
from smd_jax.pytrees import any_leaves
from smd_jax.ratios import Level, at_level, bounded_exp, log_ratio_inside

RatioTo = Literal["old", "sampler"]


@any_leaves
class CorrectionInputs(struct.PyTreeNode):
    """Inputs of a correction: log-probabilities of the sampled tokens, `[batch, R]`, nats, float32 or wider.

    Attributes:
      sampler_logprobs: of pi_sampler, from the rollout; None if it recorded none.
      old_logprobs: of pi_old, the learner under its own mask at the rollout's parameters.
      logprobs: of pi, the current learner, without gradient; None before its forward pass.
      advantages: `[batch]`, or `[batch, R]` with one per token.
      mask: the response tokens. Outside it the arrays may hold any value.
    """

    sampler_logprobs: Float[Array, "batch R"] | None
    old_logprobs: Float[Array, "batch R"]
    logprobs: Float[Array, "batch R"] | None
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    mask: Bool[Array, "batch R"]


@any_leaves
class CorrectionTerms(struct.PyTreeNode):
    """Outputs of a correction, `[batch, R]`.

    Attributes:
      weights: factors of the tokens' surrogates (not of their KL), without gradient; 0 outside the response. A token of
        weight 0 still counts in the denominators of the loss.
      counted: tokens that the loss averages over; false outside the response. Rejected tokens are not counted in the
        denominators.
    """

    weights: Float[Array, "batch R"]
    counted: Bool[Array, "batch R"]


@dataclass(frozen=True)
class CorrectionTraits:
    """Static properties of a correction, which loss and learner read before they call `terms`.

    Attributes:
      ratio_to: denominator of the loss's ratio: "old" for pi / pi_old, "sampler" for pi / pi_sampler.
      weighs: xi is a factor of the weights. The loss must not contain xi a second time.
      clips: the loss clips the ratio; false for a correction with a trust region.
      whole_batch: rows depend on each other, so `terms` needs the whole minibatch before it is split.
      uses_mismatch: the terms depend on xi. If not, `old_logprobs` may be the sampler's.
      uses_present: the terms depend on `logprobs`, the current learner, and are computed after its forward pass. Such a
        correction rejects a token by weight 0, because the denominators are computed before, and its rows are
        independent (`split_by_time`).
      judges_responses: the terms need whole responses with one advantage each; PPO's advantages per token and packed
        rows are refused.
    """

    ratio_to: RatioTo = "old"
    weighs: bool = False
    clips: bool = True
    whole_batch: bool = False
    uses_mismatch: bool = True
    uses_present: bool = False
    judges_responses: bool = False

    @property
    def needs_old(self) -> bool:
        """Whether the terms or the ratio need pi_old."""
        return self.uses_mismatch or self.ratio_to == "old"

    def __or__(self, other: CorrectionTraits) -> CorrectionTraits:
        """The traits of both corrections combined."""
        return CorrectionTraits(
            # A loss has one ratio: a part that needs the ratio to the sampler decides.
            ratio_to="sampler" if "sampler" in (self.ratio_to, other.ratio_to) else "old",
            weighs=self.weighs or other.weighs,
            clips=self.clips and other.clips,
            whole_batch=self.whole_batch or other.whole_batch,
            uses_mismatch=self.uses_mismatch or other.uses_mismatch,
            uses_present=self.uses_present or other.uses_present,
            judges_responses=self.judges_responses or other.judges_responses,
        )


@dataclass(frozen=True)
class Correction:
    """Base of all corrections: a frozen, hashable dataclass, usable as a static argument.

    A subclass defines `terms`, and `traits` if the defaults do not fit.
    """

    @property
    def traits(self) -> CorrectionTraits:
        """Static properties, read before `terms` is called."""
        return CorrectionTraits()

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        """Weights and counted tokens.

        Raises:
          ValueError: if the correction needs log-probabilities that are None.
        """
        raise TypeError(f"{type(self).__name__} has no terms: its class must define them")


def combine_terms(first: CorrectionTerms, second: CorrectionTerms) -> CorrectionTerms:
    """Combines two corrections: weights multiply, and a token counts if it counts in both."""
    return CorrectionTerms(first.weights * second.weights, first.counted & second.counted)


# --- configurations


def check_positive(name: str, value: float) -> None:
    # Not `value <= 0`, which is false for NaN.
    if not value > 0:
        raise ValueError(f"expected {name} > 0; got {value}")


def check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    for name, value in ((low_name, low), (high_name, high)):
        if value is not None:
            check_positive(name, value)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"expected {low_name} < {high_name}; got {low} and {high}")


def bounds_of(low: float | None, high: float | None) -> tuple[float, float]:
    """Both bounds as numbers; None becomes 0 or infinity."""
    return 0.0 if low is None else low, math.inf if high is None else high


def terms_of(correction: Correction, inputs: CorrectionInputs) -> CorrectionTerms:
    """`correction.terms(inputs)`. Raises TypeError for a result of another class."""
    terms = correction.terms(inputs)
    check_instance(f"the result of {type(correction).__name__}.terms", terms, CorrectionTerms)
    return terms


# --- arithmetic


def weighing(inputs: CorrectionInputs, weights: Float[Array, "batch R"]) -> CorrectionTerms:
    """Terms with these weights inside the response; every response token counts, also with weight 0."""
    return CorrectionTerms(jnp.where(inputs.mask, weights, 0.0), inputs.mask)


def rejecting(inputs: CorrectionInputs, acceptable: Bool[Array, "batch _"]) -> CorrectionTerms:
    """Terms with weights of 1 that reject tokens `[batch, R]` or whole responses `[batch, 1]`."""
    return CorrectionTerms(inputs.mask.astype(inputs.old_logprobs.dtype), inputs.mask & acceptable)


def sampler_logprobs_of(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.sampler_logprobs is None:
        raise ValueError("expected the sampler's log-probabilities (sampler_logprobs) for this correction; got None")
    return jax.lax.stop_gradient(inputs.sampler_logprobs)


def present_logprobs_of(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.logprobs is None:
        raise ValueError("expected the learner's present log-probabilities (logprobs) for this correction; got None")
    # Weights are constants of a step, even if they depend on the trained policy.
    return jax.lax.stop_gradient(inputs.logprobs)


def log_mismatch(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    """log xi of every token, 0 outside the response."""
    return log_ratio_inside(jax.lax.stop_gradient(inputs.old_logprobs), sampler_logprobs_of(inputs), inputs.mask)


def mismatch_ratio(inputs: CorrectionInputs, level: Level) -> Float[Array, "batch R"]:
    """xi of every token, at the given level."""
    # Summed as logarithms and cut at ±20, so that a product over a long response cannot overflow.
    return bounded_exp(at_level(log_mismatch(inputs), inputs.mask, level))
