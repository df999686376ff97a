"""Policy losses of tokens, arrays in and `(loss, LossTerms)` out, and of sampled evictions.

A loss is a token weighting and a surrogate, two small frozen dataclasses, which a user can also write:

    loss = sum over tokens of  weights * (beta * KL - correction weights * surrogate(ratio, log-probability, advantage))

    counted tokens ─► LossConfig.weighting ────────┐
    log-probabilities, advantages, corrections ────┴─► LossInputs ─► policy_loss ─► (loss, LossTerms)

`smd_jax.losses.named` has losses by the names of their papers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice, check_instance
from smd_jax.losses.kl import KLEstimator, reference_kl
from smd_jax.losses.surrogates import Clip, Surrogate, SurrogateInputs, SurrogateTerms, Unclipped
from smd_jax.losses.weighting import TokenMean, TokenWeighting
from smd_jax.metrics import token_mean
from smd_jax.pytrees import PyTreeNode
from smd_jax.ratios import Level, at_level, bounded_exp, response_mean
from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy-gradient loss; the default is TRL's bnpo.

    Attributes:
      weighting: weight of each token, see `smd_jax.losses.weighting`.
      surrogate: term of each token in the objective, see `smd_jax.losses.surrogates`.
      ratio_level: "token": every token has its own ratio. "geometric": all tokens of a response have the geometric mean
        of theirs (GSPO, arXiv:2507.18071 eq. 7; TRL: importance_sampling_level="sequence").
      beta: coefficient of the KL to the reference policy; 0 needs no reference.
      kl_estimator: estimator of that KL from the sampled tokens, see `smd_jax.losses.kl.reference_kl`.
      use_bias_correction_kl: multiply the estimate by the ratio (TRL's name; DeepSeek-V3.2). Its gradient is then that
        of KL(policy ‖ reference), also for tokens of an older policy.
    """

    weighting: TokenWeighting = TokenMean()
    surrogate: Surrogate = Clip()
    ratio_level: Level = "token"
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        # Without "sequence", the product over a response, because such ratios grow with the length.
        check_choice("ratio_level", self.ratio_level, ("token", "geometric"))
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"expected a finite beta >= 0; got {self.beta}")
        # Unused options are refused rather than ignored.
        if self.beta == 0 and (self.kl_estimator != "k3" or self.use_bias_correction_kl):
            raise ValueError(
                f"expected beta > 0 with a KL estimator; got beta 0 and kl_estimator "
                f"{self.kl_estimator!r}, use_bias_correction_kl {self.use_bias_correction_kl}"
            )
        if self.use_bias_correction_kl and self.kl_estimator != "k3":
            raise ValueError(
                f"expected kl_estimator 'k3' with use_bias_correction_kl, because k1 and k2 have the gradient of the "
                f"KL already; got {self.kl_estimator!r}"
            )

    def unclipped(self) -> LossConfig:
        """The same loss of r A, for corrections with a trust region (`CorrectionTraits.clips`)."""
        return dataclasses.replace(self, surrogate=Unclipped())


class LossInputs(PyTreeNode):
    """Inputs of a policy loss, float32 or wider, `[batch, R]`.

    Attributes:
      logprobs: log-probabilities of the trained policy, in nats; the only input with a gradient.
      old_logprobs: of the policy in the denominator of the ratio.
      reference_logprobs: of the reference policy; None if beta is 0.
      advantages: `[batch]`, or `[batch, R]` with one per token (PPO).
      weights: weight of each token, from a `TokenWeighting` over the counted tokens; 0 outside the response and for
        rejected tokens. It is also the mask: where it is 0, the other arrays may hold any value, and so may the
        advantage of a response with only zero weights.
      correction_weights: factor of each token's surrogate, such as truncated importance weights; None: all 1.
    """

    logprobs: Float[Array, "batch R"]
    old_logprobs: Float[Array, "batch R"]
    reference_logprobs: Float[Array, "batch R"] | None
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    weights: Float[Array, "batch R"]
    correction_weights: Float[Array, "batch R"] | None = None


class LossTerms(PyTreeNode):
    """Per-token terms for the metrics, `[batch, R]`.

    Attributes:
      ratio: new over old probability, at the level "geometric" that of the response; 1 where the weight is 0.
      kl: estimate of KL(policy ‖ reference), zeros without a reference.
      surrogate: metrics of the surrogate by name, 0 where the weight is 0; see `surrogate_metrics`.
    """

    ratio: Float[Array, "batch R"]
    kl: Float[Array, "batch R"]
    surrogate: dict[str, Array]


