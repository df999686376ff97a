"""Corrections that correct nothing: no weights, no rejection. Shadow Mask Distillation is one of them.

Sources: TRL is trl/trainer/grpo_trainer.py and grpo_config.py (1.16); verl is
verl/trainer/ppo/rollout_corr_helper.py with the presets of verl/trainer/config/algorithm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from smd_jax.corrections.base import Correction, CorrectionInputs, CorrectionTerms, CorrectionTraits, weighing


@dataclass(frozen=True)
class Naive(Correction):
    """Takes the sampler for the learner at the rollout's parameters, and ignores xi.

    TRL: vllm_importance_sampling_correction=False. verl: rollout_is=None.
    """

    @property
    def traits(self) -> CorrectionTraits:
        return CorrectionTraits(uses_mismatch=False, per_response=True)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        # Of the shape of the learner's log-probabilities: a rollout may have recorded none.
        return weighing(inputs, jnp.ones_like(inputs.old_logprobs))


@dataclass(frozen=True)
class Shadow(Naive):
    """Shadow Mask Distillation: the learner replays the sampler's visibility, so xi is 1 and nothing needs correction.

    The same terms as `Naive` with another claim: it belongs to a learner under the recorded mask (visibility "shadow"),
    where xi = 1 up to rounding, as `mismatch_kl` of every run shows. Under a dense mask it would be `Naive`.
    """


@dataclass(frozen=True)
class Bypass(Naive):
    """The loss takes its ratio to the sampler itself, pi / pi_sampler = r xi, and clips that.

    Two policies, no pi_old. verl: bypass_mode=True with loss_type="ppo_clip". Tunix: use_rollout_logps=True.
    """

    @property
    def traits(self) -> CorrectionTraits:
        # Not per response: the ratio that the loss clips is each token's own.
        return CorrectionTraits(ratio_to="sampler", uses_mismatch=False)
