"""Corrections for the mismatch between sampler and learner.

A correction is a frozen dataclass that maps log-probabilities to token weights and counted tokens. Shadow masks need no
correction.
"""

from smd_jax.corrections.base import Correction as Correction
from smd_jax.corrections.base import CorrectionInputs as CorrectionInputs
from smd_jax.corrections.base import CorrectionTerms as CorrectionTerms
from smd_jax.corrections.base import CorrectionTraits as CorrectionTraits
from smd_jax.corrections.base import combine_terms as combine_terms
from smd_jax.corrections.base import Naive as Naive
from smd_jax.corrections.base import Shadow as Shadow
from smd_jax.corrections.base import Bypass as Bypass
from smd_jax.corrections.chain import Chain as Chain
from smd_jax.corrections.mismatch import TIS as TIS
from smd_jax.corrections.mismatch import MIS as MIS
from smd_jax.corrections.mismatch import IcePop as IcePop
from smd_jax.corrections.mismatch import Rejection as Rejection
from smd_jax.corrections.mismatch import GeometricRejection as GeometricRejection
from smd_jax.corrections.mismatch import Veto as Veto
from smd_jax.corrections.trust_region import OPSM as OPSM
from smd_jax.corrections.trust_region import DPPOTV as DPPOTV
from smd_jax.corrections.named import SparseRL as SparseRL
from smd_jax.corrections.named import SparseRLPaper as SparseRLPaper
from smd_jax.corrections.named import CORRECTIONS as CORRECTIONS
