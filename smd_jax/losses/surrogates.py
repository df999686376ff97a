"""Surrogates: each token's term in the objective, from its ratio and its advantage.

To add one, write a frozen dataclass with `terms`, in any file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types


class SurrogateInputs(PyTreeNode):
    """Inputs of a surrogate, float32 or wider, `[batch, R]`. Uncounted tokens have ratio 1 and log-probability 0.

    Attributes:
      ratio: new over old probability of the token or its response (`LossConfig.ratio_level`); with a gradient.
      logprobs: log-probabilities of the trained policy; with a gradient.
      advantages: `[batch, 1]` of responses, or `[batch, R]` of tokens.
    """

    ratio: Float[Array, "batch R"]
    logprobs: Float[Array, "batch R"]
    advantages: Float[Array, "batch _"]


class SurrogateTerms(PyTreeNode):
    """Outputs of a surrogate per token.

    Attributes:
      objective: `[batch, R]`; the loss is minus its weighted sum.
      metrics: name -> `[batch, R]`, logged as means over the counted tokens, or over responses if ratios belong to
        responses (`surrogate_metrics`).
    """

    objective: Float[Array, "batch R"]
    metrics: dict[str, Array]


@dataclass(frozen=True)
class Surrogate:
    """Base of all surrogates: a frozen, hashable dataclass, usable as a static argument.

    Attributes:
      only_clips: whether it is ratio * advantage with clipping, which a correction with a trust region may replace.
    """

    only_clips: ClassVar[bool] = False

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        """Each token's term in the objective, before corrections."""
        raise TypeError(f"{type(self).__name__} has no terms: its class must define them")


@dataclass(frozen=True)
class Clip(Surrogate):
    """PPO's clipping (arXiv:1707.06347 eq. 7): min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with the ratio r and
    the advantage A.

    Metrics: `clip_ratio/low_mean`, `clip_ratio/high_mean` and `clip_ratio/region_mean`, the shares of tokens without
    gradient because of the bounds. Tokens cut by `delta` are not counted.

    Attributes:
      epsilon: the ratio is clipped from below at `1 - epsilon`.
      epsilon_high: the ratio is clipped from above at `1 + epsilon_high`; None is `epsilon`.
      delta: dual clip: for a negative advantage, the ratio has no gradient above this (arXiv:1912.09729, INTELLECT-2
        arXiv:2505.07291); None: no such bound.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.epsilon < 1:
            raise ValueError(f"expected 0 < epsilon < 1; got {self.epsilon}")
        if self.epsilon_high is not None and not self.epsilon_high > 0:
            raise ValueError(f"expected epsilon_high > 0; got {self.epsilon_high}")
        if self.delta is not None and not self.delta > self.bounds[1]:
            raise ValueError(f"expected delta above the upper bound {self.bounds[1]} of the ratio; got {self.delta}")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio that still has a gradient."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def only_clips(self) -> bool:
        return self.delta is None and type(self).terms is Clip.terms  # a subclass may do more

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        ratio = inputs.ratio
        advantages = inputs.advantages
        low, high = self.bounds
        clipped_low = (ratio < low) & (advantages < 0)
        clipped_high = (ratio > high) & (advantages > 0)
        # After the comparisons, so that tokens cut by delta are not reported as clipped, as in TRL.
        if self.delta is not None:
            ratio = jnp.where(advantages < 0, jnp.minimum(ratio, self.delta), ratio)
        return SurrogateTerms(
            # The minimum: there is no gradient only if the ratio has moved in the direction of the advantage, so that a
            # ratio on the wrong side can come back.
            objective=jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages),
            metrics={
                "clip_ratio/low_mean": clipped_low,
                "clip_ratio/high_mean": clipped_high,
                "clip_ratio/region_mean": clipped_low | clipped_high,
            },
        )


@dataclass(frozen=True)
class ClipWeight(Surrogate):
    """CISPO's surrogate (arXiv:2506.13585 eq. 4 and 5): sg(min(r, 1 + epsilon_high)) A log p. The clipped ratio is a
    weight, so every token keeps its gradient.

    Metrics: `cispo_clip_ratio`, the share of tokens with a positive advantage and a cut weight, as in TRL.

    Attributes:
      epsilon_high: the weight is cut at `1 + epsilon_high`, as in MiniMax-M1. TRL's option is the bound itself, so its
        epsilon_high 5.0 is our 4.0.
    """

    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        check_types(self)
        if not self.epsilon_high > 0:
            raise ValueError(f"expected epsilon_high > 0; got {self.epsilon_high}")

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        high = 1 + self.epsilon_high
        # The gradient comes from the log-probability, not from the ratio.
        weight = jax.lax.stop_gradient(jnp.minimum(inputs.ratio, high))
        return SurrogateTerms(
            objective=weight * inputs.advantages * inputs.logprobs,
            metrics={"cispo_clip_ratio": (inputs.ratio > high) & (inputs.advantages > 0)},
        )


@dataclass(frozen=True)
class SoftGate(Surrogate):
    """SAPO's gate (arXiv:2511.20347): 4 / tau * sigmoid(tau (r - 1)) * A, smooth instead of clipped: its slope is that
    of r A at r = 1, and falls to 0 far away.

    Metrics: `sapo_gate_mean`, the mean of slope / A, 4 sigmoid (1 - sigmoid): 1 on-policy.

    Attributes:
      temperature_pos: tau of tokens with a positive advantage (TRL: sapo_temperature_pos).
      temperature_neg: tau of the others, whose gate closes sooner because their gradients spread over the whole
        vocabulary (TRL: sapo_temperature_neg).
    """

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05

    def __post_init__(self) -> None:
        check_types(self)
        for name, temperature in (("pos", self.temperature_pos), ("neg", self.temperature_neg)):
            if not temperature > 0:
                raise ValueError(f"expected temperature_{name} > 0; got {temperature}")

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        advantages = inputs.advantages
        tau = jnp.where(advantages > 0, self.temperature_pos, self.temperature_neg)
        gate = jax.nn.sigmoid(tau * (inputs.ratio - 1))
        return SurrogateTerms(
            objective=4 / tau * gate * advantages,
            metrics={"sapo_gate_mean": 4 * gate * (1 - gate)},
        )


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """r A, without bounds: for corrections with a trust region. No metrics."""

    only_clips = True

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(objective=inputs.ratio * inputs.advantages, metrics={})
