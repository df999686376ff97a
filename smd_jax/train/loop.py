"""Host-side training loop of all algorithms: prompts ─► rollout ─► rewards ─► optimizer steps.

    loop = GRPOLoop(model, task, tokenizer, optimizer, config)       or PPOLoop, OnlineDPOLoop
    for _ in range(steps):
        state, metrics = loop.step(state)

A step depends only on the state, whose step counter selects the rows and the random numbers. So a restored state
continues bitwise.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from smd_jax.config import check_instance
from smd_jax.devices.process_rows import SamplerPlacement
from smd_jax.devices.processes import all_or_none, is_first, on_host
from smd_jax.devices.sharding import (
    make_mesh,
    sequence_ways,
    shard_batch,
    shard_tree,
    tree_shardings,
)
from smd_jax.learner.config import UpdateConfig, check_reference
from smd_jax.learner.forward import ReplayFunction, make_replay
from smd_jax.learner.mismatch_guard import DIFFERENCE, MismatchGuard, find_wrong_head, first_difference, is_beyond
from smd_jax.learner.objective import counted_tokens
from smd_jax.learner.state import Metrics, TrainBatch, TrainState, reference_params
from smd_jax.learner.step import check_sync, skip_step
from smd_jax.learner.update import Update, make_update
from smd_jax.losses.kl import kl_penalty
from smd_jax.losses.weighting import FixedLength
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import sampler_learner_metrics, token_mean
from smd_jax.model.lora import has_lora
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.engine import Progress
from smd_jax.tasks.dataset_task import own_reward
from smd_jax.tasks.rewards import Rewards, check_failures
from smd_jax.tasks.task import Task, rows_of_step
from smd_jax.text.prompts import Tokenizer, check_vocabulary, repeat_each
from smd_jax.text.stop_strings import stop_table
from smd_jax.train.async_rollout import RolloutAhead, staleness_metrics
from smd_jax.train.compile_ahead import compiling
from smd_jax.train.conversations import ConversationRollouts, EnvironmentConfig
from smd_jax.train.grading import grade, reward_columns, rollout_metrics
from smd_jax.train.loop_config import LoopConfig, check_sizes
from smd_jax.train.minibatches import minibatches, over_steps, response_widths, shortened
from smd_jax.train.rollouts import Rollouts, Sampled, rows_on, sampler_copy
from smd_jax.train.samples import RefusedRolloutError, Samples, select_groups


@dataclass(frozen=True)
class Loop:
    """The static parts of a training run: model, task, optimizer, configuration. Its jitted functions are cached.

    Subclasses define an algorithm (`rollout_batch`, `learner_batch`).

    Attributes:
      mesh: devices of state and batches; one device by default.
      report: called after every segment of a rollout with `config.decode_rows`.
      rewards: grades the completions of every task; None: the task's own `reward`, in this process and without a time
        limit.
      watch: called with the number of a rollout, from 0, and its samples, before the update. Its time counts in
        `step_time` only. With several processes the first one calls it, with all rows; all must have one.
      watch_every: number of rollouts between two calls of `watch`; it always sees the first and the last rollout.
      guard: largest allowed sampler–learner mismatch; None disables the check.
      max_skipped: number of consecutive rollouts with skipped updates that ends the run.
      environment: samples conversations, whose rewards the environments give; None: single completions.

    Raises:
      TypeError: for a task or rewards of another class.
      ValueError: for a task without rows, or without a reward and no `rewards`; if max_skipped is below 1; if the
        model, the tokenizer or the mesh does not fit the configuration; for an environment with `rewards` or
        rollouts_ahead; and the errors of ConversationRollouts and `check_sizes`.
    """

    model: LanguageModel
    task: Task
    tokenizer: Tokenizer
    optimizer: optax.GradientTransformation
    config: LoopConfig
    mesh: Mesh = field(default_factory=make_mesh)
    report: Callable[[Progress], None] | None = field(default=None, kw_only=True)
    rewards: Rewards | None = field(default=None, kw_only=True)
    watch: Callable[[int, Samples], None] | None = field(default=None, kw_only=True)
    watch_every: int = field(default=1, kw_only=True)
    guard: MismatchGuard | None = field(default=MismatchGuard(), kw_only=True)
    max_skipped: int = field(default=3, kw_only=True)
    environment: EnvironmentConfig | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        config = self.config
        if self.rewards is not None:
            check_instance("rewards", self.rewards, Rewards)
        elif self.environment is None:
            check_instance("task", self.task, Task)
            own_reward(self.task)  # raises without one
        if not len(self.task):
            raise ValueError("expected a task with at least one row; got none")
        if self.max_skipped < 1:
            raise ValueError(f"expected max_skipped >= 1 rollouts; got {self.max_skipped}")
        if self.environment is not None and self.rewards is not None:
            raise ValueError("expected no rewards with an environment, which gives them; got some")
        if self.environment is not None and config.samples_ahead:
            raise ValueError("expected rollouts_ahead 0 with an environment; got 1")
        check_vocabulary(self.tokenizer, self.model.shape.vocab_size)
        # Built here so that an invalid config fails before compilation.
        self.rollouts.check_batch(config.prompts_per_step)
        check_sizes(config, self.model.shape, self.mesh)
        self.check_update()
        if config.samples_ahead and self.mesh.size > 1:
            # Rollout and update run at once, and both communicate: also with the data axis only, a rollout reduces over
            # its rows whether all are done. Devices that start the two in different orders would wait forever.
            raise ValueError(
                "expected a mesh of one device with rollouts_ahead 1, because rollout and update would communicate at "
                f"the same time; got {dict(self.mesh.shape)}"
            )
        if self.rewards is not None:
            # Reward processes start while the first programs compile.
            self.rewards.prepare(reward_columns(self.rewards, self.task, config.seed))

    # --- defined by the algorithm

    def rollout_batch(
        self, params: Params, samples: Samples, penalty: Float[Array, "batch R"] | None
    ) -> tuple[TrainBatch, Metrics]:
        """The batch of a whole rollout, before it is split into minibatches, and metrics of it.

        Args:
          penalty: of `kl_penalty`, subtracted from the rewards of tokens; None without a KL in the reward.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rollout_batch")

    def learner_batch(self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array) -> TrainBatch:
        """`rollout_batch` from arrays, of which `lower_update` takes the shapes.

        Args:
          rewards: `[batch]`. counted_rows: `[rows]` as in Samples.
        """
        raise NotImplementedError(f"{type(self).__name__} must define learner_batch")

    def check_update(self) -> None:
        """Raises ValueError for a configuration that the algorithm cannot use."""

    def known_advantages(self, samples: Samples) -> np.ndarray | None:
        """Advantages `[batch]` where they follow from the rewards; None elsewhere."""
        return None

    def policy_params(self, params: Params) -> Params:
        """The parameters of the model, without those that an algorithm adds to them."""
        return params

    # --- programs

    @cached_property
    def update(self) -> Update:
        """The jitted optimizer step."""
        update = self.config.update
        if update.loss.weighting == FixedLength(None):
            # The longest allowed response instead of a batch's columns.
            longest = FixedLength(self.config.rollout.max_new_tokens)
            update = replace(update, loss=replace(update.loss, weighting=longest))
        # Later steps of a rollout may differ: the learner has moved on.
        bound = self.max_difference if self.config.first_pass_sees_all else None
        return make_update(self.model, self.optimizer, update, bound)

    @cached_property
    def replay(self) -> ReplayFunction:
        """Log-probabilities of a rollout as the learner sees it, at most `rows_of_a_pass` rows at a time."""
        config, update = self.config, self.config.unpacked_update
        return make_replay(self.model, update.learner_visibility, config.rows_of_a_pass, update.rows_per_prompt)

    @cached_property
    def dense_replay(self) -> ReplayFunction:
        """The dense policy's log-probabilities of a rollout."""
        return make_replay(self.model, "dense", self.config.rows_of_a_pass, self.config.unpacked_update.rows_per_prompt)

    @cached_property
    def skip(self) -> Callable[[TrainState], TrainState]:
        """The step of a minibatch in which no row counts. With a reference sync it is jitted and donates the state."""
        sync = self.config.update.reference_sync
        return skip_step if sync is None else jax.jit(lambda state: skip_step(state, sync), donate_argnums=0)

    @property
    def packs_rows(self) -> bool:
        """Whether `update` packs several sequences into a row; its programs then have one size for all responses."""
        return self.config.update.pack_columns is not None

    @property
    def credits_turns(self) -> bool:
        """Whether each turn of a conversation has its own advantage."""
        return self.environment is not None and self.environment.credit == "turn"

    # --- a step

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        """Samples one rollout and takes its optimizer steps.

        Metrics are numbers on the host. SAMPLER_LEARNER_METRICS cover all counted tokens of the rollout, before the
        first optimizer step; the others are means over tokens or optimizer steps, see `over_steps`.

        Args:
          follows: whether another step certainly follows this one; called once the rollout is over. It decides whether
            `watch` sees a last rollout and whether the next one begins during the update. It never changes a result.

        Raises:
          RefusedRolloutError: sampler and learner differ by more than `guard` allows, and no step was taken; or
            `max_skipped` updates in a row were skipped.
        """
        started = time.perf_counter()
        self.check(state)  # before the rollout, which takes long
        # With another placement the first step would compile programs that no later step uses.
        state = shard_tree(state, self.mesh)
        # Skipped updates count as steps, so the step gives the number of the rollout.
        index = int(state.step) // self.config.steps_per_rollout
        with compiling(self.lower_update(state), self.mesh) if self._compiles_first_update() else nullcontext():
            samples = self.collect(state, index)
        samples = samples._replace(trajectory=shortened(samples.trajectory, self.response_widths))
        self._show(index, samples, follows)
        tokens = int(jnp.sum(samples.trajectory.valid))  # before an update that may donate the trajectory
        sampled_with = state.sampler_params
        collected = time.perf_counter()
        next_params = None
        if self._ahead is not None:
            # A copy: the update donates its parameters. The last step makes one, too, for a run that is continued.
            next_params = jax.tree.map(jnp.copy, state.params)
            if follows():  # Python waits for threads at exit, so a rollout that no step uses would delay it
                self._ahead.begin(index + 1, next_params, state.key)
        state, metrics = self.learn(state, samples)
        if next_params is not None and int(state.step) // self.config.steps_per_rollout > index:
            state = state.replace(sampler_params=next_params)
        # A single transfer to the host, which also waits for the last update.
        host = {name: float(value) for name, value in jax.device_get(metrics | samples.metrics).items()}
        ended = time.perf_counter()
        host |= {"time/update": ended - collected, "step_time": ended - started}
        host["update/tokens_per_second"] = tokens / host["time/update"]
        host.setdefault("update/padding", 1.0 - tokens / samples.trajectory.valid.size)  # a packed update measures it
        if "time/rollout" in host:  # a custom `collect` may omit it
            host["rollout/tokens_per_second"] = host["rollout/tokens"] / host["time/rollout"]
        # A refused rollout took no step, so without `sampler_params` the present parameters have sampled it.
        if why := self._refusal(state.params if sampled_with is None else sampled_with, samples, host):
            raise RefusedRolloutError(index, why, samples, host, state)
        return state, host

    def check(self, state: TrainState) -> None:
        """Raises TypeError for no TrainState, and ValueError for one that the sampler or the learner cannot use."""
        check_instance("state", state, TrainState)
        check_reference(self.config.update, state)
        check_sync(state, self.config.update.reference_sync)
        # Raises if the parameters lack those of the eviction policy, such as a gate.
        self.config.policy.parameters(self.policy_params(state.params), 0)
        ahead = self.config.samples_ahead
        if ahead != (state.sampler_params is not None):
            raise ValueError(
                f"expected a state {'from with_sampler_params(state)' if ahead else 'without sampler_params'} with "
                f"rollouts_ahead {int(ahead)}; got {'none' if state.sampler_params is None else 'some'}"
            )
        if ahead and (has_lora(state.params) or jax.process_count() > 1):
            raise ValueError("expected whole parameters and one process with rollouts_ahead 1; got adapters or several")

    def collect(self, state: TrainState, index: int) -> Samples:
        """Samples and grades rollout number `index`.

        With dynamic sampling further rollouts fill the batch with groups that have signal. Groups that are still
        without signal stay in the batch and do not count.
        """
        config = self.config
        params = state.params if state.sampler_params is None else state.sampler_params
        if self._ahead is not None and (begun := self._ahead.take(index, params)) is not None:
            return begun
        key = jax.random.fold_in(state.key, index)
        if config.extra_rollouts is None:
            return self.grade(self.respond(params, key, index))
        rollouts = list[Samples]()
        # A step owns all of these batches, whether it uses them or not. So a restored run reads the same rows, however
        # many rollouts the steps before needed.
        batches = 1 + config.extra_rollouts
        for number in range(batches):
            sampled = self.respond(params, jax.random.fold_in(key, number), index * batches + number)
            rollouts.append(self.grade(sampled))
            if sum(each.has_signal(config.group_size).sum() for each in rollouts) >= config.prompts_per_step:
                break
        samples = select_groups(rollouts, config.group_size, config.prompts_per_step)
        # The rows come from several rollouts and are spread over the mesh as one batch.
        return samples._replace(trajectory=shard_batch(samples.trajectory, self.mesh))

    def respond(self, params: Params, key: jax.Array, batch: int) -> Sampled:
        """Samples one rollout; all processes must call it.

        Args:
          params: of the state, on the mesh. key: consumed. batch: number of the task batch.
        """
        with all_or_none():  # rows may be read from a network
            rows = rows_of_step(self.task, self.config.prompts_per_step, batch, self.config.seed)
        params = sampler_copy(self.model, self.placement, self.policy_params(params))
        return self.rollouts.sample(params, key, rows)

    def grade(self, sampled: Sampled) -> Samples:
        """Grades completions; all processes must call it, each with its own part.

        Raises:
          TooManyFailures: more completions of all processes without a reward than allowed; in all processes.
        """
        size = self.config.group_size
        batch = grade(sampled, self._grader, self.tokenizer, self.placement.data_shards, size)
        check_failures(batch.graded, self._grader.max_failed)
        trajectory = self.placement.whole(sampled.trajectory)
        counted_rows = batch.graded.rewarded_rows
        if sampled.present is not None:
            counted_rows = sampled.present & np.repeat(counted_rows, self.rollouts.contexts)
        return Samples(
            trajectory,
            batch.graded.rewards,
            repeat_each(sampled.rows, size),
            batch.completions,
            counted_rows,
            rollout_metrics(trajectory, batch, size, log_parts=self.rewards is not None),
            {} if self.rewards is None else batch.graded.parts,
            conversations=sampled.conversations,
        )

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
            penalty, kl = self.kl_penalty(state, samples.trajectory, jnp.asarray(samples.counted_rows))
            batch, of_batch = self.rollout_batch(state.params, samples, penalty)
            before: Metrics = {}  # where the only step sees the whole rollout, it has these metrics itself
            if not config.first_pass_sees_all:
                # Before the first update, which donates these parameters. If the sampler's log-probabilities are used
                # as old ones, only a replay can measure the difference.
                params = state.params if state.sampler_params is None else state.sampler_params
                known = batch.old_logprobs
                if known is None or update.pairs is not None or update.policy_term.uses_sampler_logprobs_as_old:
                    known = self.replay(params, batch.trajectory)
                before = compare(update, batch, known)
                if is_beyond(float(before[DIFFERENCE]), self.max_difference):
                    return state, before | of_batch | kl
            steps = []
            # A batch that counts all of its rows, as one of pairs, may have others than the rollout.
            counted_rows = None if batch.counted_rows is None else samples.counted_rows
            for part, counts in minibatches(batch, state, config, self.mesh, counted_rows):
                # The update itself finds minibatches that are empty for other reasons.
                if needs_rows and not counts:
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
        self, state: TrainState, trajectory: Trajectory, counted_rows: Array
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

    def _refusal(self, params: Params, samples: Samples, metrics: dict[str, float]) -> str | None:
        """Why the run must not continue after this rollout; None if it may.

        Args:
          params: those that sampled it, if no step was taken.
        """
        bound, found = self.max_difference, metrics.get(DIFFERENCE, 0.0)
        # A NaN in a single step is handled below as a skipped update.
        if bound is not None and is_beyond(found, bound) and not (math.isnan(found) and "update/skipped" in metrics):
            why = f"sampler and learner within {bound:.3g} nats at every token; got {found:.3g}"
            # Metrics are the same in all processes, so all of them come here.
            with jax.set_mesh(self.mesh):
                logprobs = self.replay(params, samples.trajectory)
                difference = first_difference(samples.trajectory, logprobs, bound)
                if difference is not None:  # None: a replay does not reproduce it
                    wrong = find_wrong_head(self.model, self.policy_params(params), samples.trajectory, difference)
                    why += f", {difference}; {wrong}"
            return why
        skipped = metrics.get("update/skipped", 0.0) > 0
        in_a_row = self._counters["skipped in a row"] = self._counters["skipped in a row"] + 1 if skipped else 0
        if in_a_row < self.max_skipped:
            return None
        return (
            f"a finite loss and gradient; got loss {metrics['loss']:g} and grad_norm {metrics['grad_norm']:g} in the "
            f"last of {in_a_row} rollouts in a row that each had a skipped update. Try a lower learning rate, a lower "
            "max_grad_norm, or float32; and look at the rewards"
        )

    @property
    def max_difference(self) -> float | None:
        """Largest |log p_learner - log p_sampler| of a token, in nats; None: no limit."""
        if self.guard is None or not self.config.is_exact:
            return None
        return self.guard.bound_for(self.model.shape)

    @property
    def response_widths(self) -> tuple[int, ...]:
        """Widths of a response, ascending, that the learner may run over."""
        widths = 1 if self.packs_rows else self.config.update_widths
        return response_widths(self.config.rollout.max_new_tokens, widths, sequence_ways(self.mesh))

    # --- cached parts

    @cached_property
    def placement(self) -> SamplerPlacement:
        """Where this process samples its rows."""
        return SamplerPlacement(self.mesh)

    @cached_property
    def rollouts(self) -> Rollouts:
        """Samples completions, or conversations with an environment."""
        config = self.config
        make = Rollouts if self.environment is None else partial(ConversationRollouts, environment=self.environment)
        return make(
            self.model,
            self.tokenizer,
            self.placement,
            config.policy,
            config.rollout,
            config.group_size,
            config.prompt_width,
            stop_table(self.tokenizer, config.stop_strings, self.model.shape.vocab_size),
            config.decode_rows,
            config.prefill_rows,
            self.report,
        )

    @cached_property
    def _grader(self) -> Rewards | EnvironmentConfig:
        # One object for all rollouts, because it reports every kind of failure once.
        return self.environment or self.rewards or Rewards((own_reward(self.task),), names=("reward",), seconds=None)

    @cached_property
    def _counters(self) -> Counter[str]:
        """Counters of this object; a restored run begins with new ones."""
        return Counter()

    # --- one rollout ahead

    @cached_property
    def _ahead(self) -> RolloutAhead | None:
        return RolloutAhead(self._sample_ahead) if self.config.samples_ahead else None

    def _sample_ahead(self, params: Params, key: jax.Array, index: int) -> Callable[[], Samples]:
        """Samples a rollout; runs in a thread. The returned function grades it if that needs the main thread."""
        sampled = self.respond(params, jax.random.fold_in(key, index), index)
        if self.rewards is None or self.rewards.seconds is None:
            # Only the main thread can set the timer by which math-verify and others stop.
            return lambda: self.grade(sampled)
        samples = self.grade(sampled)
        return lambda: samples

    def settle(self) -> None:
        """Waits for a rollout that began during an update, so that devices and reward functions are free."""
        if self._ahead is not None:
            self._ahead.wait()

    # --- compilation

    def _compiles_first_update(self) -> bool:
        """Whether the update, for the widest responses, is compiled during this rollout, which is the first."""
        self._counters["steps"] += 1
        # Several processes must compile in the same order, which threads would not keep.
        return self._counters["steps"] == 1 and jax.process_count() == 1 and not self.packs_rows

    def lower_update(self, state: TrainState) -> jax.stages.Lowered:
        """The update for a minibatch with the widest responses, ready to be compiled; computes nothing.

        `step` finds the program that `compile()` makes of it under `jax.set_mesh(mesh)`.

        Args:
          state: as `step` takes it, or its shapes.

        Raises:
          ValueError: for an update that packs rows, which needs a rollout's packs.
        """
        if self.packs_rows:
            raise ValueError("expected an update without pack_columns, which needs a rollout's packs; got one with")
        config, shardings = self.config, tree_shardings(state, self.mesh)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)

        def minibatch(params: Params, trajectory: Trajectory) -> Any:
            rows = trajectory.terminated
            whole = self.learner_batch(params, trajectory, rows[:: self.rollouts.contexts].astype(jnp.float32), rows)
            return jax.tree.map(lambda x: x[: x.shape[0] // config.minibatches], whole)

        with jax.set_mesh(self.mesh):
            # Both are traced for their shapes only.
            trajectory = self.rollouts.shapes(self.policy_params(state.params), config.prompts_per_step)
            shapes = jax.eval_shape(minibatch, state.params, trajectory)
            return self.update.lower(state, rows_on(shapes, self.mesh))

    # --- reports

    def _show(self, index: int, samples: Samples, follows: Callable[[], bool]) -> None:
        """Calls `watch` if it is due."""
        if self.watch is None or (index % self.watch_every and follows()):
            return
        if jax.process_count() > 1:
            # All processes send their rows to all.
            samples = samples._replace(trajectory=jax.tree.map(on_host, samples.trajectory))
        samples = samples._replace(advantages=self.known_advantages(samples))
        with all_or_none():
            if is_first():
                self.watch(index, samples)


@partial(jax.jit, static_argnums=0)
def compare(update: UpdateConfig, batch: TrainBatch, logprobs: Float[Array, "batch R"]) -> Metrics:
    """SAMPLER_LEARNER_METRICS of a rollout, from the learner's log-probabilities before any step."""
    mask = counted_tokens(update, batch.trajectory, batch.counted_rows)
    return sampler_learner_metrics(batch.trajectory.logprobs, logprobs, mask)
