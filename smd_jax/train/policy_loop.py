"""Base of GRPO, RLOO and PPO: a policy loss, its compiled programs, and the optimizer steps on a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.devices.sharding import check_rows, check_sequence
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.config import UpdateConfig, check_reference
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.mismatch_guard import DIFFERENCE, is_beyond
from smd_jax.learner.objective import counted_tokens
from smd_jax.learner.packed import check_windows, make_packed_update
from smd_jax.learner.packs import rows_at_once
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, reference_params
from smd_jax.learner.step import check_sync, skip_step
from smd_jax.learner.update import Update, make_update
from smd_jax.losses.kl import kl_penalty
from smd_jax.losses.weighting import FixedLength
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics, token_mean
from smd_jax.model.protocol import Params
from smd_jax.train.async_rollout import staleness_metrics
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.minibatches import minibatches, over_steps
from smd_jax.train.samples import Samples


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(LoopConfig):
    """Configuration of an algorithm with a policy loss; the other attributes are those of LoopConfig.

    Attributes:
      update: the learner's configuration.
    """

    update: UpdateConfig = UpdateConfig()

    @property
    def is_exact(self) -> bool:
        return self.update.learner_visibility == "shadow"


@dataclass(frozen=True)
class PolicyLoop(Loop):
    """A loop whose learner has a policy loss; see Loop. Its jitted functions are cached. A subclass defines
    `rollout_batch` and `learner_batch`.

    Raises:
      ValueError: for rows or columns that do not divide as the update needs them, and for an eviction_coef or
        pack_columns that the eviction policy or the rollout does not support.
    """

    config: PolicyConfig

    def check_update(self) -> None:
        config, update = self.config, self.config.update
        rollout, columns = config.rollout, update.pack_columns
        minibatch = config.learner_rows // config.minibatches
        if columns is None:
            count_parts(minibatch, update.microbatch_size)
        else:
            if columns < config.columns:
                raise ValueError(
                    f"expected pack_columns of at least {config.columns}, the longest sequence; got {columns}"
                )
            # As `smd_jax.learner.packed` would, but before anything is compiled.
            if rollout.quant is not None or rollout.min_new_tokens:
                raise ValueError(
                    "expected rollouts without quant and min_new_tokens with pack_columns, which moves tokens; got "
                    f"quant {rollout.quant} and min_new_tokens {rollout.min_new_tokens}"
                )
            if config.policy.gate is not None:
                raise ValueError(
                    f"expected pack_columns None with {type(config.policy).__name__}, whose draws name columns that "
                    f"packing would move; got {columns}"
                )
            check_sequence(columns, self.model.shape.num_heads, self.mesh)
            if update.rows_per_prompt > 1:
                check_windows(self.model.shape, update)
        if update.needs.evictions and config.policy.gate is None:
            raise ValueError(
                "expected an eviction policy that records its draws, such as LearnedGate(), with an eviction_coef or "
                f"an EvictionTerm; got {config.policy}, {update.eviction_coef} and terms {update.terms}"
            )
        if config.group_size % update.rows_per_prompt:
            raise ValueError(
                f"expected rows_per_prompt that divide group_size {config.group_size}; got {update.rows_per_prompt}"
            )
        together = config.columns + (self.unpacked_config.rows_per_prompt - 1) * rollout.max_new_tokens
        check_sequence(together, self.model.shape.num_heads, self.mesh)
        size, rows = update.microbatch_size, self.unpacked_config.rows_together
        whole = f"prompts_per_step * {'group_size' if update.pairs is None else 2} / minibatches"
        what = f"a microbatch ({whole if size is None else 'microbatch_size'})"
        what += "" if rows == 1 else f", counted in {rows} rows of one prompt (rows_per_prompt, or pairs),"
        check_rows((size or minibatch) // rows, self.mesh, what)

    # --- programs

    @cached_property
    def update(self) -> Update:
        """The optimizer step; with `pack_columns` over packed rows, else jitted."""
        make, update = make_packed_update if self.packs_rows else make_update, self.config.update
        if update.loss.weighting == FixedLength(None):
            # The longest allowed response instead of a batch's columns.
            longest = FixedLength(self.config.rollout.max_new_tokens)
            update = replace(update, loss=replace(update.loss, weighting=longest))
        return make(self.model, self.optimizer, update, self.max_difference_of_update)

    @cached_property
    def replay(self) -> ReplayFunction:
        """Log-probabilities of a rollout as the learner sees it, at most `rows_of_a_pass` rows at a time."""
        rows_per_prompt = self.unpacked_config.rows_per_prompt
        return make_replay(self.model, self.config.update.learner_visibility, self.rows_of_a_pass, rows_per_prompt)

    @cached_property
    def dense_replay(self) -> ReplayFunction:
        """The dense policy's log-probabilities of a rollout."""
        return make_replay(self.model, "dense", self.rows_of_a_pass, self.unpacked_config.rows_per_prompt)

    @cached_property
    def skip(self) -> Callable[[TrainState], TrainState]:
        """The step of a minibatch in which no row counts. With a reference sync it is jitted and donates the state."""
        sync = self.config.update.reference_sync
        return skip_step if sync is None else jax.jit(lambda state: skip_step(state, sync), donate_argnums=0)

    # --- sizes

    @property
    def packs_rows(self) -> bool:
        return self.config.update.pack_columns is not None

    @property
    def rows_of_a_pass(self) -> int:
        """Rows of one forward pass without packing; they divide a rollout."""
        config = self.config
        return rows_at_once(config.learner_rows // config.minibatches, config.update)

    @property
    def unpacked_config(self) -> UpdateConfig:
        """The update's configuration without packing, with `rows_of_a_pass` rows per microbatch."""
        if not self.packs_rows:
            return self.config.update
        rows = self.rows_of_a_pass
        return replace(self.config.update, pack_columns=None, microbatch_size=rows, rows_per_prompt=1)

    # --- a rollout

    @property
    def credits_turns(self) -> bool:
        """Whether each turn of a conversation has its own advantage."""
        return self.environment is not None and self.environment.credit == "turn"

    def check(self, state: TrainState) -> None:
        super().check(state)
        check_reference(self.config.update, state)
        check_sync(state, self.config.update.reference_sync)

    def rollout_batch(
        self, params: Params, samples: Samples, penalty: Float[Array, "batch R"] | None
    ) -> tuple[TrainBatch, Metrics]:
        """The batch of a whole rollout, before it is split into minibatches, and metrics of it.

        Args:
          penalty: of `kl_penalty`, subtracted from the rewards of tokens; None without a KL in the reward.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rollout_batch")

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        """Takes the optimizer steps of one rollout.

        A minibatch in which no row counts does not change the parameters, although momentum and weight decay would.
        With distillation every token counts; for custom terms, `Term.learns` decides. A rollout whose mismatch exceeds
        `max_difference` gets no step, and `step` refuses it.
        """
        config, update = self.config, self.config.update
        index = int(state.step) // config.steps_per_rollout
        needs_rows = update.distill is None and not update.terms
        with jax.set_mesh(self.mesh):
            penalty, kl = self.kl_penalty(state, samples.trajectory, jax.tree.map(jnp.asarray, samples.counted_rows))
            batch, of_batch = self.rollout_batch(state.params, samples, penalty)
            before: Metrics = {}  # where the only step sees the whole rollout, it has these metrics itself
            if not config.first_pass_sees_all:
                # Before the first update, which donates these parameters. If the sampler's log-probabilities are used
                # as old ones, only a replay can measure the difference.
                params = state.params if state.sampler_params is None else state.sampler_params
                known = batch.old_logprobs
                if known is None or update.policy_term.uses_sampler_logprobs_as_old:
                    known = self.replay(params, batch.trajectory)
                before = compare(update, batch, known)
                if is_beyond(float(before[DIFFERENCE]), self.max_difference):
                    return state, before | of_batch | kl
            steps = []
            # A batch that counts all of its rows, as one of pairs, may have others than the rollout.
            counted_rows = None if batch.counted_rows is None else samples.counted_rows
            for part in minibatches(batch, state, config, self.mesh, counted_rows):
                # The update itself finds minibatches that are empty for other reasons.
                if needs_rows and part.counted_rows is not None and not bool(part.counted_rows.any()):
                    state = self.skip(state)
                    continue
                state, metrics = self.update(state, part)
                steps.append(metrics)
        stale = {} if state.sampler_params is None or not steps else staleness_metrics(steps[0], index)
        return state, over_steps(steps, before) | stale | of_batch | kl

    def old_logprobs(self, params: Params, trajectory: Trajectory) -> Array | None:
        """Log-probabilities of the learner before the update; None if no term reads them, or the update has them.

        With shadow masks the learner is the sampler, whose log-probabilities are known, unless a correction has to
        measure the difference or a response has one ratio. Other learners need a forward pass if they take more than
        one step.
        """
        update = self.config.update
        if not update.correction.traits.needs_old:
            return None
        if update.policy_term.uses_sampler_logprobs_as_old:
            return trajectory.logprobs
        return None if self.config.first_pass_sees_all else self.replay(params, trajectory)

    def kl_penalty(
        self, state: TrainState, trajectory: Trajectory, counted_rows: Array | None
    ) -> tuple[Float[Array, "batch R"] | None, Metrics]:
        """The KL to the reference that is subtracted from the reward of every token, and `kl`, its mean over counted
        tokens without the coefficient; (None, {}) where the KL is in the loss or absent.

        Costs a forward pass of the reference, and one of a learner whose log-probabilities are not the sampler's.
        """
        update = self.config.update
        if not update.kl_in_reward:
            return None, {}
        reference = self.replay(reference_params(state), trajectory)
        policy = trajectory.logprobs if update.policy_term.matches_sampler else self.replay(state.params, trajectory)
        mask = counted_tokens(update, trajectory, counted_rows)
        penalty = kl_penalty(policy, reference, trajectory.response_mask, update.loss.beta)
        return penalty, {"kl": token_mean(penalty, mask) / update.loss.beta}


@partial(jax.jit, static_argnums=0)
def compare(update: UpdateConfig, batch: TrainBatch, logprobs: Float[Array, "batch R"]) -> Metrics:
    """SAMPLER_LEARNER_METRICS of a rollout, from the learner's log-probabilities before any step."""
    mask = counted_tokens(update, batch.trajectory, batch.counted_rows)
    return sampler_learner_metrics(batch.trajectory.logprobs, logprobs, mask)
