"""The arms of the studies: which policy the learner trains, and how it corrects for the sampler.

See docs/corrections.md and docs/glossary.md for the terms. All other settings are the same for all arms of a study.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import optax

import smd_jax as smd
from smd_jax.losses.distillation import Direction
from smd_jax.model.protocol import ModelShape, Params

FIRST_SHARE = 0.25  # share of the rollouts for `Arm.first`


@dataclass(frozen=True)
class Arm:
    """One learner.

    Attributes:
      teacher: direction of the distillation from a policy with its full context; None: no distillation.
      policy_coef: weight of the policy loss; 0: distillation only.
      dense_share: share of a dense learner's loss with token weights (TIS), see `smd_jax.learner.policy_term`.
      full_cache: whether the sampler evicts nothing.
      trains: whether the arm is trained; False for the untrained start.
      loss: the policy loss.
      cache_bits: bits of the sampler's cache; None: full precision.
      first: the arm that trains before this one, for `FIRST_SHARE` of the rollouts; None: none.
    """

    name: str
    visibility: Literal["shadow", "dense"]
    correction: smd.corrections.Correction
    teacher: Direction | None = None
    policy_coef: float = 1.0
    dense_share: float = 0.0
    full_cache: bool = False
    trains: bool = True
    loss: smd.LossConfig = smd.LossConfig()
    cache_bits: Literal[8, 4, 2] | None = None
    first: Arm | None = None

    def phases(self, rollouts: int) -> list[tuple[Arm, int]]:
        """The arms that train in sequence, with their numbers of rollouts."""
        if not self.trains:
            return [(self, 0)]
        if self.first is None:
            return [(self, rollouts)]
        first = max(round(FIRST_SHARE * rollouts), 1)
        return [(self.first, first), (self, rollouts - first)]

    @property
    def update(self) -> smd.UpdateConfig:
        return smd.UpdateConfig(
            visibility=self.visibility,
            loss=self.loss,
            policy_coef=self.policy_coef,
            correction=self.correction,
            distill=None if self.teacher is None else smd.DistillConfig(direction=self.teacher, coef=0.1),
            dense_learner=smd.learner.DenseLearner(self.dense_share) if self.dense_share else None,
        )

    def with_own_parameters(self, params: Params, shape: ModelShape) -> Params:
        """Adds the parameters of only this arm to a seed's start."""
        del shape
        return params

    def optimizer(self, adam: Callable[[float], optax.GradientTransformation]) -> optax.GradientTransformation:
        """Builds the optimizer; `adam(factor)` is Adam at `factor` times the learning rate of the run."""
        return adam(1.0)

    @property
    def is_exact(self) -> bool:
        """Whether learner and sampler must be one policy; every rollout is checked."""
        return self.visibility == "shadow" or self.full_cache


# verl's decoupled_geo_rs_token_tis with wider bounds: its own, 0.999 to 1.001, reject every response here.
TIS_AND_REJECTION = smd.corrections.Chain(
    (smd.corrections.TIS(), smd.corrections.GeometricRejection(low=0.5, high=2.0))
)

# Distillation from the frozen dense start, without reward.
ANCHOR_ALONE = Arm("anchor-alone", "shadow", smd.corrections.Shadow(), "anchor", policy_coef=0.0)

ARMS = (
    Arm("untrained", "shadow", smd.corrections.Shadow(), trains=False),
    Arm("full-cache", "shadow", smd.corrections.Shadow(), full_cache=True),
    Arm("naive", "dense", smd.corrections.Naive()),
    Arm("bypass", "dense", smd.corrections.Bypass()),
    Arm("tis", "dense", smd.corrections.TIS()),
    Arm("tis-1.5", "dense", smd.corrections.TIS(clip_max=1.5)),
    Arm("tis-5", "dense", smd.corrections.TIS(clip_max=5.0)),
    Arm("icepop", "dense", smd.corrections.IcePop()),
    Arm("sparse-rl", "dense", smd.corrections.SparseRL()),  # as released, without its KL of 1e-4 to a reference
    # As in the paper's text; loss and KL of its release.
    Arm("sparse-rl-paper", "dense", smd.corrections.SparseRLPaper(), loss=smd.losses.grpo(beta=1e-4)),
    Arm("geometric", "dense", TIS_AND_REJECTION),
    Arm("gspo", "dense", smd.corrections.Naive(), loss=smd.losses.gspo()),
    Arm("quantised-cache", "shadow", smd.corrections.Shadow(), full_cache=True, cache_bits=4),
    Arm("shadow", "shadow", smd.corrections.Shadow()),
    Arm("shadow-anchor", "shadow", smd.corrections.Shadow(), "anchor"),
    Arm("shadow-published", "shadow", smd.corrections.Shadow(), "published"),
    Arm("mixed-20", "shadow", smd.corrections.Shadow(), dense_share=0.2),
    Arm("mixed-50", "shadow", smd.corrections.Shadow(), dense_share=0.5),
    Arm("mixed-80", "shadow", smd.corrections.Shadow(), dense_share=0.8),
    ANCHOR_ALONE,
    Arm("anchor-then-shadow", "shadow", smd.corrections.Shadow(), first=ANCHOR_ALONE),
)


def arms_of(names: Sequence[str], among: Sequence[Arm] = ARMS) -> tuple[Arm, ...]:
    """Returns the arms with these names, in the order of `among`.

    Raises:
      ValueError: for an unknown name.
    """
    if unknown := sorted(set(names) - {arm.name for arm in among}):
        raise ValueError(f"expected arms from {[arm.name for arm in among]}; got {unknown}")
    return tuple(arm for arm in among if arm.name in names)
