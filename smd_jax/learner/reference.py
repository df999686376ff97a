"""Synchronisation of the reference with the policy, in steps or as a moving average.

    every `every` optimizer steps:   reference  <-  alpha * policy + (1 - alpha) * reference

    ReferenceSync(0.6, 512)          TR-DPO (arXiv:2404.09656), TRL's sync_ref_model
    ReferenceSync.ema(0.999)         an exponential moving average of the policies of all steps

The reference is part of the train state and is sharded and checkpointed with it.
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
    """Schedule of the reference's updates.

    Attributes:
      alpha: share of the policy in the new reference (TRL: ref_model_mixup_alpha); 1 copies it.
      every: optimizer steps between two updates (TRL: ref_model_sync_steps).
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
        """An exponential moving average that keeps `decay` of itself at every step.

        Raises:
          ValueError: unless 0 <= decay < 1.
        """
        if not 0 <= decay < 1:
            raise ValueError(f"expected 0 <= decay < 1, the share that the average keeps; got {decay}")
        return cls(1 - decay, 1)


def check_same_leaves(reference: Params, params: Params) -> None:
    """Raises ValueError if the reference has other leaves than the policy, so that they cannot be mixed."""
    if jax.tree.structure(reference) != jax.tree.structure(params):
        raise ValueError(
            "expected reference parameters with the same leaves as the policy's, to mix them (in PPO including the "
            f"value head); got {jax.tree.structure(reference)} and {jax.tree.structure(params)}"
        )


def follow(sync: ReferenceSync, reference: Params, params: Params, step: Int[Array, ""], key: Key[Array, ""]) -> Params:
    """The reference after `step` optimizer steps: mixed with the policy if due, else unchanged.

    It is mixed in float32 or wider. A bfloat16 reference is rounded stochastically, because rounding to nearest would
    lose a small share of the policy, see `smd_jax.learner.storage`.

    Args:
      params: parameters of the policy after that step.
      key: key of the train state.

    Raises:
      ValueError: if the reference has other leaves than the policy.
    """
    check_same_leaves(reference, params)

    def mixed() -> Params:
        wide = jax.tree.map(
            lambda new, old: sync.alpha * new + (1 - sync.alpha) * old, widened(params), widened(reference)
        )
        return rounded(wide, reference, key, step, REFERENCE)

    # A branch, not a `where`, so that nothing is computed between updates.
    return mixed() if sync.every == 1 else jax.lax.cond(step % sync.every == 0, mixed, lambda: reference)
