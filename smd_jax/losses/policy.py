"""Policy losses: arrays in, `(loss, LossTerms)` out. No model inside; three numbers are enough to test them.

Every loss is a weighted sum over tokens, `sum(weights * per_token)`. The weights are made from the whole batch at once,
so the sum over microbatches, in any split and on any number of devices, is the loss of the batch.

    mask ─ mask_truncated_completions ─► token_weights ─┐
    log-probabilities, advantages, corrections ─────────┴─► LossInputs ─► policy_loss ─► (loss, LossTerms)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice
from smd_jax.pytrees import any_leaves
from smd_jax.ratios import SAFETY_BOUND, bounded_exp, response_mean

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class LossConfig:
    """The policy-gradient loss, with the names of TRL's GRPOConfig.

    Attributes:
      loss_type: how tokens are weighted, see `token_weights`; "cispo" has a surrogate of its own, see `policy_loss`.
      epsilon: the ratio is clipped from below at `1 - epsilon`; cispo has no lower bound. epsilon_high: from above at
        `1 + epsilon_high`; None takes `epsilon`. So it is for cispo too, as MiniMax-M1 writes it (arXiv:2506.13585
        eq. 5); TRL means the bound itself there, so that its epsilon_high 5.0 is our 4.0.
      beta: coefficient of the k3 KL to the reference policy; 0 needs no reference.
      importance_sampling_level: "token": every token has its own ratio. "sequence": all tokens of a sequence have the
        geometric mean of theirs (GSPO, arXiv:2507.18071 eq. 7; there with loss_type "grpo", epsilon 3e-4 and
        epsilon_high 4e-4).
      delta: dual clip: where the advantage is negative, the ratio has no gradient above this (arXiv:1912.09729,
        INTELLECT-2 arXiv:2505.07291); None: no such bound. Not for cispo, whose ratio is bounded for either sign.
    """

    loss_type: LossType = "bnpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    importance_sampling_level: Level = "token"
    delta: float | None = None

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, get_args(LossType))
        check_choice("importance_sampling_level", self.importance_sampling_level, get_args(Level))
        if not 0 < self.epsilon < 1:
            raise ValueError(f"expected 0 < epsilon < 1; got {self.epsilon}")
        if self.epsilon_high is not None and self.epsilon_high <= 0:
            raise ValueError(f"expected epsilon_high > 0; got {self.epsilon_high}")
        if self.beta < 0:
            raise ValueError(f"expected beta >= 0; got {self.beta}")
        if self.delta is not None and self.loss_type == "cispo":
            raise ValueError(f"expected delta None with loss_type 'cispo', which bounds the ratio; got {self.delta}")
        if self.delta is not None and self.delta <= self.bounds[1]:
            raise ValueError(f"expected delta above the upper bound {self.bounds[1]} of the ratio; got {self.delta}")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio that still has a gradient; for cispo, 0 and the highest weight."""
        high = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        return (0.0 if self.loss_type == "cispo" else 1 - self.epsilon), high

    @property
    def clips_tokens(self) -> bool:
        """Whether the ratio of every token is clipped by itself: cispo clips a weight, GSPO the ratio of a sequence."""
        return self.loss_type != "cispo" and self.importance_sampling_level == "token"

    @property
    def clips_plainly(self) -> bool:
        """Whether the only thing between ratio and surrogate is PPO's clipping."""
        return self.clips_tokens and self.delta is None


@any_leaves
class LossInputs(struct.PyTreeNode):
    """What a policy loss looks at; all float32 (or wider) `[batch, response]`.

    Attributes:
      logprobs: of the policy being trained; the only input with a gradient.
      old_logprobs: of the policy that the ratio is taken to.
      reference_logprobs: of the reference policy; None where beta is 0.
      advantages: `[batch]`, or `[batch, response]` where every token has its own (PPO).
      weights: weight of each token in the loss, made by `token_weights` from the tokens that stay in it: 0 outside the
        response and where a correction rejects a token. Also the mask: what weighs 0 may be anything.
      correction_weights: factor of each token's surrogate that corrects for the sampler being another policy, such as
        truncated importance weights; None: all 1.
      high_scale: factor of the upper bound of each token's ratio, where a correction has one; None: all 1.
    """

    logprobs: Float[Array, "batch response"]
    old_logprobs: Float[Array, "batch response"]
    reference_logprobs: Float[Array, "batch response"] | None
    advantages: Float[Array, " batch"] | Float[Array, "batch response"]
    weights: Float[Array, "batch response"]
    correction_weights: Float[Array, "batch response"] | None = None
    high_scale: Float[Array, "batch response"] | None = None


