"""Corrections by name, with the settings of their source."""

from __future__ import annotations

from collections.abc import Mapping

from smd_jax.corrections.base import Correction
from smd_jax.corrections.importance import MIS, TIS, IcePop, QuRL
from smd_jax.corrections.rejection import GeometricRejection
from smd_jax.corrections.sparse_rl import SparseRL
from smd_jax.corrections.trust_region import DPPOTV
from smd_jax.corrections.uncorrected import Bypass, Naive, Shadow

CORRECTIONS: Mapping[str, type[Correction]] = {
    "shadow": Shadow,
    "naive": Naive,
    "bypass": Bypass,
    "tis": TIS,
    "mis": MIS,
    "icepop": IcePop,
    "sparse_rl": SparseRL,
    "qurl": QuRL,
    "geometric_rejection": GeometricRejection,
    "dppo_tv": DPPOTV,
}
"""Constructors by name, for `--correction`."""
