"""Interface of corrections, and those that ignore the mismatch. Log-probabilities in, weights and counted tokens out.

There are three policies (verl calls this decoupled): pi_sampler sampled the tokens, pi_old is the learner at the
rollout's parameters, pi is the current learner. The mismatch ratio is xi = pi_old / pi_sampler, the staleness ratio
r = pi / pi_old. A correction weights tokens and removes tokens from the loss:

    loss = mean over counted tokens of  weights * surrogate(pi / pi_ratio_to, advantage)  +  KL, which is not corrected

The modules: `mismatch` weights or rejects by xi, `trust_region` uses the current learner, `chain` combines corrections.

Their sources: TRL is trl/trainer/grpo_trainer.py and grpo_config.py (1.16); verl is
verl/trainer/ppo/rollout_corr_helper.py with the presets of verl/trainer/config/algorithm.py; slime is
slime/examples/train_infer_mismatch_helper/mis.py and mis.yaml, in the copy that Sparse-RL's repository trains with.
Other files are named where they are followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_instance
from smd_jax.pytrees import PyTreeNode
from smd_jax.shapes import check_shape

RatioTo = Literal["old", "sampler"]


class CorrectionInputs(PyTreeNode):
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


class CorrectionTerms(PyTreeNode):
    """Outputs of a correction, `[batch, R]`.

    Attributes:
      weights: factors of the tokens' surrogates (not of their KL), without gradient; 0 outside the response. A token of
        weight 0 still counts in the denominators of the loss.
      counted: tokens that the loss averages over; those outside the response never count. Rejected tokens are not
        counted in the denominators.
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

    Attributes:
      traits: static properties, read before `terms` is called; a property if they depend on fields.
    """

    traits: ClassVar[CorrectionTraits] = CorrectionTraits()

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        """Weights and counted tokens.

        Raises:
          ValueError: if the correction needs log-probabilities that are None.
        """
        raise TypeError(f"{type(self).__name__} has no terms: its class must define them")


def combine_terms(first: CorrectionTerms, second: CorrectionTerms) -> CorrectionTerms:
    """Combines two corrections: weights multiply, and a token counts if it counts in both."""
    return CorrectionTerms(first.weights * second.weights, first.counted & second.counted)


def check_positive(name: str, value: float) -> None:
    # Not `value <= 0`, which is false for NaN.
    if not value > 0:
        raise ValueError(f"expected {name} > 0; got {value}")


def terms_of(correction: Correction, inputs: CorrectionInputs) -> CorrectionTerms:
    """`correction.terms(inputs)`.

    Raises:
      TypeError: for a result of another class, and counted tokens that are no booleans.
      ValueError: for terms of another shape, and a correction that reads the current learner before its forward pass.
    """
    name = type(correction).__name__
    try:
        terms = correction.terms(inputs)
    except (TypeError, AttributeError) as error:
        if inputs.logprobs is not None or "NoneType" not in str(error):
            raise
        raise ValueError(
            f"expected CorrectionTraits(uses_present=True) as traits of {name} if it reads inputs.logprobs, which are "
            f"None before the learner's forward pass; got {error}"
        ) from error
    check_instance(f"the result of {name}.terms", terms, CorrectionTerms)
    check_shape(f"the weights of {name}.terms", terms.weights, inputs.mask.shape)
    check_shape(f"the counted tokens of {name}.terms", terms.counted, inputs.mask.shape)
    if terms.counted.dtype != bool:
        raise TypeError(f"expected the counted tokens of {name}.terms as booleans; got {terms.counted.dtype}")
    # A user's `ratio < 5` is true for padding, too, and would change the loss's denominators.
    return terms.replace(counted=terms.counted & inputs.mask)


def weighing(inputs: CorrectionInputs, weights: Float[Array, "batch R"]) -> CorrectionTerms:
    """Terms with these weights inside the response; every response token counts, also with weight 0."""
    return CorrectionTerms(jnp.where(inputs.mask, weights, 0.0), inputs.mask)


def sampler_logprobs_of(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.sampler_logprobs is None:
        raise ValueError("expected the sampler's log-probabilities (sampler_logprobs) for this correction; got None")
    return jax.lax.stop_gradient(inputs.sampler_logprobs)


def present_logprobs_of(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.logprobs is None:
        raise ValueError("expected the learner's current log-probabilities (logprobs) for this correction; got None")
    # Weights are constants of a step, even if they depend on the trained policy.
    return jax.lax.stop_gradient(inputs.logprobs)


@dataclass(frozen=True)
class Naive(Correction):
    """Ignores xi: treats the sampler as the learner at the rollout's parameters.

    TRL: vllm_importance_sampling_correction=False. verl: rollout_is=None.
    """

    traits = CorrectionTraits(uses_mismatch=False)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # The rollout may have recorded no log-probabilities, so the shape comes from the learner's.
        return weighing(inputs, jnp.ones_like(inputs.old_logprobs))


@dataclass(frozen=True)
class Shadow(Naive):
    """Shadow Mask Distillation: the learner replays the sampler's masks, so xi is 1 and nothing needs correction.

    The terms are those of `Naive`. Use it with visibility "shadow", where xi = 1 up to rounding, as `mismatch_kl` of
    every run shows.
    """


@dataclass(frozen=True)
class Bypass(Naive):
    """The loss takes its ratio to the sampler itself, pi / pi_sampler = r xi, and clips that.

    Two policies, no pi_old. verl: bypass_mode=True with loss_type="ppo_clip". Tunix: use_rollout_logps=True.
    """

    traits = CorrectionTraits(ratio_to="sampler", uses_mismatch=False)
