"""What one optimizer step of GRPO, RLOO or PPO does, and which choices do not go together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from smd_jax.config import check_choice
from smd_jax.corrections.base import Correction
from smd_jax.corrections.chain import flat_parts, split_by_time
from smd_jax.corrections.uncorrected import Shadow
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.dense_learner import DenseLearner
from smd_jax.learner.reference import ReferenceSync
from smd_jax.losses.distillation import REFERENCE_TEACHERS, DistillConfig, teacher_positions, teacher_rows
from smd_jax.losses.entropy import check_quantile
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.typed_fields import check_types

Visibility = Literal["shadow", "dense"]


@dataclass(frozen=True)
class UpdateConfig:
    """One optimizer step.

    Attributes:
      visibility: "shadow" replays the sampler's mask in the learner, so that both are one policy; "dense" trains the
        full-context policy on the sparse sampler's tokens.
      loss: the policy loss.
      policy_coef: weight of the policy loss; 0 leaves distillation alone.
      entropy_coef: weight of the entropy bonus, `loss -= entropy_coef * mean entropy` in nats, whatever `policy_coef`
        is. The mean is over the tokens that count, those that a correction rejects included.
      top_entropy_quantile: share of the tokens that the policy loss learns from, those with the highest entropy
        (arXiv:2506.01939 has 0.2); 1: all. The KL acts on all tokens, the bonus on the share; denominators stay. The
        entropies are those that the sampler recorded, where it stands for the learner before the step
        (`takes_sampler_for_old`); others need a forward pass of their own.
      eviction_coef: weight of the policy loss of evictions (`smd_jax.losses.evictions`), for rollouts whose eviction
        policy draws from a gate, `smd.eviction.LearnedGate`; 1 weighs what is forgotten as tokens are. 0: the gate has
        no gradient.
      correction: what is done about the mismatch between sampler and learner. `Shadow()` is the claim that there is
        none; every other one runs under either visibility, and has nothing to do under "shadow".
      distill: the second track, or None. Under "dense" the student sees everything, and its teacher must be another
        policy: "anchor" or "ema".
      dense_learner: a dense learner on the same weights, or None; under "shadow" alone. Entropy bonus, distillation and
        metrics are those of the learner with shadow masks.
      value: PPO's critic, or None. It judges from the learner's hidden states, so it sees what the learner sees.
      reference_visibility: what the reference policy of the KL sees; None: what the learner sees.
      kl_in_reward: whether the KL, times `loss.beta`, is taken off the rewards instead of being added to the loss; see
        `smd_jax.losses.kl.kl_penalty`. It is then measured once a rollout, before its first step.
      reference_sync: how the reference follows the policy; None: it is frozen.
      mask_truncated_completions: leave out responses that the length limit cut off.
      microbatch_size: rows of one forward and backward pass; gradients are summed over microbatches, in float32 or
        wider. None: all rows.
      pack_columns: columns of a row that sequences share, see `smd_jax.learner.packed`; it must hold the longest one,
        and a microbatch then has `microbatch_size` such rows. None: one sequence a row, the rest of it padding.
      rows_per_prompt: rows after one another that have the same prompt, which the model then reads once for all of
        them, see `smd_jax.model.shared_prompt`; it must divide microbatch and group. 1: every row by itself.
    """

    visibility: Visibility = "shadow"
    loss: LossConfig = LossConfig()
    policy_coef: float = 1.0
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    eviction_coef: float = 0.0
    correction: Correction = Shadow()
    distill: DistillConfig | None = None
    dense_learner: DenseLearner | None = None
    value: ValueConfig | None = None
    reference_visibility: Visibility | None = None
    kl_in_reward: bool = False
    reference_sync: ReferenceSync | None = None
    mask_truncated_completions: bool = False
    microbatch_size: int | None = None
    pack_columns: int | None = None
    rows_per_prompt: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_visibilities(self.visibility, self.reference_visibility)
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"expected microbatch_size >= 1; got {self.microbatch_size}")
        # A dense student can be held to a reference, but from itself it learns nothing.
        teaches_itself = self.distill is not None and self.distill.direction not in REFERENCE_TEACHERS
        if self.visibility == "dense" and teaches_itself:
            raise ValueError(
                "expected visibility 'shadow' with distillation whose teacher is the dense policy itself, or a "
                f"direction of {REFERENCE_TEACHERS}; got 'dense' with {self.distill}"
            )
        self._check_evictions()
        if self.policy_coef < 0 or (self.policy_coef == 0 and self.distill is None and self.eviction_coef == 0):
            raise ValueError(
                f"expected policy_coef > 0, or 0 with a distillation or evictions to learn from; got "
                f"{self.policy_coef} and distill {self.distill}"
            )
        if self.loss.beta > 0 and self.policy_coef == 0:
            raise ValueError(f"expected beta 0 with policy_coef 0, which takes the KL away too; got {self.loss.beta}")
        self._check_entropy()
        self._check_reference()
        self._check_dense_learner()
        check_correction(self.correction, self.visibility)
        self._check_packing()
        self._check_shared_prompts()
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

    def _check_evictions(self) -> None:
        if not 0 <= self.eviction_coef < math.inf:
            raise ValueError(f"expected a finite eviction_coef >= 0; got {self.eviction_coef}")
        if self.eviction_coef > 0 and self.visibility == "dense":
            raise ValueError(
                "expected visibility 'shadow' with an eviction_coef, because the probability of an eviction is known "
                f"under the sampler's mask alone; got 'dense' with {self.eviction_coef}"
            )

    def _check_entropy(self) -> None:
        if not 0 <= self.entropy_coef < math.inf:
            raise ValueError(
                f"expected a finite entropy_coef >= 0, because a negative one would make the policy certain; "
                f"got {self.entropy_coef}"
            )
        check_quantile(self.top_entropy_quantile)
        if self.policy_coef == 0 and self.top_entropy_quantile < 1:
            raise ValueError(
                "expected top_entropy_quantile 1 with policy_coef 0, which leaves no policy loss to choose tokens for; "
                f"got {self.top_entropy_quantile}"
            )

    def _check_reference(self) -> None:
        """An option that nothing reads is refused rather than ignored."""
        if self.loss.beta == 0 and self.reference_visibility is not None:
            raise ValueError(f"expected beta > 0 with a reference_visibility; got 0 and {self.reference_visibility!r}")
        if self.kl_in_reward and self.loss.beta == 0:
            raise ValueError("expected beta > 0 with kl_in_reward; got 0")
        if self.kl_in_reward and self.loss.kl_estimator != "k1":
            raise ValueError(
                f"expected kl_estimator 'k1' with kl_in_reward, because as a reward no other estimate has the gradient "
                f"of the KL; got {self.loss.kl_estimator!r}"
            )
        direction = None if self.distill is None else self.distill.direction
        if self.reference_sync is not None and direction == "anchor":
            raise ValueError(
                "expected reference_sync None with distillation from the 'anchor', which is frozen; the direction "
                f"'ema' has a teacher that follows; got {self.reference_sync}"
            )
        if self.reference_sync is None and direction == "ema":
            raise ValueError(
                "expected a reference_sync with direction 'ema', whose teacher follows the policy; got None"
            )
        if self.reference_sync is not None and not self.needs_reference:
            raise ValueError(
                "expected beta > 0 or distillation in direction 'ema' with a reference_sync: else nothing looks "
                f"at a reference; got {self.reference_sync}"
            )

    def _check_packing(self) -> None:
        if self.pack_columns is None:
            return
        if self.pack_columns < 2 or self.microbatch_size is None:
            raise ValueError(
                f"expected pack_columns >= 2 with a microbatch_size, the rows of so many columns in one pass; got "
                f"{self.pack_columns} and {self.microbatch_size}"
            )
        late = split_by_time(self.correction)[1]
        of_responses = late is not None and (late.traits.per_response or late.traits.judges_responses)
        if self.loss.ratio_level != "token" or of_responses:
            raise ValueError(
                "expected pack_columns None with ratios of whole responses, or a correction that judges them, because "
                f"those that share a row have none of their own; got {self.pack_columns} with {self.loss} and "
                f"{self.correction}"
            )
        if self.distill is not None and (self.distill.fraction < 1 or self.distill.position_fraction < 1):
            raise ValueError(f"expected distillation of all rows and columns with pack_columns; got {self.distill}")
        if self.eviction_coef:
            raise ValueError(f"expected eviction_coef 0 with pack_columns; got {self.eviction_coef}")

    def _check_shared_prompts(self) -> None:
        rows = self.rows_per_prompt
        if rows < 1 or (self.microbatch_size is not None and self.microbatch_size % rows):
            raise ValueError(
                f"expected rows_per_prompt >= 1 that divide microbatch_size {self.microbatch_size}; got {rows}"
            )
        if rows > 1 and self.pack_columns is not None:
            raise ValueError(
                f"expected rows_per_prompt 1 with pack_columns, where a prompt has one response; got {rows}"
            )
        if rows > 1 and self.distill is not None and self.distill.fraction < 1:
            raise ValueError(
                f"expected distillation of all rows with rows_per_prompt {rows}, because a share of them tears rows of "
                f"one prompt apart; got {self.distill}"
            )

    def _check_dense_learner(self) -> None:
        if self.dense_learner is None:
            return
        if self.visibility == "dense" or self.policy_coef == 0 or self.value is not None:
            raise ValueError(
                "expected visibility 'shadow', a policy_coef > 0 and no critic with a dense_learner, which shares the "
                f"policy loss; got {self.visibility!r}, {self.policy_coef} and value {self.value}"
            )
        assert self.of_dense_learner is not None  # made for its errors

    @property
    def of_dense_learner(self) -> UpdateConfig | None:
        """What the dense learner's policy loss is made from; None without one."""
        if self.dense_learner is None:
            return None
        return replace(
            self,
            visibility="dense",
            correction=self.dense_learner.correction,
            dense_learner=None,
            distill=None,
            entropy_coef=0.0,
            eviction_coef=0.0,
            reference_sync=None,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether the train state must carry reference parameters."""
        return self.loss.beta > 0 or (self.distill is not None and self.distill.direction in REFERENCE_TEACHERS)


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
