"""Distillation: a divergence between the policy with its full context (dense) and under the mask (shadow).

For the forward passes see `smd_jax/learner/distill.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.config import check_choice
from smd_jax.ratios import SAFETY_BOUND
from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types

Direction = Literal["forward", "reverse", "published", "anchor", "ema"]
Estimator = Literal["exact", "k1", "k2", "k3"]

# Directions whose teacher is the reference policy.
REFERENCE_TEACHERS: tuple[Direction, ...] = ("anchor", "ema")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation between dense and masked policy, `loss = policy_loss(masked) + coef * D`.

    Attributes:
      direction: which divergence; sg is stop-gradient.
        "forward"    KL(sg(dense) ‖ shadow): the full-context policy teaches the masked one, covering its modes
        "reverse"    KL(shadow ‖ sg(dense)): the same teacher, mode-seeking
        "published"  KL(dense ‖ sg(shadow)): as the paper's repository states it; pulls the dense policy to the sparse
                     one, and is the only one with a backward pass through the dense forward
        "anchor"     KL(sg(reference dense) ‖ shadow): the teacher is the frozen reference with its full context
        "ema"        the same with a reference that follows the policy (`UpdateConfig.reference_sync`)
      coef: weight of the divergence in the loss; never negative.
      fraction: distill_fraction, the share of the rows that get the dense forward pass, spread evenly over each
        microbatch and rotating from step to step; a whole number of its rows.
      estimator: "exact" sums over the vocabulary; "k1", "k2" and "k3" use only the sampled tokens. Their gradient is
        not always that of their value: see the table of `sampled_divergence`.
    """

    direction: Direction = "forward"
    coef: float = 0.1
    fraction: float = 1.0
    estimator: Estimator = "exact"

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("direction", self.direction, get_args(Direction))
        check_choice("estimator", self.estimator, get_args(Estimator))
        if not 0 <= self.coef < math.inf:
            raise ValueError(
                "expected a finite distillation coefficient >= 0, because a negative one would drive the two policies "
                f"apart; got {self.coef}"
            )
        if not 0 < self.fraction <= 1:
            raise ValueError(f"expected 0 < distill_fraction <= 1; got {self.fraction}")


# --- exact divergences


def kl_divergence(p_logits: Float[Array, "... vocab"], q_logits: Float[Array, "... vocab"]) -> Float[Array, ...]:
    """KL(p ‖ q) in nats, exact over the vocabulary."""
    check_shape("q_logits", q_logits, p_logits.shape)
    p = jax.nn.log_softmax(p_logits, axis=-1)
    q = jax.nn.log_softmax(q_logits, axis=-1)
    # Logits of filtered tokens are very low but finite, so 0 * inf cannot occur.
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def divergence(
    dense_logits: Float[Array, "batch response vocab"],
    shadow_logits: Float[Array, "batch response vocab"],
    direction: Direction,
) -> Float[Array, "batch response"]:
    """The divergence of every token. For "anchor" and "ema" the dense logits are those of the reference."""
    if direction == "reverse":
        return kl_divergence(shadow_logits, jax.lax.stop_gradient(dense_logits))
    if direction == "published":
        return kl_divergence(dense_logits, jax.lax.stop_gradient(shadow_logits))
    return kl_divergence(jax.lax.stop_gradient(dense_logits), shadow_logits)


# --- estimates from the sampled tokens


