"""What one optimizer step of GRPO, RLOO or PPO does, and which choices do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from smd_jax.config import check_choice
from smd_jax.corrections.base import Correction
from smd_jax.corrections.chain import flat_parts
from smd_jax.corrections.uncorrected import Shadow
from smd_jax.learner.accumulation import count_parts
from smd_jax.losses.distillation import DistillConfig, teacher_positions, teacher_rows
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig

Visibility = Literal["shadow", "dense"]


@dataclass(frozen=True)
class UpdateConfig:
    """One optimizer step.

    Attributes:
      visibility: "shadow" replays the sampler's mask in the learner, so that both are one policy; "dense" trains the
        full-context policy on the sparse sampler's tokens.
      loss: the policy loss.
      policy_coef: weight of the policy loss; 0 leaves distillation alone.
      correction: what is done about the mismatch between sampler and learner. `Shadow()` is the claim that there is
        none; every other one runs under either visibility, and has nothing to do under "shadow".
      distill: the second track, or None.
      value: PPO's critic, or None. It judges from the learner's hidden states, so it sees what the learner sees.
      reference_visibility: what the reference policy of the KL sees; None: what the learner sees.
      mask_truncated_completions: leave out responses that the length limit cut off.
      microbatch_size: rows of one forward and backward pass; gradients are summed over microbatches, in float32 or
        wider. None: all rows.
    """

    visibility: Visibility = "shadow"
    loss: LossConfig = LossConfig()
    policy_coef: float = 1.0
    correction: Correction = Shadow()
    distill: DistillConfig | None = None
    value: ValueConfig | None = None
    reference_visibility: Visibility | None = None
    mask_truncated_completions: bool = False
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        check_visibilities(self.visibility, self.reference_visibility)
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"expected microbatch_size >= 1; got {self.microbatch_size}")
        if self.distill is not None and self.visibility == "dense":
            raise ValueError("expected visibility 'shadow' with distillation, whose student is masked; got 'dense'")
        if self.policy_coef < 0 or (self.policy_coef == 0 and self.distill is None):
            raise ValueError(
                f"expected policy_coef > 0, or 0 with a distillation to learn from; got {self.policy_coef} and "
                f"distill {self.distill}"
            )
        if self.loss.beta > 0 and self.policy_coef == 0:
            raise ValueError(f"expected beta 0 with policy_coef 0, which takes the KL away too; got {self.loss.beta}")
        # An option that nothing reads is refused rather than ignored.
        if self.loss.beta == 0 and self.reference_visibility is not None:
            raise ValueError(f"expected beta > 0 with a reference_visibility; got 0 and {self.reference_visibility!r}")
        check_correction(self.correction, self.visibility)
        # Such a correction gets the loss without its surrogate (`policy_loss_of`): whatever else that does to the ratio
        # would be lost with the clipping.
        if not self.correction.traits.clips and not self.loss.clips_plainly:
            raise ValueError(
                f"expected the plain token ratio (Clip without delta, ratio_level 'token') with "
                f"{type(self.correction).__name__}, which replaces its clipping; got {self.loss}"
            )
        if self.correction.traits.scales_bounds and not self.loss.takes_high_scale:
            raise ValueError(
                f"expected a loss that clips the ratio of single tokens (Clip, ratio_level 'token') with "
                f"{type(self.correction).__name__}, which scales its bounds; got {self.loss}"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the train state must carry reference parameters."""
        return self.loss.beta > 0 or (self.distill is not None and self.distill.direction == "anchor")


def check_visibilities(visibility: str, reference_visibility: str | None) -> None:
    """Raises ValueError for names that are no visibility."""
    check_choice("visibility", visibility, get_args(Visibility))
    if reference_visibility is not None:
        check_choice("reference_visibility", reference_visibility, get_args(Visibility))


def check_correction(correction: Correction, visibility: Visibility) -> None:
    """Raises ValueError for a claim that the learner's visibility does not keep."""
    if visibility == "dense" and any(isinstance(part, Shadow) for part in flat_parts(correction)):
        raise ValueError(
            "expected visibility 'shadow' with the correction Shadow(), which claims that sampler and learner see the "
            "same; got 'dense'. Name what to do about the mismatch: Naive() ignores it"
        )


def takes_sampler_for_old(config: UpdateConfig) -> bool:
    """Whether the log-probabilities that the sampler recorded stand for the learner's at the rollout's parameters.

    With shadow masks the two are the same, unless a correction is to measure that they are.
    """
    return config.visibility == "shadow" and not config.correction.traits.uses_mismatch


def check_rows_of(config: UpdateConfig, rows: int, columns: int) -> None:
    """Raises ValueError for a minibatch of `rows` responses of `columns` tokens that the configuration cannot split."""
    # Fractions are shares of a microbatch, because that is what one forward pass of the teacher sees.
    part = rows // count_parts(rows, config.microbatch_size)
    if config.distill is not None:
        # Called for their errors: neither a row nor a column is divided.
        teacher_rows(part, config.distill.fraction)
        teacher_positions(columns, config.distill.position_fraction)
