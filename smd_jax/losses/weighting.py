"""Token weightings: how much each token weighs in a loss, which is a weighted sum over tokens.

The weights are made from the mask of the whole minibatch, that is of what one optimizer step sees, before it is split:
so the sum over microbatches, in any split and on any number of devices, is the loss of the minibatch. Two of TRL's
denominators are others by design: bnpo's are the tokens of each microbatch, so that its loss depends on their size and
becomes ours without accumulation; those of dapo and cispo are the mean over the steps of a rollout, so that its loss is
ours times tokens of the step / mean tokens of a step, and ours where a rollout feeds one step.

To add one: a frozen dataclass with `weights`, in any file.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class TokenWeighting:
    """Base of all weightings: a frozen dataclass, hashable, so that one can be a static argument."""

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        """The weight of each token in the loss.

        Args:
          mask: the tokens that the loss averages over, `[batch, R]`.
          counted_rows: `[batch]` false for rows that are no sequences of the minibatch at all, such as groups without
            signal that dynamic sampling drops; their tokens are outside the mask. All other rows count, also those that
            a correction or the length limit has emptied: as in TRL, verl and slime. None: all rows count.

        Returns:
          float32 `[batch, R]`, 0 outside the mask. A sequence without tokens weighs nothing.
        """
        raise TypeError(f"{type(self).__name__} has no weights: its class must define them")


@dataclass(frozen=True)
class TokenMean(TokenWeighting):
    """The mean over all tokens of the minibatch: DAPO (arXiv:2503.14476 eq. 8), TRL's bnpo and cispo."""

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        _check(mask, counted_rows)
        tokens = mask.astype(jnp.float32)
        # At least 1: a minibatch without tokens has weights of 0 and no NaN.
        return tokens / jnp.maximum(tokens.sum(), 1.0)


@dataclass(frozen=True)
class SequenceMean(TokenWeighting):
    """The mean over sequences of the mean over a sequence's tokens: GRPO (arXiv:2402.03300 eq. 3)."""

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        _check(mask, counted_rows)
        tokens = mask.astype(jnp.float32)
        # At least 1: a sequence without tokens gets 0 / 1 and no NaN, and counts in the mean over sequences.
        return tokens / (jnp.maximum(tokens.sum(1, keepdims=True), 1.0) * _rows(mask, counted_rows))


@dataclass(frozen=True)
class FixedLength(TokenWeighting):
    """The sum over tokens / (sequences * max_length): Dr. GRPO (arXiv:2503.20783), so that length has no influence.

    Attributes:
      max_length: longest response, in tokens; None: the columns of the mask, which in a rollout's Trajectory are the
        longest response allowed. A loop, whose learner runs over fewer, puts in that length itself.
    """

    max_length: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"expected max_length >= 1, or None for the columns of the mask; got {self.max_length}")

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        _check(mask, counted_rows)
        tokens = mask.astype(jnp.float32)
        length = mask.shape[1] if self.max_length is None else self.max_length
        return tokens / (_rows(mask, counted_rows) * length)


def _check(mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None) -> None:
    check_shape("mask", mask, ("batch", "R"))
    check_shape("counted_rows", counted_rows, (mask.shape[0],))


def _rows(mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None) -> int | Array:
    """How many sequences the minibatch has; 1 if none counts, so that nothing is divided by 0."""
    return mask.shape[0] if counted_rows is None else jnp.maximum(counted_rows.sum(), 1)