def sampled_divergence(
    dense_logprobs: Float[Array, "batch response"],
    shadow_logprobs: Float[Array, "batch response"],
    direction: Direction,
    estimator: Literal["k1", "k2", "k3"],
) -> Float[Array, "batch response"]:
    """The divergence of every token, estimated from the sampled token (k1, k2, k3: joschu.net/blog/kl-approx.html).

    The token is sampled from the shadow policy s. d is the dense policy, or the reference for "anchor" and "ema" (both
    called anchor in the table), and rho = d(token) / s(token). The gradient of each estimate is its slope times that of
    the learner's log-probability: log d for "published", else log s.

        direction        estimator  value               on average    slope              on average the gradient of
        reverse          k1         -log rho            KL(s ‖ d)     -log rho           KL(s ‖ d)
                         k2         log² rho / 2        E[log²]/2     -log rho           KL(s ‖ d)
                         k3         rho - 1 - log rho   KL(s ‖ d)     1 - rho            KL(d ‖ s): that of forward
        forward, anchor  k1         rho log rho         KL(d ‖ s)     -rho               KL(d ‖ s)
                         k2         log² rho / 2        E[log²]/2     -log rho           KL(s ‖ d): that of reverse
                         k3         k1 - rho + 1        KL(d ‖ s)     1 - rho            KL(d ‖ s)
        published        k1         rho log rho         KL(d ‖ s)     rho (1 + log rho)  KL(d ‖ s)
                         k2         log² rho / 2        E[log²]/2     log rho            E[log²]/2
                         k3         k1 - rho + 1        KL(d ‖ s)     rho log rho        KL(d ‖ s)

    E[log²]/2 is the mean of log² rho / 2 under s, which equals both KLs to second order for close policies. k3 is never
    negative. If the policies agree, its slope is 0; that of k1 (except reverse) is ±1, which cancels only on average.

    The slopes are those of autodiff, except for k1 of reverse (autodiff: 1, which is 0 on average), and k1 and k3 of
    forward and anchor (autodiff ignores that s also samples the tokens). k1 and k2 of reverse are the policy gradient
    of verl's on-policy distillation (docs/algo/opd.md), k3 of reverse is GRPO's KL term (arXiv:2402.03300 eq. 4);
    arXiv:2506.09477 derives the gradients of these two.

    Like the exact divergence, this compares next tokens after the sampled prefixes; the effect of a token on later
    prefixes is ignored. So is staleness: the averages hold for tokens of the current shadow policy. If one rollout
    feeds several steps, no importance weight corrects the tokens of older policies; "exact" needs none.

    log rho is first cut at ±20, so that no value and no slope overflows; the slope keeps its sign there.
    """
    check_shape("dense_logprobs", dense_logprobs, ("batch", "R"))
    check_shape("shadow_logprobs", shadow_logprobs, dense_logprobs.shape)
    learner = dense_logprobs if direction == "published" else shadow_logprobs
    log_ratio = jax.lax.stop_gradient(jnp.clip(dense_logprobs - shadow_logprobs, -SAFETY_BOUND, SAFETY_BOUND))
    slope = _slope(log_ratio, direction, estimator)
    # The last factor is 0 with a gradient of 1: it does not change the value, and makes `slope` its gradient.
    return _value(log_ratio, direction, estimator) + slope * (learner - jax.lax.stop_gradient(learner))


def _value(
    log_ratio: Float[Array, "batch response"], direction: Direction, estimator: Literal["k1", "k2", "k3"]
) -> Float[Array, "batch response"]:
    """The third column of the table."""
    if estimator == "k2":
        return log_ratio**2 / 2
    reverse = direction == "reverse"
    k1 = -log_ratio if reverse else jnp.exp(log_ratio) * log_ratio
    excess = jnp.expm1(log_ratio)  # rho - 1, accurate where the policies are close
    if estimator == "k1":
        return k1
    return k1 + excess if reverse else k1 - excess


def _slope(
    log_ratio: Float[Array, "batch response"], direction: Direction, estimator: Literal["k1", "k2", "k3"]
) -> Float[Array, "batch response"]:
    """The fifth column of the table."""
    ratio = jnp.exp(log_ratio)
    if direction == "published":
        return {"k1": ratio * log_ratio + ratio, "k2": log_ratio, "k3": ratio * log_ratio}[estimator]
    if estimator == "k3":
        return -jnp.expm1(log_ratio)
    return -ratio if estimator == "k1" and direction != "reverse" else -log_ratio


# --- which rows


def teacher_rows(rows: int, fraction: float) -> int:
    """Number of the `rows` of a microbatch that get the dense forward pass.

    Raises:
      ValueError: if the fraction is not a whole number of rows, at least 1.
    """
    exact = fraction * rows
    # A product of floats is rarely exactly whole.
    if abs(exact - round(exact)) > 1e-6 or round(exact) < 1:
        raise ValueError(
            f"expected distill_fraction * rows of a microbatch to be a whole number >= 1; got {fraction} * {rows}"
        )
    return round(exact)


def spread(start: Int[Array, ""], size: int, count: int) -> Int[Array, " count"]:
    """`count` evenly spread indices of 0 … size-1, starting at `start` modulo `size`. Over `size` starts every index is
    chosen `count` times."""
    # NumPy computes the static offsets; only the start is traced.
    return (start + (np.arange(count) * size // count).astype(np.int32)) % size


def choose(config: DistillConfig, step: Int[Array, ""], rows: int) -> Int[Array, " chosen_rows"]:
    """Rows of a microbatch that get the divergence in a step; they rotate by one each step.

    Raises:
      ValueError: if the fraction is not a whole number of rows.
    """
    return spread(step, rows, teacher_rows(rows, config.fraction))
