"""Corrections that use the current learner, after its forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from smd_jax.corrections.base import (
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    check_positive,
    present_logprobs_of,
    sampler_logprobs_of,
    weighing,
)
from smd_jax.ratios import bounded_exp, log_ratio_inside, response_mean
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class OPSM(Correction):
    """Off-policy sequence mask, DeepSeek-V3.2 (arXiv:2512.02556) eq. 9: weight 0 for all tokens of a response with a
    negative advantage and mean(log pi_sampler - log pi) > threshold, mismatch and staleness together.

    TRL: off_policy_mask_threshold (its documentation: e.g. 0.5), get_off_policy_mask; a masked response still counts in
    the denominators. slime: --opsm-delta 1e-4.
    """

    threshold: float = 0.5
    traits = CorrectionTraits(uses_mismatch=False, uses_present=True, judges_responses=True)

    def __post_init__(self) -> None:
        check_types(self)
        check_positive("threshold", self.threshold)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # The sign of the advantage decides about the whole response, so it needs exactly one.
        if inputs.advantages.ndim != 1:
            raise ValueError(f"OPSM: expected one advantage per response, [batch]; got {inputs.advantages.shape}")
        log_ratio = log_ratio_inside(sampler_logprobs_of(inputs), present_logprobs_of(inputs), inputs.mask)
        # A mean, not a sum, so that the threshold suits any length.
        divergence = response_mean(log_ratio, inputs.mask)
        on_policy = (inputs.advantages[:, None] >= 0) | (divergence <= self.threshold)
        return weighing(inputs, jnp.broadcast_to(on_policy, inputs.mask.shape).astype(divergence.dtype))


@dataclass(frozen=True)
class DPPOTV(Correction):
    """DPPO with the binary total variation (arXiv:2602.04879): a trust region in probability instead of the ratio.

    Weight 0 if the update would move further away from the sampler: pi - pi_sampler > high for a positive advantage,
    pi_sampler - pi > low otherwise. Else min(1, clip_max / ratio), which makes ratio * advantage the truncated
    surrogate. The loss takes its ratio to the sampler and must not clip it.

    verl: verl/trainer/ppo/core_algos.py, compute_policy_loss_dppo_tv: clip_ratio_low and _high (0.15 in
    examples/dppo_trainer), clip_ratio_c 20 if it is not configured (3 in actor.yaml, 10,000 in that example). prime-rl:
    dppo_mask_low and _high 0.2.
    """

    low: float = 0.15
    high: float = 0.15
    clip_max: float = 20.0
    traits = CorrectionTraits(ratio_to="sampler", clips=False, uses_mismatch=False, uses_present=True)

    def __post_init__(self) -> None:
        check_types(self)
        check_positive("low", self.low)
        check_positive("high", self.high)
        check_positive("clip_max", self.clip_max)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # Masked before the exp, because the arrays may hold any value outside the response.
        now = jnp.where(inputs.mask, present_logprobs_of(inputs), 0.0)
        before = jnp.where(inputs.mask, sampler_logprobs_of(inputs), 0.0)
        # A difference of probabilities: bounds on the ratio would stop a rare token from becoming ten times as likely.
        further = jnp.exp(now) - jnp.exp(before)
        # One advantage per response is broadcast over its tokens.
        advantages = inputs.advantages[:, None] if inputs.advantages.ndim == 1 else inputs.advantages
        inside = jnp.where(advantages > 0, further <= self.high, further >= -self.low)
        truncation = jnp.minimum(1.0, self.clip_max / bounded_exp(now - before))
        return weighing(inputs, jnp.where(inside, truncation, 0.0))
