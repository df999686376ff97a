"""The objective is a list of terms: policy loss, distillation, entropy, value, evictions, or a term of your own.

    loss = sum over terms of  term.coefficient(step) * term.evaluate(inputs).loss

    once a minibatch     term.prepare(minibatch)   weights of its tokens, made before the batch is split
    every microbatch     term.evaluate(inputs)     its summand, in one forward pass that all terms share
    once a minibatch     term.metrics(results)     what it logs besides sums

A term says what it needs (`Needs`); the update computes that once for all terms.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.learner.forward import Replay, Visibility
from smd_jax.learner.reference import ReferenceSync
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.losses.weighting import TokenMean
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import any_leaves


@dataclass(frozen=True)
class Needs:
    """What the update computes for a term besides log-probabilities and entropies of the learner.

    Attributes:
      logprobs: masks under which the policy's log-probabilities are needed; one that is not the learner's costs another
        forward and backward pass.
      reference: whether the term reads the parameters of the reference policy.
      reference_logprobs: masks under which the reference's log-probabilities are needed; a forward pass each.
      entropy_gradient: whether the entropies need a gradient.
      evictions: whether the term reads the log-probabilities of the recorded draws of evictions.
      values: whether the term reads the critic's values.
    """

    logprobs: frozenset[Visibility] = frozenset()
    reference: bool = False
    reference_logprobs: frozenset[Visibility] = frozenset()
    entropy_gradient: bool = False
    evictions: bool = False
    values: bool = False

    def __or__(self, other: Needs) -> Needs:
        """What both need."""
        return Needs(
            self.logprobs | other.logprobs,
            self.reference or other.reference,
            self.reference_logprobs | other.reference_logprobs,
            self.entropy_gradient or other.entropy_gradient,
            self.evictions or other.evictions,
            self.values or other.values,
        )


@dataclass(frozen=True)
class Minibatch:
    """What `Term.prepare` sees: the rows of one optimizer step, before they are split into microbatches.

    Attributes:
      batch: `[batch, ...]`.
      mask: `[batch, R]` tokens that count: responses without rows left out and without truncated completions.
      replay: log-probabilities and entropies before the step, under a mask; a forward pass at its first call.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    replay: Callable[[Visibility], Replay]

    @property
    def trajectory(self) -> Trajectory:
        return self.batch.trajectory


@dataclass(frozen=True)
class TermInputs:
    """What `Term.evaluate` sees of one microbatch; arrays are `[rows, R]`, log-probabilities in nats.

    Attributes:
      batch: rows of the microbatch. mask: tokens that count.
      prepared: what `Term.prepare` returned, for these rows.
      logprobs, entropy: of the learner, under its own mask. Only log-probabilities have a gradient, unless a term needs
        `entropy_gradient`.
      hidden: `[rows, R, hidden]` states from which the response tokens are predicted.
      logprobs_under: the policy's log-probabilities by mask, with a gradient.
      reference_logprobs: those of the reference policy by mask.
      values: the critic's values; None unless a term needs them.
      evictions: `[rows, layers, kv_heads, compressions]` log-probabilities of the draws; None unless a term needs them.
      model, params: the policy. reference: parameters of the reference policy, or None.
      step: optimizer steps taken.
    """

    batch: TrainBatch
    mask: Bool[Array, "rows R"]
    prepared: Any
    logprobs: Float[Array, "rows R"]
    entropy: Float[Array, "rows R"]
    hidden: Float[Array, "rows R hidden"]
    logprobs_under: Mapping[Visibility, Float[Array, "rows R"]]
    reference_logprobs: Mapping[Visibility, Float[Array, "rows R"]]
    values: Float[Array, "rows R"] | None
    evictions: Float[Array, "rows layers kv_heads compressions"] | None
    model: LanguageModel
    params: Params
    reference: Params | None
    step: Int[Array, ""]

    @property
    def trajectory(self) -> Trajectory:
        return self.batch.trajectory

    @property
    def advantages(self) -> Float[Array, "rows _"]:
        """`[rows, 1]` of responses, or `[rows, R]` where every token has its own."""
        advantages = self.batch.advantages
        return advantages[:, None] if advantages.ndim == 1 else advantages


@any_leaves
class TermOutputs(struct.PyTreeNode):
    """What a term computes for one microbatch.

    Attributes:
      loss: its summand, before the coefficient: a weighted sum, so that microbatches add up.
      metrics: name -> scalar, summed over microbatches and logged.
      rows: pytree of arrays `[rows, ...]` for `Term.metrics`, without gradient.
    """

    loss: Float[Array, ""]
    metrics: Metrics = struct.field(default_factory=dict)
    rows: Any = ()


@dataclass(frozen=True)
class TermResults:
    """What `Term.metrics` sees: a whole minibatch after its microbatches.

    Attributes:
      batch, mask: as in `Minibatch`.
      prepared: what `Term.prepare` returned. rows: `TermOutputs.rows` of all rows.
      step: optimizer steps taken before this one.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    prepared: Any
    rows: Any
    step: Int[Array, ""]


@dataclass(frozen=True)
class LearnerSetup:
    """What `Term.check` sees: the parts of an `UpdateConfig` that a term may not go with.

    Attributes:
      terms: all of them.
      visibility, reference_sync, pack_columns, rows_per_prompt: as in `UpdateConfig`.
    """

    terms: tuple[Term, ...]
    visibility: Visibility
    reference_sync: ReferenceSync | None
    pack_columns: int | None
    rows_per_prompt: int


@dataclass(frozen=True)
class Term:
    """Base of all terms: a frozen dataclass, hashable. A subclass defines `evaluate`, and more where it has to.

    Put your own into `UpdateConfig(terms=(...,))`; see docs/recipes/loss.md.
    """

    @property
    def needs(self) -> Needs:
        """What the update must compute for this term."""
        return Needs()

    def check(self, setup: LearnerSetup) -> None:
        """Raises ValueError for a learner that this term cannot be a part of."""

    def coefficient(self, step: Int[Array, ""]) -> float | Array:
        """The factor of this term in the loss, at an optimizer step."""
        return 1.0

    def prepare(self, minibatch: Minibatch) -> Any:
        """A pytree of arrays `[batch, ...]` that depend on the whole minibatch. Default: the weights `[batch, R]` of a
        mean over all tokens that count."""
        return TokenMean().weights(minibatch.mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        """The summand of one microbatch."""
        raise TypeError(f"{type(self).__name__} has no evaluate: its class must define it")

    def metrics(self, results: TermResults) -> Metrics:
        """Scalars of the whole minibatch, to log."""
        return {}

    def learns(self, results: TermResults) -> Bool[Array, ""]:
        """Whether anything in the minibatch has a gradient for this term. Without any such term the step changes no
        parameter."""
        return results.mask.any()


def joint_needs(terms: tuple[Term, ...]) -> Needs:
    """What all of these terms need."""
    return functools.reduce(operator.or_, (term.needs for term in terms), Needs())
