"""Preference pairs and the loss of online DPO: arrays in, `(loss, terms of pairs)` out. No model inside.

The loss of a pair is a function of four log-probabilities of whole responses. As in `smd_jax.losses.policy`, the loss
is a weighted sum, here over pairs, with weights from the whole batch: microbatches of whole pairs sum to the same loss
in any split.

    log-probabilities [batch, R] ─► sequence_logprobs ─┐
    rewards ─► best_worst ─► signal ─► pair_weights ───┴─► DPOInputs ─► dpo_loss ─► (loss, terms of pairs)

Source: TRL (1.16), trl/experimental/online_dpo/online_dpo_trainer.py and online_dpo_config.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smd_jax.losses.advantages import grouped, grouped_rows
from smd_jax.pytrees import PyTreeNode
from smd_jax.ratios import masked_mean
from smd_jax.shapes import check_shape
from smd_jax.typed_fields import check_types

DPOLossType = Literal["sigmoid", "ipo"]


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """The preference loss, with the names and defaults of TRL's OnlineDPOConfig.

    Attributes:
      beta: how strongly the policy is held to the reference; with "ipo" it is tau of arXiv:2310.12036.
      loss_type: "sigmoid" (DPO, arXiv:2305.18290 eq. 7) or "ipo" (arXiv:2310.12036 eq. 17), see `dpo_loss`.
    """

    beta: float = 0.1
    loss_type: DPOLossType = "sigmoid"

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.beta < math.inf:
            raise ValueError(f"expected a finite beta > 0; got {self.beta}")


class DPOInputs(PyTreeNode):
    """The inputs of the loss, float32 or wider, `[pairs]`; log-probabilities are of whole responses, in nats.

    Attributes:
      chosen_logprobs, rejected_logprobs: those of the policy being trained; the only inputs with a gradient.
      reference_chosen_logprobs, reference_rejected_logprobs: those of the frozen reference.
      weights: how much each pair weighs in the loss, see `pair_weights`; where 0, log-probabilities may be anything.
    """

    chosen_logprobs: Float[Array, " pairs"]
    rejected_logprobs: Float[Array, " pairs"]
    reference_chosen_logprobs: Float[Array, " pairs"]
    reference_rejected_logprobs: Float[Array, " pairs"]
    weights: Float[Array, " pairs"]


def sequence_logprobs(
    logprobs: Float[Array, "batch response"], mask: Bool[Array, "batch response"]
) -> Float[Array, " batch"]:
    """The log-probability of each response: the sum over its tokens in the mask."""
    check_shape("logprobs", logprobs, ("batch", "R"))
    check_shape("mask", mask, logprobs.shape)
    return jnp.where(mask, logprobs, 0.0).sum(axis=1)


def pair_weights(counted: Bool[Array, " pairs"]) -> Float[Array, " pairs"]:
    """Weights of the mean over the counted pairs of the whole batch; all 0 without counted pairs."""
    check_shape("counted", counted, ("pairs",))
    # At least 1, to avoid 0 / 0 in a batch without counted pairs.
    return counted.astype(jnp.float32) / jnp.maximum(counted.sum(), 1)


def dpo_loss(inputs: DPOInputs, config: DPOConfig) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`sum(weights * l(h))`, h = (log policy - log reference) of chosen minus that of rejected:

    sigmoid   l = -log sigmoid(beta h)      (arXiv:2305.18290 eq. 7)
    ipo       l = (h - 1 / (2 beta))^2      (arXiv:2310.12036 eq. 17), of sums over tokens, as in TRL's online trainer

    Returns:
      The loss; and the metrics of each pair, `[pairs]`, 0 where a pair weighs nothing.

    Raises:
      ValueError: if the arrays are not all `[pairs]`.
    """
    check_shape("chosen_logprobs", inputs.chosen_logprobs, ("pairs",))
    for field in dataclasses.fields(inputs):
        check_shape(field.name, getattr(inputs, field.name), inputs.chosen_logprobs.shape)
    active = inputs.weights > 0
    # Pairs of weight 0 may hold infinities: replaced before any arithmetic, because 0 * inf is NaN.
    inside = jax.tree.map(lambda x: jnp.where(active, x, 0.0), inputs)
    of_chosen = inside.chosen_logprobs - jax.lax.stop_gradient(inside.reference_chosen_logprobs)
    of_rejected = inside.rejected_logprobs - jax.lax.stop_gradient(inside.reference_rejected_logprobs)
    preference = of_chosen - of_rejected
    if config.loss_type == "sigmoid":
        # Not log(sigmoid(x)), which underflows to log 0.
        per_pair = -jax.nn.log_sigmoid(config.beta * preference)
    else:
        per_pair = (preference - 1.0 / (2.0 * config.beta)) ** 2
    loss = jnp.sum(per_pair * jax.lax.stop_gradient(inputs.weights))
    margins = config.beta * of_chosen - config.beta * of_rejected
    terms = {
        "rewards/chosen": config.beta * of_chosen,
        "rewards/rejected": config.beta * of_rejected,
        "rewards/margins": margins,
        "rewards/accuracies": margins > 0,
        "logps/chosen": inside.chosen_logprobs,
        "logps/rejected": inside.rejected_logprobs,
    }
    return loss, jax.lax.stop_gradient(terms)


def dpo_metrics(terms: dict[str, Array], weights: Float[Array, " pairs"]) -> dict[str, Float[Array, ""]]:
    """Metrics with TRL's names and definitions, over pairs of non-zero weight; 0 without any."""
    return {name: masked_mean(x, weights > 0, empty=0.0) for name, x in terms.items()}


class Pairs(PyTreeNode):
    """One pair per group.

    Attributes:
      chosen, rejected: `[groups]` rows of the batch.
      signal: `[groups]`, whether the rewards differ; other pairs must have weight 0.
    """

    chosen: Int[Array, " groups"]
    rejected: Int[Array, " groups"]
    signal: Bool[Array, " groups"]


def best_worst(
    rewards: Float[Array, " batch"], group_size: int, rewarded_rows: Bool[Array, " batch"] | None = None
) -> Pairs:
    """The completions with the highest and the lowest reward of each group of `group_size` contiguous completions.

    Among equal rewards the first is chosen and the last rejected, as in TRL. A group of equal rewards has no signal;
    TRL trains on its sampling order. A group with a NaN has no signal either.

    Args:
      rewarded_rows: `[batch]`, false for completions without a reward, which are ignored. A group with fewer than two
        rewards has no signal. None: all have one.

    Raises:
      ValueError: if the batch does not divide into groups of at least two.
    """
    groups = grouped(rewards, group_size)
    rewarded = grouped_rows(rewarded_rows, groups)
    best, worst = jnp.where(rewarded, groups, -jnp.inf), jnp.where(rewarded, groups, jnp.inf)
    # The first row of each group, to which indices within the group are added.
    first = group_size * jnp.arange(best.shape[0], dtype=jnp.int32)
    chosen = first + jnp.argmax(best, axis=1).astype(jnp.int32)
    # argmin returns the first of equal values. Reversed, that is the last, so that the pair has two different rows.
    rejected = first + group_size - 1 - jnp.argmin(worst[:, ::-1], axis=1).astype(jnp.int32)
    return Pairs(chosen, rejected, best.max(axis=1) > worst.min(axis=1))