def policy_loss(inputs: LossInputs, config: LossConfig) -> tuple[Float[Array, ""], LossTerms]:
    """`sum(weights * (beta * KL - correction_weights * surrogate))`.

    Corrections multiply only the surrogate, not the KL, and do not change the denominators, as in TRL. Log ratios are
    cut at -20 and 20 as in verl (verl/trainer/ppo/core_algos.py), to avoid overflow; there is no gradient beyond.

    Raises:
      ValueError: if shapes differ from that of the log-probabilities, or if beta is positive without reference
        log-probabilities.
    """
    check_shape("logprobs", inputs.logprobs, ("batch", "R"))
    shape = inputs.logprobs.shape
    check_shape("advantages", inputs.advantages, shape[:1], shape)
    for name in ("old_logprobs", "reference_logprobs", "weights", "correction_weights"):
        check_shape(name, getattr(inputs, name), shape)
    # Weights are never negative, so weight 0 is the mask.
    inside = inputs.weights > 0
    # One advantage per response is not masked per token.
    of_tokens = inputs.advantages.ndim == 2
    advantages = inputs.advantages if of_tokens else inputs.advantages[:, None]
    advantages = jnp.where(inside if of_tokens else inside.any(axis=1, keepdims=True), advantages, 0.0)
    # Where the weight is 0 the arrays may hold any value. They are masked before any arithmetic: a `where` after an
    # overflowing exp still gives NaN gradients.
    logprobs = jnp.where(inside, inputs.logprobs, 0.0)
    log_ratio = logprobs - jnp.where(inside, inputs.old_logprobs, 0.0)
    # The mean of a response fills all columns; columns outside get their ratio of 1 back.
    log_ratio = jnp.where(inside, at_level(log_ratio, inside, config.ratio_level), 0.0)
    ratio = bounded_exp(log_ratio)

    surrogate = config.surrogate.terms(SurrogateInputs(ratio, logprobs, advantages))
    _check_surrogate(f"{type(config.surrogate).__name__}.terms", surrogate, shape)
    objective = jnp.where(inside, surrogate.objective, 0.0)
    if inputs.correction_weights is not None:
        # Those of rejected tokens may hold any value.
        objective = objective * jax.lax.stop_gradient(jnp.where(inside, inputs.correction_weights, 0.0))
    kl = jnp.zeros_like(logprobs)
    if config.beta > 0:
        if inputs.reference_logprobs is None:
            raise ValueError(f"expected reference log-probabilities, because beta is {config.beta}; got None")
        reference = jnp.where(inside, inputs.reference_logprobs, 0.0)
        kl = reference_kl(logprobs, reference, config.kl_estimator)
    if config.use_bias_correction_kl:
        kl = ratio * kl
    loss = jnp.sum(inputs.weights * (config.beta * kl - objective))

    metrics = {name: jnp.where(inside, x, jnp.zeros_like(x)) for name, x in surrogate.metrics.items()}
    return loss, jax.lax.stop_gradient(LossTerms(ratio, kl, metrics))


def _check_surrogate(name: str, found: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless a surrogate gave an objective and metrics of every token."""
    check_instance(f"the result of {name}", found, SurrogateTerms)
    check_instance(f"the metrics of {name}", found.metrics, dict)
    for what, values in {"objective": found.objective, **found.metrics}.items():
        if values is None:
            raise TypeError(f"expected {what} of {name} as an array {list(shape)}; got None")
        check_shape(f"{what} of {name}", values, shape)


def surrogate_metrics(
    terms: LossTerms,
    counted: Bool[Array, "batch R"],
    config: LossConfig,
    counted_rows: Bool[Array, " batch"] | None = None,
) -> dict[str, Array]:
    """Metrics of the surrogate as means over the counted tokens; 0 without any.

    If ratios belong to responses they are means over responses, as in TRL: a long response is clipped once, like a
    short one. A response without counted tokens counts as not clipped, as in TRL. `counted_rows` leaves out rows as in
    a `TokenWeighting`.
    """
    if config.ratio_level == "token":
        return {name: token_mean(x, counted) for name, x in terms.surrogate.items()}
    # Two steps: the mean over the counted tokens of each response, then over responses.
    rows = jnp.ones(counted.shape[0], bool) if counted_rows is None else counted_rows
    means = {name: response_mean(jnp.where(counted, x, 0.0), counted) for name, x in terms.surrogate.items()}
    return {name: token_mean(x, rows[:, None]) for name, x in means.items()}


def eviction_weights(
    counted: Bool[Array, "batch compressions"], mask: Bool[Array, "batch R"]
) -> Float[Array, "batch compressions"]:
    """Weights of sampled evictions. An eviction is an action, like a token, so each draw has the weight of a token in a
    mean over the minibatch. With the default token weighting and a coefficient of 1, the sum of both losses has the
    gradient of one policy over tokens and evictions.

    Args:
      counted: draws with a later token in their row.
      mask: counted response tokens; draws of a row without any get weight 0.
    """
    learns = counted & mask.any(axis=1, keepdims=True)
    return learns.astype(jnp.float32) / jnp.maximum(mask.sum(), 1).astype(jnp.float32)


def eviction_loss(
    logprobs: Float[Array, "batch layers kv_heads compressions"],
    sampler_logprobs: Float[Array, "batch layers kv_heads compressions"],
    advantages: Float[Array, " batch"],
    weights: Float[Array, "batch compressions"],
) -> Float[Array, ""]:
    """-sum of weight * min(r A, clip(r, 0.8, 1.2) A), with the bounds of `Clip()` and the ratio r of the draws of one
    compression, layer and KV head. At the sampler's parameters r is 1, and the gradient is REINFORCE's.

    Args:
      advantages: of the responses.
      weights: of the draws; where 0, the other arrays may hold any value.
    """
    check_shape("advantages", advantages, logprobs.shape[:1])
    inside = (weights > 0)[:, None, None]
    # Masked before any arithmetic: a NaN times a weight of 0 is NaN.
    log_ratio = jnp.where(inside, logprobs, 0.0) - jax.lax.stop_gradient(jnp.where(inside, sampler_logprobs, 0.0))
    ratio = bounded_exp(log_ratio)  # a product over up to `buffer` draws
    gain = jnp.where(inside, advantages[:, None, None, None], 0.0)
    surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, *Clip().bounds) * gain)
    return -jnp.sum(weights[:, None, None] * surrogate)
