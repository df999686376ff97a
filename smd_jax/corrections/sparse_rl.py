"""Sparse-RL, the method nearest to ours: it evicts in the sampler, and corrects a dense learner by a chain."""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.corrections.base import Correction
from smd_jax.corrections.chain import Chain
from smd_jax.corrections.importance import TIS
from smd_jax.corrections.rejection import Rejection, Veto


@dataclass(frozen=True)
class SparseRL(Chain):
    """The correction of Sparse-RL as released, and the correction only.

    Token weights min(xi, 1.5), then divided by their mean over all tokens of the minibatch, the rejected ones included;
    tokens outside [0.5, 1.5] are rejected, and responses with any token below 1e-4.

    What the release has around it is not said here but by the loss: its mean is the one over responses of means over
    their counted tokens (`losses.grpo`; the default here is the mean over tokens), and it adds a k3 KL of 1e-4 to a
    reference (`beta`; the default here is none). It divides the weights by the mean of a microbatch, so that its loss
    depends on the size of those; ours is the mean of the minibatch.

    Source: github.com/lsjia/Sparse-RL, slime/examples/train_infer_mismatch_helper/mis.yaml and mis.py, and
    slime/scripts/run-qwen2.5-3b-rkv.sh.
    """

    parts: tuple[Correction, ...] = (
        TIS("token", clip_max=1.5, batch_normalize=True),  # use_tis, tis_mode: truncate, tis_upper_bound: 1.5
        Rejection("token", 0.5, 1.5),  # use_rs; its bounds are null in the file: those of tis apply
        Veto(1e-4),  # rs_veto_threshold
    )


@dataclass(frozen=True)
class SparseRLPaper(Chain):
    """The correction of Sparse-RL as its text has it (arXiv:2601.10079), and the correction only: rejection of whole
    responses, weights xi for single tokens.

    A response is rejected if any of its tokens has xi < 1e-4 ("sparsity-aware rejection sampling"; the threshold of the
    released configuration); tokens of the others weigh xi ("importance-based reweighting"), with neither truncation nor
    rejection of tokens nor normalisation, which the summaries of the text that we could read do not name.
    """

    parts: tuple[Correction, ...] = (TIS("token", clip_max=None), Veto(1e-4))
