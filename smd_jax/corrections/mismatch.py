"""Corrections by the mismatch ratio: importance weights, truncated or masked, and rejection of tokens or responses."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice
from smd_jax.corrections.base import (
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    check_positive,
    sampler_logprobs_of,
    weighing,
)
from smd_jax.ratios import Level, at_level, bounded_exp, log_ratio_inside, masked_mean
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class _ByRatio(Correction):
    """Weights by xi of a token or a response within bounds; subclasses define the weight outside."""

    level: Level = "token"
    clip_min: float | None = None
    clip_max: float | None = None
    traits = CorrectionTraits(weighs=True)

    def __post_init__(self) -> None:
        check_choice("level", self.level, ("token", "sequence"))  # first, because the type allows more levels
        check_types(self)
        _check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)


@dataclass(frozen=True)
class TIS(_ByRatio):
    """Truncated importance sampling: the weight is xi, clamped to [clip_min, clip_max].

    TRL: vllm_importance_sampling_mode "token_truncate" | "sequence_truncate", clip_max 3. verl: rollout_is "token" |
    "sequence", threshold 2 (typically 1.5 to 5 and 2 to 10), rollout_is_batch_normalize. Tunix: sampler_is_threshold 2.

    Attributes:
      level: "token": xi of each token; "sequence": their product, one weight for all tokens of a response.
      clip_min, clip_max: bounds of the weight; None: no bound (without any: plain importance sampling).
      batch_normalize: divide the weights by their mean in the minibatch, over tokens ("token") or over responses with
        tokens ("sequence"); no division by a mean of at most 1e-8, as in verl and slime. verl uses the mean of the
        whole rollout, Sparse-RL's release that of a microbatch.
    """

    level: Level = "token"
    clip_min: float | None = None
    clip_max: float | None = 2.0
    batch_normalize: bool = False

    @property
    def traits(self) -> CorrectionTraits:
        # Dividing by a mean over the minibatch makes its rows depend on each other.
        return dataclasses.replace(super().traits, whole_batch=self.batch_normalize)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # Clamped first: otherwise one huge ratio would raise the mean and shrink all other weights.
        weights = jnp.clip(_mismatch_ratio(inputs, self.level), self.clip_min, self.clip_max)
        if self.batch_normalize:
            mask = inputs.mask
            # At the sequence level all tokens of a response have one weight, so its first token represents it.
            counted = mask if self.level == "token" else mask & (jnp.cumsum(mask, axis=1) == 1)
            mean = masked_mean(weights, counted, empty=0.0)
            weights = weights / jnp.where(mean > 1e-8, mean, 1.0)
        return weighing(inputs, weights)


@dataclass(frozen=True)
class MIS(_ByRatio):
    """Masked importance sampling: the weight is xi inside [clip_min, clip_max] and 0 outside; None: no bound.

    TRL: vllm_importance_sampling_mode "token_mask" | "sequence_mask"; the default is the latter with clip_max 3. As in
    TRL, a masked token still counts in the denominators. verl's Seq-MIS removes it from them: that is
    `Chain((TIS("sequence"), Rejection("sequence", 0.5, 2.0)))`.
    """

    level: Level = "sequence"
    clip_min: float | None = None
    clip_max: float | None = 3.0

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        ratio = _mismatch_ratio(inputs, self.level)
        inside = ratio == jnp.clip(ratio, self.clip_min, self.clip_max)  # clipping changes no ratio inside
        return weighing(inputs, jnp.where(inside, ratio, 0.0))


@dataclass(frozen=True)
class IcePop(MIS):
    """MIS of tokens with two bounds (ringtech.notion.site/icepop). verl: decoupled_token_icepop(5.0, 0.5)."""

    level: Level = "token"
    clip_min: float | None = 0.5
    clip_max: float | None = 5.0


@dataclass(frozen=True)
class Rejection(Correction):
    """Rejects tokens with xi outside [low, high], or responses by the product or geometric mean of their xi.

    verl: rollout_rs "token_k1" | "seq_sum_k1" | "seq_mean_k1", the first two with 0.5 to 2. verl bounds 1 / xi, so its
    "low_high" is our [1 / high, 1 / low], which is the same for reciprocal bounds.
    """

    level: Level = "token"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        check_types(self)
        _check_bounds("low", self.low, "high", self.high)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        ratio = _mismatch_ratio(inputs, self.level)
        # Above the token level all tokens of a response have one ratio, so they are kept or rejected together.
        return _rejecting(inputs, (ratio >= self.low) & (ratio <= self.high))


@dataclass(frozen=True)
class GeometricRejection(Rejection):
    """Rejects responses whose geometric mean of xi is not close to 1, at any length. verl: decoupled_geo_rs()."""

    level: Level = "geometric"
    low: float = 0.999
    high: float = 1.001


@dataclass(frozen=True)
class Veto(Correction):
    """Rejects a response in which any token has xi < threshold. slime: rs_veto_threshold 1e-4, calculate_veto_mask."""

    threshold: float = 1e-4

    def __post_init__(self) -> None:
        check_types(self)
        check_positive("threshold", self.threshold)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # Logarithms are not cut at -20, so the threshold may be below exp(-20).
        catastrophic = inputs.mask & (_log_mismatch(inputs) < math.log(self.threshold))
        return _rejecting(inputs, ~jnp.any(catastrophic, axis=1, keepdims=True))


def _check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    for name, value in ((low_name, low), (high_name, high)):
        if value is not None:
            check_positive(name, value)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"expected {low_name} < {high_name}; got {low} and {high}")


def _rejecting(inputs: CorrectionInputs, acceptable: Bool[Array, "batch _"]) -> CorrectionTerms:
    """Terms with weights of 1 that reject tokens `[batch, R]` or whole responses `[batch, 1]`."""
    return CorrectionTerms(inputs.mask.astype(inputs.old_logprobs.dtype), inputs.mask & acceptable)


def _log_mismatch(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    """log xi of every token, 0 outside the response."""
    return log_ratio_inside(jax.lax.stop_gradient(inputs.old_logprobs), sampler_logprobs_of(inputs), inputs.mask)


def _mismatch_ratio(inputs: CorrectionInputs, level: Level) -> Float[Array, "batch R"]:
    """xi of every token, at the given level."""
    # Summed as logarithms and cut at ±20, so that a product over a long response cannot overflow.
    return bounded_exp(at_level(_log_mismatch(inputs), inputs.mask, level))
