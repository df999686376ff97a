"""Sparse-RL's corrections, and all corrections by name, with the settings of their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smd_jax.corrections.base import Bypass, Correction, Naive, Shadow
from smd_jax.corrections.chain import Chain
from smd_jax.corrections.mismatch import MIS, TIS, GeometricRejection, IcePop, Rejection, Veto
from smd_jax.corrections.trust_region import DPPOTV


@dataclass(frozen=True)
class SparseRL(Chain):
    """The correction of Sparse-RL's release.

    Token weights are min(xi, 1.5), divided by their mean over all tokens of the minibatch, including rejected ones.
    Tokens outside [0.5, 1.5] are rejected, and responses with any token below 1e-4.

    The release has two more parts, which the loss sets: it averages token means over responses (`losses.grpo`; our
    default is the mean over tokens), and adds a k3 KL of 1e-4 to a reference (`beta`; our default is none). It divides
    the weights by the mean of a microbatch, so its loss depends on the microbatch size; we use the minibatch.

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
    """The correction of Sparse-RL's paper (arXiv:2601.10079): rejection of whole responses, token weights xi.

    A response is rejected if any of its tokens has xi < 1e-4 ("sparsity-aware rejection sampling"; the threshold of the
    released configuration). Tokens of the others have weight xi ("importance-based reweighting"), without truncation,
    token rejection or normalisation, which the summaries of the paper that we could read do not mention.
    """

    parts: tuple[Correction, ...] = (TIS("token", clip_max=None), Veto(1e-4))


CORRECTIONS: Mapping[str, type[Correction]] = {
    "shadow": Shadow,
    "naive": Naive,
    "bypass": Bypass,
    "tis": TIS,
    "mis": MIS,
    "icepop": IcePop,
    "sparse_rl": SparseRL,
    "geometric_rejection": GeometricRejection,
    "dppo_tv": DPPOTV,
}
"""Constructors by name, for `--correction`."""
