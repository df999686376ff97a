"""The second track: a divergence between the policy with its full context (dense) and under the mask (shadow)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Direction = Literal["forward", "reverse", "published", "anchor"]


@dataclass(frozen=True)
class DistillConfig:
    """Distillation between dense and masked policy, `loss = policy_loss(masked) + coef * D`.

    Attributes:
      direction: which divergence, exact over the vocabulary; sg is stop-gradient.
        "forward"    KL(sg(dense) ‖ shadow): the full-context policy teaches the masked one, covering its modes
        "reverse"    KL(shadow ‖ sg(dense)): the same teacher, mode-seeking
        "published"  KL(dense ‖ sg(shadow)): as the paper's repository states it; pulls the dense policy to the sparse
                     one, and is the only one with a backward pass through the dense forward
        "anchor"     KL(sg(reference dense) ‖ shadow): the teacher is the frozen reference with its full context
      coef: weight of the divergence in the loss.
      fraction: distill_fraction, the share of the rows that get the dense forward pass, spread evenly over each
        microbatch and rotating from step to step; a whole number of its rows.
    """

    direction: Direction = "forward"
    coef: float = 0.1
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"expected a distillation coefficient >= 0; got {self.coef}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"expected 0 < distill_fraction <= 1; got {self.fraction}")

    def coef_at(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The coefficient at an optimizer step."""
        return jnp.asarray(self.coef)


def kl_divergence(p_logits: Float[Array, "... vocab"], q_logits: Float[Array, "... vocab"]) -> Float[Array, ...]:
    """KL(p ‖ q) in nats, exact over the vocabulary."""
    p, q = jax.nn.log_softmax(p_logits, axis=-1), jax.nn.log_softmax(q_logits, axis=-1)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def divergence(
    dense_logits: Float[Array, "batch response vocab"],
    shadow_logits: Float[Array, "batch response vocab"],
    direction: Direction,
) -> Float[Array, "batch response"]:
    """The divergence of every token. For "anchor" the dense logits are those of the frozen reference."""
    if direction == "reverse":
        return kl_divergence(shadow_logits, jax.lax.stop_gradient(dense_logits))
    if direction == "published":
        return kl_divergence(dense_logits, jax.lax.stop_gradient(shadow_logits))
    return kl_divergence(jax.lax.stop_gradient(dense_logits), shadow_logits)


def teacher_rows(rows: int, fraction: float) -> int:
    """How many of the `rows` of a microbatch get the dense forward pass.

    Raises:
      ValueError: if the fraction is not a whole number of rows, at least 1: rounding would spend another share.
    """
    exact = fraction * rows
    if abs(exact - round(exact)) > 1e-6 or round(exact) < 1:
        raise ValueError(
            f"expected distill_fraction * rows of a microbatch to be a whole number >= 1; got {fraction} * {rows}"
        )
    return round(exact)
