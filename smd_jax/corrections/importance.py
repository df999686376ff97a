"""Corrections that weigh by the mismatch ratio: importance sampling, truncated or masked.

Sources: TRL is trl/trainer/grpo_trainer.py and grpo_config.py (1.16); verl is
verl/trainer/ppo/rollout_corr_helper.py with the presets of verl/trainer/config/algorithm.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice
from smd_jax.corrections.base import (
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    bounds_of,
    check_bounds,
    mismatch_ratio,
    weighing,
)
from smd_jax.ratios import Level
from smd_jax.typed_fields import check_types

LEVELS: tuple[Level, ...] = ("token", "sequence")


@dataclass(frozen=True)
class _ByRatio(Correction):
    """Weights by xi of a token or a response within bounds; subclasses define the weight outside."""

    level: Level = "token"
    clip_min: float | None = None
    clip_max: float | None = None

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)  # first, because the type allows more levels
        check_types(self)
        check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)

    @property
    def traits(self) -> CorrectionTraits:
        return CorrectionTraits(weighs=True)


@dataclass(frozen=True)
class TIS(_ByRatio):
    """Truncated importance sampling: the weight is xi, clamped to [clip_min, clip_max].

    TRL: vllm_importance_sampling_mode "token_truncate" | "sequence_truncate", clip_max 3. verl: rollout_is "token" |
    "sequence", threshold 2 (typically 1.5 to 5 and 2 to 10), rollout_is_batch_normalize. Tunix: sampler_is_threshold 2.

    Attributes:
      level: "token": xi of each token; "sequence": their product, one weight for all tokens of a response.
      clip_min, clip_max: bounds of the weight; None: no bound (without any: plain importance sampling).
      batch_normalize: then divide by the mean weight of the minibatch, over tokens ("token") or over responses with
        tokens ("sequence"). verl uses the mean of the whole rollout, Sparse-RL's release that of a microbatch.
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
        low, high = bounds_of(self.clip_min, self.clip_max)
        # Clamped first: otherwise one huge ratio would raise the mean and shrink all other weights.
        weights = jnp.clip(mismatch_ratio(inputs, self.level), low, high)
        if self.batch_normalize:
            weights = _normalize(weights, inputs.mask, self.level)
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
        low, high = bounds_of(self.clip_min, self.clip_max)
        ratio = mismatch_ratio(inputs, self.level)
        # Weight 0 keeps the token in the denominators, unlike `Rejection`.
        return weighing(inputs, jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0))


@dataclass(frozen=True)
class IcePop(MIS):
    """MIS of tokens with two bounds (ringtech.notion.site/icepop). verl: decoupled_token_icepop(5.0, 0.5)."""

    level: Level = "token"
    clip_min: float | None = 0.5
    clip_max: float | None = 5.0


def _normalize(weights: Float[Array, "batch R"], mask: Bool[Array, "batch R"], level: Level) -> Float[Array, "batch R"]:
    """Divides weights by their mean; unchanged if the mean is 0 (at most 1e-8, as in verl and slime)."""
    # At the sequence level all tokens of a response have one weight, so its first token represents it.
    counted = mask if level == "token" else mask & (jnp.cumsum(mask, axis=1) == 1)
    mean = jnp.where(counted, weights, 0.0).sum() / jnp.maximum(counted.sum(), 1)
    return weights / jnp.where(mean > 1e-8, mean, 1.0)
