"""What each method does about the mismatch of sampler and learner: one table. `correction` has the seam and its words.

Here are the rows that need neither weight nor rejection, Shadow Mask Distillation among them, and chains of others.
`importance`, `rejection` and `trust_region` have the others, and their names are here too.

To add one: a frozen dataclass with `terms` in the module of its family, its name in `smd_jax/__init__.py`, a row in
`tests/test_corrections.py`.

Sources: TRL is trl/trainer/grpo_trainer.py and grpo_config.py (1.16); verl is verl/trainer/ppo/rollout_corr_helper.py
with the presets of verl/trainer/config/algorithm.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp

from smd_jax.corrections.base import Anchor as Anchor
from smd_jax.corrections.base import Correction as Correction
from smd_jax.corrections.base import CorrectionInputs as CorrectionInputs
from smd_jax.corrections.base import CorrectionTerms as CorrectionTerms
from smd_jax.corrections.base import combine_terms as combine_terms
from smd_jax.corrections.base import weighing
from smd_jax.corrections.importance import MIS as MIS
from smd_jax.corrections.importance import TIS as TIS
from smd_jax.corrections.importance import IcePop as IcePop
from smd_jax.corrections.importance import QuRL as QuRL
from smd_jax.corrections.rejection import GeometricRejection as GeometricRejection
from smd_jax.corrections.rejection import Rejection as Rejection
from smd_jax.corrections.rejection import Veto as Veto
from smd_jax.corrections.trust_region import DPPOTV as DPPOTV
from smd_jax.corrections.trust_region import OPSM as OPSM


@dataclass(frozen=True)
class Naive(Correction):
    """Takes the sampler for the learner at the rollout's parameters, and ignores xi.

    TRL: vllm_importance_sampling_correction=False. verl: rollout_is=None.
    """

    @property
    def uses_mismatch(self) -> bool:
        return False

    @property
    def per_response(self) -> bool:
        return True

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        return weighing(inputs, jnp.ones_like(inputs.old_logprobs))


@dataclass(frozen=True)
class Shadow(Naive):
    """Shadow Mask Distillation: the learner replays the sampler's visibility, so xi is 1 and nothing needs correction.

    The same terms as `Naive` with another claim: it belongs to a learner under the recorded mask (visibility "shadow"),
    where xi = 1 up to rounding, as `mismatch_kl` of every run shows. Under a dense mask it would be `Naive`.
    """


@dataclass(frozen=True)
class Bypass(Naive):
    """The loss takes its ratio to the sampler itself, pi / pi_sampler = r xi, and clips that (`anchor` is "sampler").

    Two policies, no pi_old. verl: bypass_mode=True with loss_type="ppo_clip". Tunix: use_rollout_logps=True.
    """

    @property
    def anchor(self) -> Anchor:
        return "sampler"

    @property
    def per_response(self) -> bool:
        return False  # the ratio that the loss clips is each token's own


# --- several at once


@dataclass(frozen=True)
class Chain(Correction):
    """Several corrections at once, each on its own: weights multiply, and a token stays if all keep it.

    `Chain((TIS(), GeometricRejection()))` is verl's decoupled_geo_rs_token_tis.

    Raises:
      ValueError: if xi would count twice: two parts weigh by it, or one does and the ratio to the sampler contains it.
    """

    parts: tuple[Correction, ...]

    def __post_init__(self) -> None:
        names = [type(part).__name__ for part in self.parts]
        if not self.parts:
            raise ValueError("expected at least one correction in a Chain; got none")
        if sum(part.weighs for part in self.parts) > 1:
            raise ValueError(f"expected at most one correction that weighs by xi in a Chain; got {names}")
        if self.weighs and self.anchor == "sampler":
            raise ValueError(
                f"expected no weights by xi with a ratio to the sampler, which contains xi already; got {names}"
            )

    @property
    def anchor(self) -> Anchor:
        return "sampler" if any(part.anchor == "sampler" for part in self.parts) else "old"

    @property
    def weighs(self) -> bool:
        return any(part.weighs for part in self.parts)

    @property
    def clips(self) -> bool:
        return all(part.clips for part in self.parts)

    @property
    def scales_bounds(self) -> bool:
        return any(part.scales_bounds for part in self.parts)

    @property
    def whole_batch(self) -> bool:
        return any(part.whole_batch for part in self.parts)

    @property
    def uses_mismatch(self) -> bool:
        return any(part.uses_mismatch for part in self.parts)

    @property
    def uses_present(self) -> bool:
        return any(part.uses_present for part in self.parts)

    @property
    def per_response(self) -> bool:
        return all(part.per_response for part in self.parts)

    @property
    def judges_responses(self) -> bool:
        return any(part.judges_responses for part in self.parts)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        return functools.reduce(combine_terms, [part.terms(inputs) for part in self.parts])


def split_by_time(correction: Correction) -> tuple[Correction, Correction | None]:
    """The parts that can be evaluated before the learner's forward pass, and those that look at the learner now.

    The terms of the two, by `combine_terms`, are the correction's own. The late ones keep every token: the early ones
    alone say what is in the denominators. Anchor and clipping are the whole correction's.

    Returns:
      (early, late): chains in chains are flattened. Early is `Naive` where nothing can be evaluated before. Where
      nothing looks at the learner now, late is None and early the correction itself.

    Raises:
      ValueError: if a late part must see the whole batch, which its forward pass, a microbatch, does not have.
    """
    if not correction.uses_present:
        return correction, None
    parts = flat_parts(correction)
    late = tuple(part for part in parts if part.uses_present)
    for part in late:
        if part.whole_batch:
            raise ValueError(f"expected no part that needs both the learner now and the whole batch; got {part}")
    return _joined(tuple(part for part in parts if not part.uses_present)), _joined(late)


def flat_parts(correction: Correction) -> tuple[Correction, ...]:
    """The corrections that a chain, or a chain in it, is made of; of another correction itself."""
    if not isinstance(correction, Chain):
        return (correction,)
    return tuple(single for part in correction.parts for single in flat_parts(part))


def _joined(parts: tuple[Correction, ...]) -> Correction:
    """The parts as one correction."""
    if not parts:
        return Naive()
    return parts[0] if len(parts) == 1 else Chain(parts)


# --- methods that are chains


@dataclass(frozen=True)
class SparseRL(Chain):
    """Sparse-RL as released (github.com/lsjia/Sparse-RL, slime/examples/train_infer_mismatch_helper/mis.yaml).

    Token weights min(xi, 1.5), then divided by their mean over all tokens of the batch, the rejected ones included;
    tokens outside [0.5, 1.5] are rejected, and responses with any token below 1e-4.
    """

    parts: tuple[Correction, ...] = (
        TIS("token", clip_max=1.5, batch_normalize=True),  # use_tis, tis_mode: truncate, tis_upper_bound: 1.5
        Rejection("token", 0.5, 1.5),  # use_rs; its bounds are null in the file: those of tis apply
        Veto(1e-4),
    )


@dataclass(frozen=True)
class SparseRLPaper(Chain):
    """Sparse-RL as its text has it (arXiv:2601.10079): rejection of whole responses, weights xi for single tokens.

    A response is rejected if any of its tokens has xi < 1e-4 ("sparsity-aware rejection sampling"; the threshold of the
    released configuration); tokens of the others weigh xi ("importance-based reweighting"), with neither truncation nor
    rejection of tokens nor normalisation, which the summaries of the text that we could read do not name.
    """

    parts: tuple[Correction, ...] = (TIS("token", clip_max=None), Veto(1e-4))
