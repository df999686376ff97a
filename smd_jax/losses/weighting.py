"""Token weightings: the weight of each token in a loss.

The weights are computed from the mask of the whole minibatch (one optimizer step) before it is split. So the sum over
microbatches, in any split and on any number of devices, is the loss of the minibatch. Two denominators of TRL differ:

* bnpo divides by the tokens of each microbatch, so its loss depends on the microbatch size. Without accumulation it is
  ours.
* dapo and cispo divide by the mean over the steps of a rollout. Their loss is ours times tokens of the step / mean
  tokens of a step. With one step per rollout it is ours.

To add one, write a frozen dataclass with `weights`, in any file.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class TokenWeighting:
    """Base of all weightings: a frozen, hashable dataclass, usable as a static argument."""

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        """The weight of each token in the loss.

        Args:
          mask: the tokens that the loss averages over, `[batch, R]`.
          counted_rows: `[batch]` false for rows that are not part of the minibatch, such as groups without signal under
            dynamic sampling; their tokens are outside the mask. Other rows count even if a correction or the length
            limit removed all their tokens, as in TRL, verl and slime. None: all rows count.

        Returns:
          float32 `[batch, R]`, 0 outside the mask.
        """
        raise TypeError(f"{type(self).__name__} has no weights: its class must define them")


@dataclass(frozen=True)
class TokenMean(TokenWeighting):
    """The mean over all tokens of the minibatch: DAPO (arXiv:2503.14476 eq. 8), TRL's bnpo and cispo."""

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        tokens = _numbers(mask, counted_rows)
        # At least 1, to avoid 0 / 0 without tokens.
        return tokens / jnp.maximum(tokens.sum(), 1.0)


@dataclass(frozen=True)
class SequenceMean(TokenWeighting):
    """The mean over sequences of the mean over a sequence's tokens: GRPO (arXiv:2402.03300 eq. 3)."""

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        tokens = _numbers(mask, counted_rows)
        # At least 1, to avoid 0 / 0. A sequence without tokens counts in the mean over sequences.
        return tokens / (jnp.maximum(tokens.sum(1, keepdims=True), 1.0) * _rows(mask, counted_rows))


@dataclass(frozen=True)
class FixedLength(TokenWeighting):
    """The sum over tokens / (sequences * max_length): Dr. GRPO (arXiv:2503.20783), independent of the length.

    Attributes:
      max_length: longest response, in tokens; None: the columns of the mask, which in a Trajectory are the longest
        response allowed. A loop sets it, because its learner may use fewer columns.
    """

    max_length: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"expected max_length >= 1, or None for the columns of the mask; got {self.max_length}")

    def weights(
        self, mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None = None
    ) -> Float[Array, "batch R"]:
        tokens = _numbers(mask, counted_rows)
        length = mask.shape[1] if self.max_length is None else self.max_length
        return tokens / (_rows(mask, counted_rows) * length)


def _numbers(mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None) -> Float[Array, "batch R"]:
    """1 and 0 for tokens inside and outside the mask, after checks of both shapes."""
    check_shape("mask", mask, ("batch", "R"))
    check_shape("counted_rows", counted_rows, (mask.shape[0],))
    return mask.astype(jnp.float32)


def _rows(mask: Bool[Array, "batch R"], counted_rows: Bool[Array, " batch"] | None) -> int | Array:
    """Number of sequences in the minibatch; at least 1, to avoid a division by 0."""
    return mask.shape[0] if counted_rows is None else jnp.maximum(counted_rows.sum(), 1)
