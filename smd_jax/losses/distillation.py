"""Distillation: a divergence between the policy with its full context (dense) and under the mask (shadow).

For the forward passes see `smd_jax/learner/distill.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types

Direction = Literal["forward", "reverse", "published", "anchor", "ema"]

# Directions whose teacher is the reference policy.
REFERENCE_TEACHERS: tuple[Direction, ...] = ("anchor", "ema")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation between dense and masked policy, `loss = policy_loss(masked) + coef * D`.

    Attributes:
      direction: which divergence; sg is stop-gradient.
        "forward"    KL(sg(dense) ‖ shadow): the full-context policy teaches the masked one, covering its modes
        "reverse"    KL(shadow ‖ sg(dense)): the same teacher, mode-seeking
        "published"  KL(dense ‖ sg(shadow)): as the paper's repository states it; pulls the dense policy to the sparse
                     one, and is the only one with a backward pass through the dense forward
        "anchor"     KL(sg(reference dense) ‖ shadow): the teacher is the frozen reference with its full context
        "ema"        the same with a reference that follows the policy (`UpdateConfig.reference_sync`)
      coef: weight of the divergence in the loss; never negative.
    """

    direction: Direction = "forward"
    coef: float = 0.1

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.coef < math.inf:
            raise ValueError(
                "expected a finite distillation coefficient >= 0, because a negative one would drive the two policies "
                f"apart; got {self.coef}"
            )


def kl_divergence(p_logits: Float[Array, "... vocab"], q_logits: Float[Array, "... vocab"]) -> Float[Array, ...]:
    """KL(p ‖ q) in nats, exact over the vocabulary."""
    check_shape("q_logits", q_logits, p_logits.shape)
    p = jax.nn.log_softmax(p_logits, axis=-1)
    q = jax.nn.log_softmax(q_logits, axis=-1)
    # Logits of filtered tokens are very low but finite, so 0 * inf cannot occur.
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def divergence(
    dense_logits: Float[Array, "batch response vocab"],
    shadow_logits: Float[Array, "batch response vocab"],
    direction: Direction,
) -> Float[Array, "batch response"]:
    """The divergence of every token. For "anchor" and "ema" the dense logits are those of the reference."""
    if direction == "reverse":
        return kl_divergence(shadow_logits, jax.lax.stop_gradient(dense_logits))
    if direction == "published":
        return kl_divergence(dense_logits, jax.lax.stop_gradient(shadow_logits))
    return kl_divergence(jax.lax.stop_gradient(dense_logits), shadow_logits)
