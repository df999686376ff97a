"""How far the learner is from the policy that sampled, and what a correction makes of it: numbers for every run.

Definitions follow verl (verl/trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics and compute_is_metrics) but
for two things: responses without tokens are left out of means over responses, so that padding rows change nothing; and
the statistics of weights, rollout_is_*, are of those that the loss multiplies by, for every correction, where verl has
those before batch normalisation, and extremes before truncation at the sequence level.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# |log ratio| is cut here before any exponential, as in verl and slime: exp(20) is 485 million.
SAFETY_BOUND = 20.0

MISMATCH_METRICS: dict[str, str] = {
    "rollout_corr/chi2_token": "mean over tokens of xi^2, minus 1; xi = p_learner / p_sampler",
    "rollout_corr/chi2_seq": "mean over responses of (product of xi)^2, minus 1",
    "rollout_corr/eff_sample_size": "(mean xi)^2 / mean xi^2 over tokens: 1 without mismatch, towards 0 with outliers",
    "rollout_corr/agreement_p5": "5th percentile over tokens of min(1, xi), one sample's estimate of 1 - TV",
}

CORRECTION_METRICS: dict[str, str] = {
    "rollout_corr/rollout_is_mean": "mean over tokens of the weights that the correction applies",
    "rollout_corr/rollout_is_min": "smallest weight of a token that the correction applies",
    "rollout_corr/rollout_is_max": "largest weight of a token that the correction applies",
    "rollout_corr/rollout_is_eff_sample_size": "effective sample size of the weights that the correction applies",
    "rollout_corr/rollout_rs_masked_fraction": "share of response tokens that are rejected or weigh 0",
    "rollout_corr/rollout_rs_seq_masked_fraction": "share of responses that lose at least one token",
    "rollout_corr/rollout_rs_seq_dropped_fraction": "share of responses that lose all their tokens",
}


def chi2_metrics(
    sampler_logprobs: Float[Array, "batch R"], learner_logprobs: Float[Array, "batch R"], mask: Bool[Array, "batch R"]
) -> dict[str, Float[Array, ""]]:
    """Spread of the mismatch ratio xi over the tokens in `mask`, whatever is done about it.

    Returns:
      `MISMATCH_METRICS`. Without tokens the divergences are 0, the others 1.
    """
    log_ratio = log_ratio_inside(learner_logprobs, sampler_logprobs, mask)
    ratio, of_response = bounded_exp(log_ratio), bounded_exp(log_ratio.sum(axis=1))
    return {
        "rollout_corr/chi2_token": _mean(ratio**2, mask) - 1.0,
        "rollout_corr/chi2_seq": _mean(of_response**2, mask.any(axis=1)) - 1.0,
        "rollout_corr/eff_sample_size": effective_sample_size(ratio, mask),
        "rollout_corr/agreement_p5": lower_percentile(jnp.minimum(ratio, 1.0), mask, 5.0),
    }


def correction_metrics(
    weights: Float[Array, "batch R"], keep: Bool[Array, "batch R"], mask: Bool[Array, "batch R"]
) -> dict[str, Float[Array, ""]]:
    """What the terms of a correction do to the tokens in `mask`: `CORRECTION_METRICS`.

    Statistics of weights are over all tokens, rejected ones included; without tokens they are 1. A token counts as
    rejected if it is not kept or weighs 0; without tokens nothing is rejected.
    """
    lost, present = mask & (~keep | (weights == 0)), mask.any(axis=1)
    return {
        "rollout_corr/rollout_is_mean": _mean(weights, mask),
        "rollout_corr/rollout_is_min": jnp.where(mask.any(), jnp.where(mask, weights, jnp.inf).min(), 1.0),
        "rollout_corr/rollout_is_max": jnp.where(mask.any(), jnp.where(mask, weights, -jnp.inf).max(), 1.0),
        "rollout_corr/rollout_is_eff_sample_size": effective_sample_size(weights, mask),
        "rollout_corr/rollout_rs_masked_fraction": _fraction(lost, mask),
        "rollout_corr/rollout_rs_seq_masked_fraction": _fraction(lost.any(axis=1), present),
        "rollout_corr/rollout_rs_seq_dropped_fraction": _fraction(present & (lost == mask).all(axis=1), present),
    }


def log_ratio_inside(
    logprobs: Float[Array, "batch R"], other_logprobs: Float[Array, "batch R"], mask: Bool[Array, "batch R"]
) -> Float[Array, "batch R"]:
    """log p / p_other inside the mask, 0 outside."""
    # Padding may hold anything, infinities included: replace it before any arithmetic can spread it.
    return jnp.where(mask, logprobs, 0.0) - jnp.where(mask, other_logprobs, 0.0)


def bounded_exp(log_ratio: Float[Array, ...]) -> Float[Array, ...]:
    """exp, between exp(-20) and exp(20)."""
    return jnp.exp(jnp.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND))


def response_mean(values: Float[Array, "batch R"], mask: Bool[Array, "batch R"]) -> Float[Array, "batch 1"]:
    """Mean over the tokens of a response, 0 when it has none; `values` are 0 outside the mask."""
    return values.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def effective_sample_size(weights: Float[Array, "batch R"], mask: Bool[Array, "batch R"]) -> Float[Array, ""]:
    """(mean w)^2 / mean w^2 over the tokens in `mask`: as many equal weights, as a share of them, would do as well.

    0 if all weights are 0, 1 without tokens.
    """
    mean, square = _mean(weights, mask), _mean(weights**2, mask)
    return jnp.where(square > 0, mean**2 / jnp.where(square > 0, square, 1.0), 0.0)


def overlap(p_logits: Float[Array, "... vocab"], q_logits: Float[Array, "... vocab"]) -> Float[Array, ...]:
    """1 - TV(p, q) = sum over the vocabulary of min(p, q), exact: the agreement of two policies at a token."""
    p, q = jax.nn.softmax(p_logits, axis=-1), jax.nn.softmax(q_logits, axis=-1)
    return jnp.minimum(p, q).sum(axis=-1)


def lower_percentile(values: Float[Array, "batch R"], mask: Bool[Array, "batch R"], percent: float) -> Float[Array, ""]:
    """The percentile of the values in `mask`, linear between neighbours as numpy's; 1 without any.

    Sparrow (arXiv:2606.08446) finds that the 5th percentile of the per-token agreement between sparse and dense policy,
    not its mean, tells whether training on sparse rollouts survives (0.86 and more did, Qwen3 1.7B to 14B). With
    `overlap` of the full distributions this is that number. From the sampled tokens' log-probabilities alone min(1, xi)
    has the same mean, but a wider spread, hence a lower percentile: comparable between runs, not with 0.86.

    Raises:
      ValueError: if `percent` is not between 0 and 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"expected 0 <= percent <= 100; got {percent}")
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf).ravel())
    last = jnp.maximum(mask.sum() - 1, 0)
    rank = percent / 100.0 * last
    below = jnp.floor(rank).astype(jnp.int32)
    low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
    return jnp.where(mask.any(), low + jnp.where(high > low, (high - low) * (rank - below), 0.0), 1.0)


def _mean(values: Float[Array, ...], mask: Bool[Array, ...]) -> Float[Array, ""]:
    """Mean over the mask, 1 when there is nothing in it."""
    total = jnp.where(mask, values, 0.0).sum()
    return jnp.where(mask.any(), total / jnp.maximum(mask.sum(), 1), 1.0)


def _fraction(lost: Bool[Array, ...], present: Bool[Array, ...]) -> Float[Array, ""]:
    return lost.sum() / jnp.maximum(present.sum(), 1)
