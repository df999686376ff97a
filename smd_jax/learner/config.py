"""One optimizer step: the terms of its objective and the sizes of its passes."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass, replace
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from smd_jax.config import check_choice, check_instance
from smd_jax.corrections.base import Correction, Shadow
from smd_jax.corrections.chain import claims_no_mismatch
from smd_jax.learner.auxiliary_terms import EntropyTerm, ValueTerm
from smd_jax.learner.distill import DistillTerm
from smd_jax.learner.evictions import EvictionTerm
from smd_jax.learner.forward import Visibility as Visibility
from smd_jax.learner.forward import is_traced
from smd_jax.learner.pair_term import PairTerm
from smd_jax.learner.policy_term import DenseLearner, DensePolicyTerm, PolicyTerm
from smd_jax.learner.state import TrainBatch, TrainState, reference_params
from smd_jax.learner.step import ReferenceSync
from smd_jax.learner.terms import LearnerSetup, Needs, Term
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.message.masks import ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.typed_fields import check_types

# All that a preference loss reads; the other fields define a policy loss or are added to it.
FIELDS_OF_PAIRS = ("pairs", "visibility", "reference_sync", "microbatch_size")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """One optimizer step. The fields define the terms of the objective; each term checks its own.

    Attributes:
      visibility: "shadow" replays the sampler's mask in the learner, so that both are one policy; "dense" trains the
        full-context policy on the sparse sampler's tokens. None: "shadow" with the correction `Shadow()`, "dense" with
        any other, see `learner_visibility`.
      loss: the policy loss.
      policy_coef: weight of the policy loss; 0 disables it.
      entropy_coef: weight of the entropy bonus, `loss -= entropy_coef * mean entropy` in nats, independent of
        `policy_coef`. The mean is over the counted tokens, including those that a correction rejects.
      top_entropy_quantile: share of tokens with the highest entropy that get the policy loss and the entropy bonus
        (arXiv:2506.01939: 0.2); 1: all. The KL and the denominators include all tokens. The entropies are the sampler's
        recorded ones with shadow masks, unless a correction measures the mismatch; otherwise they cost a forward pass.
      eviction_coef: weight of the policy loss of evictions (`smd_jax.losses.policy.eviction_loss`) sampled by
        `smd.eviction.LearnedGate`; 1 weights evictions like tokens. 0: the gate has no gradient.
      correction: correction of the mismatch between sampler and learner. `Shadow()` claims that there is none. All
        others work under either visibility. Under "shadow" they see only what the mask does not explain, such as the
        rounding of another engine.
      distill: distillation, or None. Under "dense" the teacher must be another policy: "anchor" or "ema".
      dense_learner: a dense learner on the same weights, or None; only under "shadow". Entropy bonus, distillation and
        metrics are those of the learner with shadow masks.
      value: PPO's critic, or None. It uses the learner's hidden states and therefore its mask.
      kl_in_reward: subtract the KL, times `loss.beta`, from the rewards instead of adding it to the loss; see
        `smd_jax.losses.kl.kl_penalty`. It is then measured once per rollout, before the first step.
      reference_sync: updates of the reference; None: it is frozen.
      mask_truncated_completions: leave out truncated responses.
      microbatch_size: rows per forward and backward pass; gradients are summed in float32 or wider. None: all rows.
      pack_columns: columns of a row that sequences share, see `smd_jax.learner.packed`; it must hold the longest one,
        and a microbatch then has `microbatch_size` such rows. None: one sequence a row, the rest of it padding.
      rows_per_prompt: consecutive rows that have the same prompt, which the model then reads once for all of them, see
        `smd_jax.model.shared_prompt`; it must divide the group and, without `pack_columns`, the microbatch. With
        `pack_columns`, every number above 1 shares equal beginnings wherever masks allow it, see
        `smd_jax.message.packing`. 1: no sharing.
      terms: additional terms of the objective, see `smd_jax.learner.terms`.
      pairs: the preference loss of online DPO in place of the policy loss, or None. Rows of a batch are then pairs, see
        `smd_jax.learner.pair_term`, and only `visibility`, `reference_sync` and `microbatch_size` may be set with it.
        Under "dense" the full-context policy learns from the sparse sampler's pairs, without a correction.
    """

    visibility: Visibility | None = None
    loss: LossConfig = LossConfig()
    policy_coef: float = 1.0
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    eviction_coef: float = 0.0
    correction: Correction = Shadow()
    distill: DistillConfig | None = None
    dense_learner: DenseLearner | None = None
    value: ValueConfig | None = None
    kl_in_reward: bool = False
    reference_sync: ReferenceSync | None = None
    mask_truncated_completions: bool = False
    microbatch_size: int | None = None
    pack_columns: int | None = None
    rows_per_prompt: int = 1
    terms: tuple[Term, ...] = ()
    pairs: DPOConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.visibility is not None:
            check_choice("visibility", self.visibility, get_args(Visibility))
        if self.pairs is not None:
            set_fields = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            if unread := sorted(set(set_fields) - set(FIELDS_OF_PAIRS)):
                raise ValueError(f"expected no fields with pairs but {FIELDS_OF_PAIRS[1:]}; got {unread}")
        seen, implied = self.learner_visibility, "" if self.visibility else f" (implied by {self.correction})"
        shown = f"{seen!r}{implied}"
        setup = LearnerSetup(self.objective, seen, self.reference_sync, self.pack_columns, shown)
        for term in self.objective:
            term.check(setup)
        if self.policy_coef == 0 and self.distill is None and self.eviction_coef == 0 and not self.terms:
            raise ValueError(f"expected policy_coef > 0, or 0 with another term to learn from; got {self.policy_coef}")
        if self.reference_sync is not None and not self.needs_reference:
            raise ValueError(
                "expected beta > 0 or distillation in direction 'ema' with a reference_sync, because nothing else "
                f"reads a reference; got {self.reference_sync}"
            )
        if self.needs.evictions and (self.learner_visibility == "dense" or self.pack_columns is not None):
            raise ValueError(
                "expected visibility 'shadow' with an eviction_coef or another term that needs evictions, because "
                "their probabilities are known only under the sampler's mask; and no pack_columns; got "
                f"{shown} and {self.pack_columns}"
            )
        if self.needs.router and (self.needs.evictions or self.pack_columns is not None):
            raise ValueError(
                "expected no eviction_coef and no pack_columns with a term that needs the router's logits, such as "
                "BalanceTerm: they come from a pass over whole rows that gives nothing else; got eviction_coef "
                f"{self.eviction_coef} and pack_columns {self.pack_columns}"
            )
        size, rows = self.microbatch_size, self.rows_per_prompt
        if size is not None and size < 1:
            raise ValueError(f"expected microbatch_size >= 1; got {size}")
        if self.pairs is not None and size is not None and size % 2:
            raise ValueError(f"expected a microbatch_size of whole pairs, two rows each; got {size}")
        # Packed rows are not the rows of the rollout.
        if rows < 1 or (size is not None and self.pack_columns is None and size % rows):
            raise ValueError(f"expected rows_per_prompt >= 1 that divide microbatch_size {size}; got {rows}")
        if self.pack_columns is not None and (self.pack_columns < 2 or size is None):
            raise ValueError(
                f"expected pack_columns >= 2 with a microbatch_size, which counts such rows; got "
                f"{self.pack_columns} and {size}"
            )

    @property
    def objective(self) -> tuple[Term, ...]:
        """All terms, the policy loss first: those of the fields and `terms`."""
        if self.pairs is not None:
            return (PairTerm(self.pairs, self.learner_visibility),)
        terms: list[Term] = [self.policy_term]
        if self.dense_learner is not None:
            terms.append(
                DensePolicyTerm(
                    self.loss,
                    self.policy_coef,
                    self.dense_learner.correction,
                    kl_in_reward=self.kl_in_reward,
                    top_entropy_quantile=self.top_entropy_quantile,
                    share=self.dense_learner.share,
                )
            )
        if self.entropy_coef != 0:
            terms.append(EntropyTerm(self.entropy_coef, self.policy_term.choice))
        if self.eviction_coef != 0:
            terms.append(EvictionTerm(self.eviction_coef))
        if self.distill is not None:
            terms.append(DistillTerm(self.distill))
        if self.value is not None:
            terms.append(ValueTerm(self.value))
        return (*terms, *self.terms)

    @property
    def policy_term(self) -> PolicyTerm:
        """The policy loss of the learner; with a dense learner its share of it."""
        share = 0.0 if self.dense_learner is None else self.dense_learner.share
        return PolicyTerm(
            self.loss,
            (1 - share) * self.policy_coef,
            self.correction,
            self.learner_visibility,
            self.kl_in_reward,
            self.top_entropy_quantile,
        )

    @property
    def learner_visibility(self) -> Visibility:
        """`visibility`, or what the correction implies."""
        return self.visibility or ("shadow" if claims_no_mismatch(self.correction) else "dense")

    @property
    def needs(self) -> Needs:
        """The joint needs of all terms."""
        return functools.reduce(operator.or_, (term.needs for term in self.objective), Needs())

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """The correction of each learner."""
        return (self.correction,) if self.dense_learner is None else (self.correction, self.dense_learner.correction)

    @property
    def rows_together(self) -> int:
        """Consecutive rows that no microbatch separates."""
        return self.rows_per_prompt if self.pairs is None else 2

    @property
    def needs_reference(self) -> bool:
        """Whether the train state must have reference parameters."""
        return self.needs.reference or bool(self.needs.reference_logprobs)


def without_packing(config: UpdateConfig, rows: int) -> UpdateConfig:
    """The configuration with one sequence a row. A microbatch then has at most as many rows as one of packed rows, a
    number that divides `rows`."""
    if config.pack_columns is None:
        return config
    assert config.microbatch_size is not None
    size = next(part for part in range(min(config.microbatch_size, rows), 0, -1) if rows % part == 0)
    return replace(config, microbatch_size=size, pack_columns=None, rows_per_prompt=1)


def check_reference(config: UpdateConfig, state: TrainState) -> None:
    """Raises ValueError if the state lacks required reference parameters."""
    if config.needs_reference and reference_params(state) is None:
        needs = [type(t).__name__ for t in config.objective if t.needs.reference or t.needs.reference_logprobs]
        raise ValueError(
            f"expected reference parameters in the train state for {', '.join(needs)}"
            f"{' (which needs them with beta > 0)' if needs == ['PolicyTerm'] else ''}: "
            "init_state(params, …, reference=params); got None"
        )


def check_old_logprobs(config: UpdateConfig, batch: TrainBatch) -> None:
    """Raises ValueError if a correction would compare the sampler's log-probabilities with themselves.

    Call it outside of the update's own jit, in which one array passed twice is two tracers. Equal values are refused
    only for a dense learner, at tokens whose query saw fewer keys in the sampler: others may be bitwise equal.
    """
    check_instance("batch", batch, TrainBatch)
    given = {"old_logprobs": batch.old_logprobs, "dense_old_logprobs": batch.dense_old_logprobs}
    visibilities: tuple[Visibility, ...] = (config.learner_visibility, "dense")
    for correction, visibility, (name, old) in zip(config.corrections, visibilities, given.items(), strict=False):
        if old is None or not correction.traits.uses_mismatch:
            continue
        # After a batch is split into minibatches they are two objects.
        if old is batch.trajectory.logprobs or visibility == "dense" and _is_the_samplers(old, batch.trajectory):
            raise ValueError(
                f"expected {name} of the learner, or None, with which the update computes them, for the correction "
                f"{correction}; got the sampler's own, trajectory.logprobs, which have no mismatch"
            )


def _is_the_samplers(old: Float[Array, "batch R"], trajectory: Trajectory) -> bool:
    """Whether these are the log-probabilities of a sampler that evicted keys. False under a trace."""
    if is_traced((old, trajectory)) or not isinstance(trajectory.mask, ShadowMask):
        return False
    if trajectory.logprobs is None or old.shape != trajectory.logprobs.shape:  # raises its own error
        return False
    with jax.ensure_compile_time_eval():  # of a constant batch, also in a jit of the caller's
        return bool(_repeats(old, trajectory))


@jax.jit
def _repeats(old: Float[Array, "batch R"], trajectory: Trajectory) -> Bool[Array, ""]:
    """Whether `old` equals the sampler's at all tokens whose query saw fewer keys and whose probability is below 1."""
    keys = jnp.where(trajectory.valid[:, None, None], trajectory.mask.evicted_at, jnp.iinfo(jnp.int32).max)
    queries = trajectory.prompt_width - 1 + jnp.arange(old.shape[1])[None]
    saw_fewer = keys.min(axis=(1, 2, 3))[:, None] <= queries
    tells = trajectory.response_mask & (trajectory.logprobs != 0) & saw_fewer
    return tells.any() & jnp.all((old == trajectory.logprobs) | ~tells)
