"""Terms of the objective: policy or preference loss, distillation, entropy, value, evictions, or your own.

    loss = sum over terms of  term.coefficient(step) * term.evaluate(inputs).loss

    once per minibatch     term.prepare(minibatch)   token weights, computed before the batch is split
    every microbatch       term.evaluate(inputs)     its loss, in one forward pass shared by all terms
    once per minibatch     term.metrics(results)     metrics other than sums

A term declares its `Needs`, which the update computes once for all terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.config import check_choice
from smd_jax.learner.forward import Replay, Visibility
from smd_jax.learner.state import Metrics, TrainBatch
from smd_jax.learner.step import ReferenceSync
from smd_jax.losses.weighting import TokenMean
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.pytrees import PyTreeNode


@dataclass(frozen=True)
class Needs:
    """Inputs of a term in addition to the learner's log-probabilities and entropies.

    Attributes:
      logprobs: masks under which the policy's log-probabilities are needed; a mask other than the learner's costs an
        extra forward and backward pass.
      reference: whether the term reads the parameters of the reference policy.
      reference_logprobs: masks under which the reference's log-probabilities are needed, one forward pass each.
      entropy_gradient: whether the entropies need a gradient. Without it, a loss that differentiates `inputs.entropy`
        is refused.
      evictions: whether the term reads the log-probabilities of the recorded draws of evictions.
      values: whether the term reads the critic's values.
      router: whether the term reads the router logits of a model with experts.

    Raises:
      ValueError: for a mask that is neither "shadow" nor "dense".
    """

    logprobs: frozenset[Visibility] = frozenset()
    reference: bool = False
    reference_logprobs: frozenset[Visibility] = frozenset()
    entropy_gradient: bool = False
    evictions: bool = False
    values: bool = False
    router: bool = False

    def __post_init__(self) -> None:
        for field in ("logprobs", "reference_logprobs"):
            for mask in getattr(self, field):
                check_choice(f"the masks in {field} of Needs", mask, get_args(Visibility))

    def __or__(self, other: Needs) -> Needs:
        """The union of both."""
        fields = (field.name for field in dataclasses.fields(self))
        return Needs(**{name: getattr(self, name) | getattr(other, name) for name in fields})


class ComputedLogprobs(dict[Visibility, Array]):
    """Log-probabilities by mask. A mask that no term needs raises a KeyError that names the field of `Needs`."""

    def __init__(self, field: str, computed: Mapping[Visibility, Array]) -> None:
        super().__init__(computed)
        self.field = field

    def __missing__(self, mask: object) -> Array:
        raise KeyError(f"expected a term that reads {mask!r} to declare it: needs = Needs({self.field}={{{mask!r}}})")


@dataclass(frozen=True)
class Minibatch:
    """Input of `Term.prepare`: the rows of one optimizer step, before they are split into microbatches.

    Attributes:
      batch: `[batch, ...]`.
      mask: `[batch, R]` counted tokens, without left-out rows and masked truncated completions.
      replay: log-probabilities and entropies before the step, under a mask; its first call costs a forward pass.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    replay: Callable[[Visibility], Replay]

    @property
    def trajectory(self) -> Trajectory:
        return self.batch.trajectory


@dataclass(frozen=True)
class TermInputs:
    """Input of `Term.evaluate`: one microbatch. Arrays are `[rows, R]`, log-probabilities in nats.

    Attributes:
      batch: rows of the microbatch.
      mask: counted tokens.
      prepared: result of `Term.prepare` for these rows.
      logprobs, entropy: of the learner under its mask. The entropies of a term have a gradient only if it needs
        `entropy_gradient`; otherwise take `jax.lax.stop_gradient(inputs.entropy)` in a loss.
      hidden: `[rows, R, hidden]` states that predict the response tokens.
      logprobs_under: the policy's log-probabilities by mask, with a gradient.
      reference_logprobs: the reference policy's log-probabilities by mask.
      values: the critic's values; None unless a term needs them.
      evictions: `[rows, layers, kv_heads, compressions]` log-probabilities of the draws; None unless a term needs them.
      router: `[rows, T, mixtures, count]` router logits of all tokens; None unless a term needs them.
      model, params: the policy.
      reference: parameters of the reference policy, or None.
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
    router: Float[Array, "rows T mixtures count"] | None = None

    @property
    def trajectory(self) -> Trajectory:
        return self.batch.trajectory

    @property
    def advantages(self) -> Float[Array, "rows _"]:
        """`[rows, 1]` of responses, or `[rows, R]` of tokens."""
        advantages = self.batch.advantages
        return advantages[:, None] if advantages.ndim == 1 else advantages


class TermOutputs(PyTreeNode):
    """Outputs of a term for one microbatch.

    Attributes:
      loss: its loss before the coefficient, a weighted sum over tokens, so that microbatches add up.
      metrics: name -> scalar, summed over microbatches and logged.
      rows: pytree of arrays `[rows, ...]` for `Term.metrics`, without gradient; with `pack_columns` `[rows, K]`.
    """

    loss: Float[Array, ""]
    metrics: Metrics = struct.field(default_factory=dict)
    rows: Any = ()


@dataclass(frozen=True)
class TermResults:
    """Input of `Term.metrics`: a whole minibatch after its microbatches.

    Attributes:
      batch, mask: as in `Minibatch`.
      prepared: result of `Term.prepare`.
      rows: `TermOutputs.rows` of all rows.
      step: optimizer steps taken before this one.
    """

    batch: TrainBatch
    mask: Bool[Array, "batch R"]
    prepared: Any
    rows: Any
    step: Int[Array, ""]


@dataclass(frozen=True)
class LearnerSetup:
    """Input of `Term.check`: the parts of an `UpdateConfig` that a term may not support.

    Attributes:
      terms: all terms.
      visibility, reference_sync, pack_columns: as in `UpdateConfig`.
      shown_visibility: for errors, with the correction that implies it where none was set.
    """

    terms: tuple[Term, ...]
    visibility: Visibility
    reference_sync: ReferenceSync | None
    pack_columns: int | None
    shown_visibility: str


@dataclass(frozen=True)
class Term:
    """Base of all terms: a frozen, hashable dataclass. A subclass defines `evaluate`, and other methods as needed.

    Pass your own in `UpdateConfig(terms=(...,))`; see docs/recipes/loss.md.

    Attributes:
      needs: inputs that the update must compute for this term; a property if they depend on fields.
    """

    needs: ClassVar[Needs] = Needs()

    def check(self, setup: LearnerSetup) -> None:
        """Raises ValueError for a learner that this term does not support."""

    def coefficient(self, step: Int[Array, ""]) -> float | Array:
        """The coefficient of this term in the loss at an optimizer step."""
        return 1.0

    def prepare(self, minibatch: Minibatch) -> Any:
        """A pytree of arrays `[batch, ...]` that depend on the whole minibatch. Default: the weights `[batch, R]` of a
        mean over all counted tokens."""
        return TokenMean().weights(minibatch.mask)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        """The loss of one microbatch."""
        raise TypeError(f"{type(self).__name__} has no evaluate: its class must define it")

    def metrics(self, results: TermResults) -> Metrics:
        """Scalars of the whole minibatch, to log."""
        return {}

    def learns(self, results: TermResults) -> Bool[Array, ""] | Int[Array, ""]:
        """Whether the minibatch has a learning signal for this term, or its number of examples. If no term has one, the
        step changes no parameter."""
        return results.mask.any()
