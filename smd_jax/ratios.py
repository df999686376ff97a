"""Ratios of two policies' probabilities, and means over masks: arithmetic shared by losses and metrics."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Level of a ratio: "token": each token has its own; "sequence": all tokens of a response have the product of theirs;
# "geometric": all have the geometric mean of theirs, which does not grow with the length.
Level = Literal["token", "sequence", "geometric"]

# |log ratio| is cut here before any exponential, as in verl and slime: exp(20) is 485 million.
SAFETY_BOUND = 20.0


def log_ratio_inside(
    logprobs: Float[Array, "batch R"], other_logprobs: Float[Array, "batch R"], mask: Bool[Array, "batch R"]
) -> Float[Array, "batch R"]:
    """log p / p_other inside the mask, 0 outside."""
    # Padding may hold infinities: replaced before any arithmetic spreads them.
    return jnp.where(mask, logprobs, 0.0) - jnp.where(mask, other_logprobs, 0.0)


def at_level(log_ratio: Float[Array, "batch R"], mask: Bool[Array, "batch R"], level: Level) -> Float[Array, "batch R"]:
    """Converts the tokens' log ratios, 0 outside the mask, to those of the level."""
    if level == "sequence":
        return jnp.broadcast_to(log_ratio.sum(axis=1, keepdims=True), log_ratio.shape)
    if level == "geometric":
        return jnp.broadcast_to(response_mean(log_ratio, mask), log_ratio.shape)
    return log_ratio


def bounded_exp(log_ratio: Float[Array, ...]) -> Float[Array, ...]:
    """exp, between exp(-20) and exp(20)."""
    return jnp.exp(jnp.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND))


def response_mean(values: Float[Array, "batch R"], mask: Bool[Array, "batch R"]) -> Float[Array, "batch 1"]:
    """Mean over the tokens of a response, 0 when it has none; `values` are 0 outside the mask."""
    return values.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def effective_sample_size(weights: Float[Array, "batch R"], mask: Bool[Array, "batch R"]) -> Float[Array, ""]:
    """(mean w)^2 / mean w^2 over the tokens in `mask`: the share of equally weighted tokens with the same variance.

    0 if all weights are 0, 1 without tokens.
    """
    mean = masked_mean(weights, mask, empty=1.0)
    square = masked_mean(weights**2, mask, empty=1.0)
    # The inner `where` keeps 0 / 0 out of the branch that is not taken.
    return jnp.where(square > 0, mean**2 / jnp.where(square > 0, square, 1.0), 0.0)


def overlap(p_logits: Float[Array, "... vocab"], q_logits: Float[Array, "... vocab"]) -> Float[Array, ...]:
    """1 - TV(p, q) = sum over the vocabulary of min(p, q), exact: the agreement of two policies at a token."""
    p = jax.nn.softmax(p_logits, axis=-1)
    q = jax.nn.softmax(q_logits, axis=-1)
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
    # Infinities sort tokens outside the mask after the last value.
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf).ravel())
    last = jnp.maximum(mask.sum() - 1, 0)
    rank = percent / 100.0 * last
    below = jnp.minimum(jnp.floor(rank).astype(jnp.int32), last)  # above 2**24 values, float32 rounds the rank
    low = ordered[below]
    high = ordered[jnp.minimum(below + 1, last)]
    # Without values in the mask both neighbours are inf, and their difference is NaN.
    return jnp.where(mask.any(), low + jnp.where(high > low, (high - low) * (rank - below), 0.0), 1.0)


def masked_mean(values: Float[Array, ...] | Bool[Array, ...], mask: Bool[Array, ...], empty: float) -> Float[Array, ""]:
    """Mean over the mask; `empty` for an empty mask. Values outside may be anything."""
    # Not a product with the mask: 0 * inf would be NaN.
    total = jnp.where(mask, values, 0.0).sum()
    return jnp.where(mask.any(), total / jnp.maximum(mask.sum(), 1), empty)
