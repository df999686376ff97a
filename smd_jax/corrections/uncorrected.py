"""Corrections without weights and rejection, such as Shadow Mask Distillation.

Sources: TRL is trl/trainer/grpo_trainer.py and grpo_config.py (1.16); verl is
verl/trainer/ppo/rollout_corr_helper.py with the presets of verl/trainer/config/algorithm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from smd_jax.corrections.base import Correction, CorrectionInputs, CorrectionTerms, CorrectionTraits, weighing


@dataclass(frozen=True)
class Naive(Correction):
    """Ignores xi: treats the sampler as the learner at the rollout's parameters.

    TRL: vllm_importance_sampling_correction=False. verl: rollout_is=None.
    """

    @property
    def traits(self) -> CorrectionTraits:
        return CorrectionTraits(uses_mismatch=False)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # The rollout may have recorded no log-probabilities, so the shape comes from the learner's.
        return weighing(inputs, jnp.ones_like(inputs.old_logprobs))


@dataclass(frozen=True)
class Shadow(Naive):
    """Shadow Mask Distillation: the learner replays the sampler's masks, so xi is 1 and nothing needs correction.

    The terms are those of `Naive`. Use it with visibility "shadow", where xi = 1 up to rounding, as `mismatch_kl` of
    every run shows.
    """


@dataclass(frozen=True)
class Bypass(Naive):
    """The loss takes its ratio to the sampler itself, pi / pi_sampler = r xi, and clips that.

    Two policies, no pi_old. verl: bypass_mode=True with loss_type="ppo_clip". Tunix: use_rollout_logps=True.
    """

    @property
    def traits(self) -> CorrectionTraits:
        return CorrectionTraits(ratio_to="sampler", uses_mismatch=False)
