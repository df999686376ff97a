"""A reference policy that follows the policy, in steps or as a moving average.

    every `every` optimizer steps:   reference  <-  alpha * policy + (1 - alpha) * reference

    ReferenceSync(0.6, 512)          TR-DPO (arXiv:2404.09656), TRL's sync_ref_model
    ReferenceSync.ema(0.999)         an exponential moving average of the policies of all steps

The reference is a part of the train state: sharded, checkpointed and restored with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int, Key

from smd_jax.learner.storage import REFERENCE, rounded, widened
from smd_jax.model.protocol import Params
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class ReferenceSync:
    """How the reference follows the policy.

    Attributes:
      alpha: share of the policy in the new reference (TRL: ref_model_mixup_alpha); 1 copies it.
      every: optimizer steps from one mixture to the next (TRL: ref_model_sync_steps).
    """

    alpha: float = 0.6
    every: int = 512

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"expected 0 < alpha <= 1, the policy's share of the new reference; got {self.alpha}")
        if self.every < 1:
            raise ValueError(f"expected every >= 1 optimizer steps; got {self.every}")

    @classmethod
    def ema(cls, decay: float) -> ReferenceSync:
        """The moving average that keeps `decay` of itself at every step.

        Raises:
          ValueError: unless 0 <= decay < 1.
        """
        if not 0 <= decay < 1:
            raise ValueError(f"expected 0 <= decay < 1, what the average keeps of itself; got {decay}")
        return cls(1 - decay, 1)


def check_same_leaves(reference: Params, params: Params) -> None:
    """Raises ValueError if the reference has other leaves than the policy, with which it is to be mixed."""
    if jax.tree.structure(reference) != jax.tree.structure(params):
        raise ValueError(
            "expected reference parameters with the same leaves as the policy's, to mix the two (of PPO the value "
            f"head, too); got {jax.tree.structure(reference)} and {jax.tree.structure(params)}"
        )


def follow(sync: ReferenceSync, reference: Params, params: Params, step: Int[Array, ""], key: Key[Array, ""]) -> Params:
    """The reference after `step` optimizer steps: moved if a mixture is due, else as it was.

    The mixture is made in float32 or wider; a reference in bfloat16 is rounded stochastically, because a small share
    of the policy would be lost otherwise, see `smd_jax.learner.storage`.

    Args:
      params: of the policy after that step. key: of the train state.

    Raises:
      ValueError: if the reference has other leaves than the policy.
    """
    check_same_leaves(reference, params)

    def mixed() -> Params:
        wide = jax.tree.map(
            lambda new, old: sync.alpha * new + (1 - sync.alpha) * old, widened(params), widened(reference)
        )
        return rounded(wide, reference, key, step, REFERENCE)

    # A branch and no `where`: in the steps between two mixtures nothing is computed.
    return mixed() if sync.every == 1 else jax.lax.cond(step % sync.every == 0, mixed, lambda: reference)