@any_leaves
class LossTerms(struct.PyTreeNode):
    """Per-token terms for the metrics, `[batch, response]`.

    Attributes:
      ratio: new over old probability, at the sequence level that of the sequence; 1 outside the response and where a
        token is rejected.
      kl: k3 estimate of KL(policy ‖ reference), zeros without a reference.
      clipped_low, clipped_high: where the bounds of the ratio took the gradient away; for cispo, where the upper bound
        cut the weight of a token with a positive advantage, as TRL counts. `delta` is not counted.
    """

    ratio: Float[Array, "batch response"]
    kl: Float[Array, "batch response"]
    clipped_low: Bool[Array, "batch response"]
    clipped_high: Bool[Array, "batch response"]


def mask_truncated_completions(
    mask: Bool[Array, "batch response"], terminated: Bool[Array, " batch"]
) -> Bool[Array, "batch response"]:
    """The response mask without completions that the length limit cut off (overlong filtering, arXiv:2503.14476).

    Their reward says little about the tokens that stand there. Apply it before `token_weights`: then truncated tokens
    count in no denominator, while their rows still count as sequences of grpo and dr_grpo; both as in TRL.
    """
    return mask & terminated[:, None]


def token_weights(
    mask: Bool[Array, "batch response"],
    loss_type: LossType,
    max_length: int | None = None,
    counts: Bool[Array, " batch"] | None = None,
) -> Float[Array, "batch response"]:
    """Each token's weight in the loss, made from the mask of the whole batch; weights outside the mask are 0.

    grpo               mean over sequences of the mean over a sequence's tokens (arXiv:2402.03300 eq. 3)
    dapo, bnpo, cispo  mean over all tokens of the batch (arXiv:2503.14476 eq. 8)
    dr_grpo            sum over tokens / (sequences * max_length) (arXiv:2503.20783); by default max_length is the
                       columns of the mask, which in a Trajectory are the longest response allowed

    `counts`, `[batch]`, is false for rows that are no sequences of the batch at all, such as groups without signal that
    dynamic sampling drops; their tokens must be outside the mask. All other rows count, also those that a correction
    or the length limit has emptied: as in TRL, verl and slime.

    The batch is what one optimizer step sees, in however many microbatches. Two of TRL's denominators are others by
    design: bnpo's are the tokens of each microbatch, so that its loss depends on their size and becomes ours (dapo's)
    without accumulation; those of dapo and cispo are the mean over the steps of a rollout, so that its loss is ours
    times tokens of the step / mean tokens of a step, and ours where a rollout feeds one step.

    An empty sequence weighs nothing; if all are empty, all weights are 0.

    Raises:
      ValueError: if there is no such loss type, or max_length is below 1 or given to another loss than dr_grpo.
    """
    check_choice("loss_type", loss_type, get_args(LossType))
    if max_length is not None and (loss_type != "dr_grpo" or max_length < 1):
        raise ValueError(f"expected max_length >= 1, with dr_grpo alone; got {max_length} with {loss_type}")
    tokens = mask.astype(jnp.float32)
    rows = mask.shape[0] if counts is None else jnp.maximum(counts.sum(), 1)
    if loss_type == "grpo":
        return tokens / (jnp.maximum(tokens.sum(1, keepdims=True), 1.0) * rows)
    if loss_type == "dr_grpo":
        return tokens / (rows * (mask.shape[1] if max_length is None else max_length))
    return tokens / jnp.maximum(tokens.sum(), 1.0)


def k3(logprobs: Float[Array, ...], reference_logprobs: Float[Array, ...]) -> Float[Array, ...]:
    """Schulman's k3 estimate of KL(policy ‖ reference) from tokens of the policy: never negative, low variance.

    The log ratio is cut at 20 (as in verl), where the estimate is 485 million: no gradient beyond, but no overflow.
    """
    log_ratio = jnp.minimum(reference_logprobs - logprobs, SAFETY_BOUND)
    return jnp.exp(log_ratio) - 1.0 - log_ratio


