"""Corrections that remove tokens or responses with a large mismatch from the loss.

Sources: verl is verl/trainer/ppo/rollout_corr_helper.py with the presets of verl/trainer/config/algorithm.py; slime is
slime/examples/train_infer_mismatch_helper/mis.py and mis.yaml, in the copy that Sparse-RL's repository trains with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from smd_jax.corrections.base import (
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    check_bounds,
    check_positive,
    log_mismatch,
    mismatch_ratio,
    rejecting,
)
from smd_jax.ratios import Level
from smd_jax.typed_fields import check_types


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
        check_bounds("low", self.low, "high", self.high)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        ratio = mismatch_ratio(inputs, self.level)
        # Above the token level all tokens of a response have one ratio, so they are kept or rejected together.
        return rejecting(inputs, (ratio >= self.low) & (ratio <= self.high))


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
        catastrophic = inputs.mask & (log_mismatch(inputs) < math.log(self.threshold))
        return rejecting(inputs, ~jnp.any(catastrophic, axis=1, keepdims=True))
