"""Metrics of tokens: difference of sampler and learner, effect of a correction, lengths, rewards.

Numbers that TRL logs have TRL's names. All logarithms are natural, and lengths are in tokens.

Definitions of `rollout_corr/*` follow verl (verl/trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics and
compute_is_metrics) with three exceptions. Means over responses leave out responses without tokens, so that padding
rows change nothing. rollout_is_* are statistics of the weights that the loss multiplies by; verl's are before batch
normalisation, and its extremes before truncation at the sequence level. rollout_rs_masked_fraction counts tokens of
weight 0, too; verl has IcePop's in rollout_is_oob_ratio. `eff_sample_size`, `agreement_p5` and
`rollout_rs_seq_dropped_fraction` are ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smd_jax.ratios import bounded_exp, effective_sample_size, log_ratio_inside, lower_percentile, masked_mean

# Names; docs/monitoring.md has their meanings. Sampler and learner are compared before any correction.
SAMPLER_LEARNER_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/token_ratio/min",
    "sampling/token_ratio/mean",
    "sampling/token_ratio/max",
    "mismatch_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq",
    "rollout_corr/eff_sample_size",
    "rollout_corr/agreement_p5",
)
CORRECTION_METRICS = (
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_min",
    "rollout_corr/rollout_is_max",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction",
    "rollout_corr/rollout_rs_seq_dropped_fraction",
)
# Of one optimizer step; `smd_jax.train.minibatches.over_steps` weights the other metrics by them. Not logged.
STEP_WEIGHTS = ("update/tokens", "update/learns")


def sampler_learner_metrics(
    sampler_logprobs: Float[Array, "batch response"],
    learner_logprobs: Float[Array, "batch response"],
    mask: Bool[Array, "batch response"],
) -> dict[str, Float[Array, ""]]:
    """Difference of the learner and the policy that sampled, before any update and any correction.

    Args:
      sampler_logprobs, learner_logprobs: log-probability of each sampled token, nats.
      mask: the tokens that count. Without any, the differences, divergences and `mismatch_kl` are 0, the others 1.

    Returns:
      `SAMPLER_LEARNER_METRICS`; `mismatch_kl` is the mean of `ratio - 1 - log ratio`, ratio = p_learner / p_sampler.
      TRL's sampling/importance_sampling_ratio is the ratio after truncation; here the weights that a correction applies
      are `rollout_corr/rollout_is_*`.
    """
    delta = log_ratio_inside(learner_logprobs, sampler_logprobs, mask)
    ratio, bounded_ratio = jnp.exp(delta), bounded_exp(delta)
    of_response = bounded_exp(delta.sum(axis=1))
    # Outside the mask the ratio is 1, which must not count as an extreme.
    empty = ~mask.any()
    return {
        "sampling/sampling_logp_difference/mean": token_mean(jnp.abs(delta), mask),
        "sampling/sampling_logp_difference/max": jnp.abs(delta).max(initial=0.0),
        "sampling/token_ratio/min": jnp.where(empty, 1.0, ratio.min(initial=jnp.inf, where=mask)),
        "sampling/token_ratio/mean": jnp.where(empty, 1.0, token_mean(ratio, mask)),
        "sampling/token_ratio/max": jnp.where(empty, 1.0, ratio.max(initial=0.0, where=mask)),
        # expm1 keeps the digits of small differences, which `ratio - 1` would lose.
        "mismatch_kl": token_mean(jnp.expm1(delta) - delta, mask),
        "rollout_corr/chi2_token": masked_mean(bounded_ratio**2, mask, empty=1.0) - 1.0,
        "rollout_corr/chi2_seq": masked_mean(of_response**2, mask.any(axis=1), empty=1.0) - 1.0,
        "rollout_corr/eff_sample_size": effective_sample_size(bounded_ratio, mask),
        "rollout_corr/agreement_p5": lower_percentile(jnp.minimum(bounded_ratio, 1.0), mask, 5.0),
    }


def completion_metrics(mask: Bool[Array, "batch response"], terminated: Bool[Array, " batch"]) -> dict[str, Array]:
    """Lengths of the completions.

    Args:
      mask: response tokens, EOS included.
      terminated: the completion ended with EOS rather than at the length limit.
    """
    lengths = mask.sum(axis=1).astype(jnp.float32)
    return {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1.0 - terminated.astype(jnp.float32).mean(),
    }


@jax.jit  # fused: a comparison for every key of every layer and head is never stored
def evicted_share(
    evicted_at: Int[Array, "batch layers kv_heads columns"], valid: Bool[Array, "batch columns"]
) -> Float[Array, ""]:
    """Share of tokens whose keys a `ShadowMask` evicts before the last query; mean over layers and KV heads."""
    columns = jnp.arange(valid.shape[1])
    last = jnp.where(valid, columns, 0).max(axis=1)
    evicted = jnp.mean(evicted_at <= last[:, None, None, None], axis=(1, 2))
    return token_mean(evicted, valid)


def reward_metrics(
    rewards: Float[Array, " batch"], group_size: int, rewarded_rows: Bool[Array, " batch"] | None = None
) -> dict[str, Array]:
    """Mean and spread of the rewards.

    Args:
      rewards: one per completion; the `group_size` completions of a prompt are contiguous.
      group_size: completions per prompt; with 1 every spread within a group is 0.
      rewarded_rows: `[batch]`, false for completions without a reward, which are ignored. None: all have one. Without
        any reward the means are NaN.

    Raises:
      ValueError: the batch is not a multiple of `group_size`.
    """
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"expected a multiple of group_size {group_size} rewards; got {rewards.shape[0]}")
    groups = rewards.reshape(-1, group_size)
    rewarded = jnp.ones(groups.shape, bool) if rewarded_rows is None else rewarded_rows.reshape(groups.shape)
    left = rewarded.sum(axis=1)
    # Equality, not a standard deviation near 0: the mean of equal floats may differ from them.
    highest = jnp.where(rewarded, groups, -jnp.inf).max(axis=1)
    lowest = jnp.where(rewarded, groups, jnp.inf).min(axis=1)
    # Groups without a reward are left out. Deviations use distances from one reward: exactly 0 for equal rewards.
    of_groups = (groups - highest[:, None]).std(axis=1, ddof=min(1, group_size - 1), where=rewarded)
    within = jnp.where(left > 1, of_groups, 0.0)
    of_batch = (groups - highest.max()).std(ddof=min(1, groups.size - 1), where=rewarded)
    return {
        "reward": groups.mean(where=rewarded),
        "reward_std": jnp.where(left.sum() > 1, of_batch, 0.0),
        "reward_std_within_group": within.mean(where=left > 0),
        "frac_reward_zero_std": (highest <= lowest).astype(jnp.float32).mean(),
    }


def step_weights(
    mask: Bool[Array, "batch response"], learns: Bool[Array, ""] | Int[Array, ""] | bool
) -> dict[str, Float[Array, ""]]:
    """`STEP_WEIGHTS` of an optimizer step.

    Args:
      mask: the counted tokens. learns: whether the step had something to learn from, or how many pairs.
    """
    return {"update/tokens": mask.sum().astype(jnp.float32), "update/learns": jnp.asarray(learns, jnp.float32)}


def token_mean(
    values: Float[Array, "batch response"] | Bool[Array, "batch response"], mask: Bool[Array, "batch response"]
) -> Float[Array, ""]:
    """Mean over the tokens in the mask, 0 without any. Values outside may be anything."""
    return masked_mean(values, mask, empty=0.0)


def correction_metrics(
    weights: Float[Array, "batch R"], counted: Bool[Array, "batch R"], mask: Bool[Array, "batch R"]
) -> dict[str, Float[Array, ""]]:
    """`CORRECTION_METRICS`: the effect of a correction on the tokens in `mask`.

    Statistics of weights are over all tokens, including rejected ones; without tokens they are 1. A token is rejected
    if it does not count or weighs 0.
    """
    # `lost` is inside the mask: a response is dropped where the two are equal.
    lost = mask & (~counted | (weights == 0))
    present = mask.any(axis=1)
    return {
        "rollout_corr/rollout_is_mean": masked_mean(weights, mask, empty=1.0),
        "rollout_corr/rollout_is_min": jnp.where(mask.any(), jnp.where(mask, weights, jnp.inf).min(), 1.0),
        "rollout_corr/rollout_is_max": jnp.where(mask.any(), jnp.where(mask, weights, -jnp.inf).max(), 1.0),
        "rollout_corr/rollout_is_eff_sample_size": effective_sample_size(weights, mask),
        "rollout_corr/rollout_rs_masked_fraction": masked_mean(lost, mask, empty=0.0),
        "rollout_corr/rollout_rs_seq_masked_fraction": masked_mean(lost.any(axis=1), present, empty=0.0),
        "rollout_corr/rollout_rs_seq_dropped_fraction": masked_mean((lost == mask).all(axis=1), present, empty=0.0),
    }
