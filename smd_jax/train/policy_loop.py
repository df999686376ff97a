"""What GRPO, RLOO and PPO share: a policy loss, its optimizer steps, and the comparison of sampler and learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax
from jaxtyping import Array, Float

from smd_jax.devices.processes import on_host
from smd_jax.devices.sharding import check_rows, check_sequence
from smd_jax.learner.config import UpdateConfig, Visibility, check_rows_of, takes_sampler_for_old
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.mismatch_guard import DIFFERENCE
from smd_jax.learner.packed import make_packed_update
from smd_jax.learner.packs import rows_at_once
from smd_jax.learner.prepare import counted_tokens
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, check_reference, reference_params
from smd_jax.learner.step import check_sync, skip_step
from smd_jax.learner.update import Update, make_update
from smd_jax.losses.distillation import has_whole_share
from smd_jax.losses.kl import kl_penalty
from smd_jax.losses.weighting import FixedLength
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics, token_mean
from smd_jax.model.protocol import Params
from smd_jax.sampler.config import RolloutConfig
from smd_jax.train.async_rollout import staleness_metrics
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.minibatches import over_steps


@dataclass(frozen=True)
class PolicyConfig(LoopConfig):
    """A run of an algorithm with a policy loss; the other attributes are those of LoopConfig.

    Attributes:
      update: the learner.
    """

    update: UpdateConfig = UpdateConfig()


@dataclass(frozen=True)
class PolicyLoop(Loop):
    """What GRPO, RLOO and PPO share: the update of `smd_jax.learner.update`.

    Raises:
      ValueError: as `Loop`; for rows or columns that do not divide as the update needs them, and an eviction_coef or
        pack_columns with a policy or a rollout that does not go with it.
    """

    config: PolicyConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        minibatch = config.completions_per_step // config.minibatches
        if config.update.pack_columns is None:
            check_rows_of(config.update, minibatch, config.rollout.max_new_tokens)
        else:
            self._check_columns(config.update.pack_columns)
            check_sequence(config.update.pack_columns, self.model.shape.num_heads, self.mesh)
            _check_packable(config)
        if config.update.eviction_coef and config.policy.gate is None:
            raise ValueError(
                "expected an eviction policy that records its draws, such as LearnedGate(), with an eviction_coef; got "
                f"{config.policy} and {config.update.eviction_coef}"
            )
        rows = config.update.rows_per_prompt
        if config.group_size % rows:
            raise ValueError(f"expected rows_per_prompt that divide group_size {config.group_size}; got {rows}")
        together = config.columns + (rows - 1) * config.rollout.max_new_tokens
        check_sequence(together, self.model.shape.num_heads, self.mesh)
        size = config.update.microbatch_size
        what = f"a microbatch ({'prompts_per_step * group_size / minibatches' if size is None else 'microbatch_size'})"
        what += "" if rows == 1 else f", counted in {rows} rows of one prompt (rows_per_prompt),"
        check_rows((size or minibatch) // rows, self.mesh, what)

    def _check_columns(self, columns: int) -> None:
        longest = self.config.columns
        context = self.model.shape.max_positions
        if not longest <= columns <= context:
            raise ValueError(
                f"expected pack_columns from {longest}, the longest sequence, to {context}, the model's context; got "
                f"{columns}"
            )

    @property
    def compiles_ahead(self) -> bool:
        return self.config.update.pack_columns is None

    @property
    def rows_of_a_pass(self) -> int:
        """Rows of a forward pass by itself, without sequences that share them: as many as divide a rollout."""
        config = self.config
        minibatch = config.completions_per_step // config.minibatches
        return rows_at_once(minibatch, config.update)

    @property
    def unpacked_update(self) -> UpdateConfig:
        """The learner, without sequences that share rows: as much work at a time."""
        update = self.config.update
        if update.pack_columns is None:
            return update
        return replace(update, pack_columns=None, microbatch_size=self.rows_of_a_pass)

    @property
    def response_widths(self) -> tuple[int, ...]:
        """Columns of a response, ascending, that the learner may run over: those of which distillation can take its
        share of positions."""
        if self.config.update.pack_columns is not None:
            # Packed rows have one size, whatever the longest response.
            return (self.config.rollout.max_new_tokens,)
        distill = self.config.update.distill
        fraction = 1.0 if distill is None else distill.position_fraction
        return tuple(width for width in super().response_widths if has_whole_share(width, fraction))

    @cached_property
    def update(self) -> Update:
        # Made once a loop: a function that is jitted anew is compiled anew. With packing it is what a plan compiles.
        update = _with_longest(self.unpacked_update, self.config.rollout)
        return make_update(self.model, self.optimizer, update, self._bound_of_update)

    @cached_property
    def packed_update(self) -> Update:
        """`update` over rows that sequences share."""
        update = _with_longest(self.config.update, self.config.rollout)
        return make_packed_update(self.model, self.optimizer, update, self._bound_of_update)

    @property
    def samples_ahead(self) -> bool:
        """Whether rollouts are drawn before the update that they follow."""
        return False

    @property
    def _bound_of_update(self) -> float | None:
        # In later steps the learner has moved on from the sampler, as it should.
        return self.max_difference if self.config.steps_per_rollout == 1 and not self.samples_ahead else None

    @property
    def is_exact(self) -> bool:
        """Whether sampler and learner promise to be one policy."""
        return self.config.update.visibility == "shadow"

    @cached_property
    def replay(self) -> ReplayFunction:
        """The learner's log-probabilities of a rollout, with no more rows at a time than the update has."""
        return self._replay_under(self.config.update.visibility)

    @cached_property
    def dense_replay(self) -> ReplayFunction:
        """The dense policy's log-probabilities of a rollout, as `replay`."""
        return self._replay_under("dense")

    @cached_property
    def reference_replay(self) -> ReplayFunction:
        """The log-probabilities of a rollout under the reference policy, as `replay`."""
        update = self.config.update
        return self._replay_under(update.reference_visibility or update.visibility)

    def _replay_under(self, visibility: Visibility) -> ReplayFunction:
        return make_replay(self.model, visibility, self.rows_of_a_pass, self.config.update.rows_per_prompt)

    @cached_property
    def skip(self) -> Callable[[TrainState], TrainState]:
        """A step in which nothing counts; where it may move the reference it is jitted, and takes the old state's
        buffers."""
        sync = self.config.update.reference_sync
        return skip_step if sync is None else jax.jit(lambda state: skip_step(state, sync), donate_argnums=0)

    @cached_property
    def compare(self) -> Callable[[TrainBatch, Float[Array, "batch R"]], Metrics]:
        """The jitted SAMPLER_LEARNER_METRICS of a rollout, from the learner's log-probabilities before any step."""

        def compare(batch: TrainBatch, logprobs: Float[Array, "batch R"]) -> Metrics:
            mask = counted_tokens(self.config.update, batch.trajectory, batch.counted_rows)
            return sampler_learner_metrics(batch.trajectory.logprobs, logprobs, mask)

        return jax.jit(compare)

    def check(self, state: TrainState) -> None:
        super().check(state)
        check_reference(self.config.update, state)
        check_sync(state, self.config.update.reference_sync)

    def take_steps(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        """The optimizer steps on what a whole rollout has to teach. A minibatch in which nothing counts leaves the
        parameters alone, as momentum and weight decay would not. A distillation counts every token."""
        counted_rows = None if batch.counted_rows is None else on_host(batch.counted_rows)
        # Before the first update, which takes over the buffers of these parameters.
        before = self.before_any_step(state.params if state.behind is None else state.behind, batch)
        if before and self.max_difference is not None and float(before[DIFFERENCE]) > self.max_difference:
            return state, before  # `step` refuses it
        update = self.update if self.config.update.pack_columns is None else self.packed_update
        index = int(state.step) // self.config.steps_per_rollout
        steps = []
        for part in self.minibatches(batch, state, counted_rows):
            # What else can leave a minibatch without anything is seen by the update.
            counted = part.counted_rows if self.config.update.distill is None else None
            if counted is not None and not bool(counted.any()):
                state = self.skip(state)
                continue
            state, metrics = update(state, part)
            steps.append(metrics)
        stale = {} if state.behind is None or not steps else staleness_metrics(steps[0], index)
        return state, over_steps(steps, before) | stale

    def kl_penalty(
        self, state: TrainState, trajectory: Trajectory, counted_rows: Array | None
    ) -> tuple[Float[Array, "batch R"] | None, Metrics]:
        """What the KL to the reference takes off the reward of every token of a rollout; and `kl`, its mean over the
        tokens that count, without the coefficient. (None, {}) where the KL is in the loss or nowhere.

        Costs a forward pass of the reference, and one of a learner that does not take the sampler's word.
        """
        update = self.config.update
        if not update.kl_in_reward:
            return None, {}
        reference = self.reference_replay(reference_params(state), trajectory)
        policy = trajectory.logprobs if takes_sampler_for_old(update) else self.replay(state.params, trajectory)
        mask = counted_tokens(update, trajectory, counted_rows)
        penalty = kl_penalty(policy, reference, trajectory.response_mask, update.loss.beta)
        return penalty, {"kl": token_mean(penalty, mask) / update.loss.beta}

    def before_any_step(self, params: Params, batch: TrainBatch) -> Metrics:
        """SAMPLER_LEARNER_METRICS of the whole rollout; {} where the only step sees all of it and has them itself."""
        # A single step's forward pass is one of the whole rollout at the rollout's parameters. Of several, the first
        # would have been taken when the guard hears of it.
        if self.config.steps_per_rollout == 1 and not self.samples_ahead:
            return {}
        # The guard must see every token, so a learner that takes the sampler's word for the old policy is asked itself.
        known = None if takes_sampler_for_old(self.config.update) else batch.old_logprobs
        return self.compare(batch, self.replay(params, batch.trajectory) if known is None else known)


def _check_packable(config: PolicyConfig) -> None:
    """Raises ValueError for rollouts that `smd_jax.learner.packed.check_packable` would refuse when they are there."""
    rollout = config.rollout
    if rollout.quant is not None or rollout.mask_storage == "boolean" or rollout.min_new_tokens:
        raise ValueError(
            "expected rollouts without quant and min_new_tokens, and with mask_storage 'compact', with pack_columns, "
            f"which moves tokens; got quant {rollout.quant}, min_new_tokens {rollout.min_new_tokens} and mask_storage "
            f"{rollout.mask_storage!r}"
        )
    if config.policy.gate is not None:
        raise ValueError(
            f"expected pack_columns None with {type(config.policy).__name__}, whose draws name columns that packing "
            f"would move; got {config.update.pack_columns}"
        )


def _with_longest(update: UpdateConfig, rollout: RolloutConfig) -> UpdateConfig:
    """The update with the longest response allowed in place of the columns of a mask, which may be fewer."""
    if update.loss.weighting != FixedLength(None):
        return update
    loss = replace(update.loss, weighting=FixedLength(rollout.max_new_tokens))
    return replace(update, loss=loss)