def policy_loss(inputs: LossInputs, config: LossConfig, clip: bool = True) -> tuple[Float[Array, ""], LossTerms]:
    """`sum(weights * (beta * k3 - correction * surrogate))`, A the advantage and r the ratio of new to old probability:

    surrogate        min(r A, clip(r) A), PPO's (arXiv:1707.06347 eq. 7), with r at most `delta` where A < 0
    cispo surrogate  sg(min(r, high)) A log p: clipped weights, but no token loses its gradient (arXiv:2506.13585 eq. 4)

    Corrections multiply the surrogate alone, not the KL, and do not change the denominators, as in TRL. The log of a
    ratio is cut at -20 and 20, as in verl (verl/trainer/ppo/core_algos.py): no gradient beyond, but no overflow.

    With `clip` false the surrogate is r A, for corrections that bring a trust region of their own.

    Raises:
      ValueError: if beta is positive and there are no reference log-probabilities, or if bounds of single tokens are
        scaled and the loss does not clip those.
    """
    advantages = inputs.advantages[:, None] if inputs.advantages.ndim == 1 else inputs.advantages
    # Outside the response the log-probabilities mean nothing and may be anything. They are replaced before any
    # arithmetic: a `where` after an exp that overflows would still give NaN gradients.
    inside = inputs.weights > 0
    logprobs = jnp.where(inside, inputs.logprobs, 0.0)
    log_ratio = logprobs - jnp.where(inside, inputs.old_logprobs, 0.0)
    if config.importance_sampling_level == "sequence":
        log_ratio = response_mean(log_ratio, inside)
    ratio = bounded_exp(jnp.where(inside, log_ratio, 0.0))
    low, high = config.bounds[0], _upper_bound(inputs.high_scale, inside, config)
    surrogate = _surrogate(ratio, logprobs, advantages, high, config) if clip else ratio * advantages
    surrogate = _corrected(surrogate, inputs.correction_weights, inside)
    kl = _reference_kl(logprobs, inputs.reference_logprobs, inside, config.beta)
    loss = jnp.sum(inputs.weights * (config.beta * kl - surrogate))
    clipped_low = inside & clip & (ratio < low) & (advantages < 0)
    clipped_high = inside & clip & (ratio > high) & (advantages > 0)
    return loss, jax.lax.stop_gradient(LossTerms(ratio, kl, clipped_low, clipped_high))


def _upper_bound(
    high_scale: Float[Array, "batch response"] | None, inside: Bool[Array, "batch response"], config: LossConfig
) -> float | Float[Array, "batch response"]:
    """The highest ratio of each token that still has a gradient."""
    high = config.bounds[1]
    if high_scale is None:
        return high
    if not config.clips_tokens:
        raise ValueError(
            f"expected a loss that clips the ratio of single tokens, whose bounds a correction scales; got {config}"
        )
    return high * jax.lax.stop_gradient(jnp.where(inside, high_scale, 1.0))


def _surrogate(
    ratio: Float[Array, "batch response"],
    logprobs: Float[Array, "batch response"],
    advantages: Float[Array, "batch _"],
    high: float | Float[Array, "batch response"],
    config: LossConfig,
) -> Float[Array, "batch response"]:
    """What each token adds to the objective, before corrections."""
    if config.loss_type == "cispo":
        return jax.lax.stop_gradient(jnp.minimum(ratio, high)) * advantages * logprobs
    if config.delta is not None:
        ratio = jnp.where(advantages < 0, jnp.minimum(ratio, config.delta), ratio)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, config.bounds[0], high) * advantages)


def _corrected(
    surrogate: Float[Array, "batch response"],
    correction_weights: Float[Array, "batch response"] | None,
    inside: Bool[Array, "batch response"],
) -> Float[Array, "batch response"]:
    """The surrogate times its correction, 0 where a token is rejected; weights there may be anything."""
    if correction_weights is None:
        return jnp.where(inside, surrogate, 0.0)
    return surrogate * jax.lax.stop_gradient(jnp.where(inside, correction_weights, 0.0))


def _reference_kl(
    logprobs: Float[Array, "batch response"],
    reference_logprobs: Float[Array, "batch response"] | None,
    inside: Bool[Array, "batch response"],
    beta: float,
) -> Float[Array, "batch response"]:
    if beta == 0:
        return jnp.zeros_like(logprobs)
    if reference_logprobs is None:
        raise ValueError(f"expected reference log-probabilities, because beta is {beta}; got None")
    return k3(logprobs, jnp.where(inside, reference_logprobs, 0.0))
