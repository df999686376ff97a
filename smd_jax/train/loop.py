"""What all algorithms share on the host: prompts ─► rollout ─► rewards, and then whatever learns from them.

    loop = GRPOLoop(model, task, tokenizer, optimizer, config)       or PPOLoop, OnlineDPOLoop
    for _ in range(steps):
        state, metrics = loop.step(state)

A step depends on the state alone (its step gives the rows and the random numbers), so a restored one goes on bitwise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.learner.forward import ReplayFunction
from smd_jax.learner.mismatch_guard import DIFFERENCE, MismatchGuard, find_parting
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.metrics import completion_metrics, reward_metrics, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.process_rows import (
    Feeders,
    check_prompts_divide,
    feeders,
    local_key,
    rows_here,
    sampling_copy,
    sampling_mesh,
    to_batch,
)
from smd_jax.processes import is_first, on_host
from smd_jax.sampler.engine import Engine, Progress
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout, rollout_program
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.params import converted
from smd_jax.sharding import (
    check_rows,
    gathered_shardings,
    make_mesh,
    moved_bytes,
    row_ways,
    shard_batch,
    shard_tree,
    tree_shardings,
)
from smd_jax.tasks.rewards import Rewards
from smd_jax.tasks.task import Row, SteppedTask, Task, batch_columns, rows_of_step
from smd_jax.text.prompts import (
    PromptBatch,
    Tokenizer,
    check_vocabulary,
    repeat_each,
    repeat_prompts,
)
from smd_jax.text.stop_strings import StopTable, compile_stop_strings
from smd_jax.train.ahead import compiling, rows_on
from smd_jax.train.grading import encode_rows, grade, part_metrics
from smd_jax.train.minibatches import order_of_pass
from smd_jax.train.refused import never_finite, not_one_policy
from smd_jax.train.samples import Samples
from smd_jax.train.sharing import Told, shared
from smd_jax.train.widths import response_widths, shortened
from smd_jax.trajectory import Trajectory, check_finite
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class LoopConfig:
    """One run, as far as all algorithms share it.

    Attributes:
      prompts_per_step: prompts of one rollout.
      group_size: completions per prompt.
      prompt_width: columns of the prompt, in tokens; longer prompts are refused.
      policy: eviction policy of the sampler.
      rollout: budget, lengths and sampling of the rollout.
      decode_rows: completions that are decoded at the same time; those that end make room for others, see
        `smd_jax.sampler.engine`. None decodes all of a rollout at once, in one program.
      prefill_rows: with decode_rows, prompts that are read at the same time.
      stop_strings: texts that end a completion, and stay in it.
      minibatches: optimizer steps per pass over a rollout, each with whole groups; the first step is exactly on-policy.
      num_iterations: passes over a rollout; every further one has the groups in another order.
      update_widths: the learner runs over as many columns as the longest response of a rollout needs, in so many sizes;
        each is compiled when it is first needed. 1: always over `max_new_tokens`.
      seed: order of the task's rows.
    """

    prompts_per_step: int
    group_size: int
    prompt_width: int
    policy: EvictionPolicy
    rollout: RolloutConfig
    decode_rows: int | None = None
    prefill_rows: int = 8
    stop_strings: tuple[str, ...] = ()
    minibatches: int = 1
    num_iterations: int = 1
    update_widths: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("prompts_per_step", "group_size", "prompt_width", "minibatches", "num_iterations", "update_widths")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1; got {getattr(self, name)}")
        if not self.rollout.sampling.trainable:
            raise ValueError(
                "expected sampling at a temperature > 0, because a greedy choice is no draw from a distribution that a "
                f"learner could have as well; got {self.rollout.sampling}"
            )
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"expected prompts_per_step that divide into {self.minibatches} minibatches, because a group is never "
                f"split; got {self.prompts_per_step}"
            )

    @property
    def completions_per_step(self) -> int:
        """Completions of one rollout."""
        return self.prompts_per_step * self.group_size

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that one rollout feeds."""
        return self.minibatches * self.num_iterations


@dataclass(frozen=True)
class Loop:
    """Everything of a run that does not change. Subclasses make their jitted functions once, and define `update`,
    what it takes (`learner_batch`), and `learn`.

    Attributes:
      mesh: where state and batches lie; one device by default.
      report: called after every segment of a rollout with `config.decode_rows`.
      rewards: what grades the completions of every task; None: the task's own `reward`, in this process and without a
        time limit.
      watch: called with the number of a rollout, from 0, and its samples, before they are learned from. What it
        takes is in `step_time`, and in no other time. Of several processes the first calls it, with all rows.
      watch_every: rollouts between two calls of `watch`; rollout 0 has one.
      guard: how far the learner may be from the sampler where it promises to be the same policy; None: however far.
      max_skipped: rollouts in a row whose updates were left out, wholly or in part, with which the run ends.
    """

    model: LanguageModel
    task: Task | SteppedTask
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

    def __post_init__(self) -> None:
        if self.max_skipped < 1:
            raise ValueError(f"expected max_skipped >= 1 rollouts; got {self.max_skipped}")
        check_vocabulary(self.tokenizer, self.model.shape.vocab_size)
        check_prompts_divide(self.config.prompts_per_step, self.feeders)
        if self.config.decode_rows is not None:
            self.engine(self.config.policy, self.config.rollout, self.config.decode_rows)  # raises if it cannot be
        check_rows(self.config.completions_per_step // self.config.minibatches, self.mesh, "a minibatch")
        if self.rewards is not None:
            # It starts beside what is compiled first.
            self.rewards.prepare(batch_columns(rows_of_step(self.task, 1, 0, self.config.seed)))

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        """Takes the optimizer steps of one rollout."""
        raise TypeError(f"{type(self).__name__} has no learn: its class must define it")

    def step(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """One rollout and its optimizer steps. Metrics come as numbers on the host: those that compare sampler and
        learner (SAMPLER_LEARNER_METRICS) are over all tokens of the rollout, before the first optimizer step; the
        others are over the optimizer steps, see `over_steps`.

        Raises:
          RefusedRolloutError: sampler and learner are farther apart than `guard` allows, and nothing was learnt; or
            `max_skipped` updates in a row were left out.
        """
        started = time.perf_counter()
        self.check(state)  # before the rollout, which takes its time
        state = shard_tree(state, self.mesh)  # elsewhere, the first step would be compiled for that place alone
        # Every rollout adds the same number of steps, with those that are skipped: the step gives the rollout's number.
        index = int(state.step) // self.config.steps_per_rollout
        with self._first_step(state):
            samples = self.collect(state, index)
        samples = samples._replace(trajectory=shortened(samples.trajectory, self.response_widths))
        self._show(index, samples)
        tokens = jnp.sum(samples.trajectory.valid)  # now, as an update may take over the buffers
        collected = time.perf_counter()
        state, metrics = self.learn(state, samples)
        # All metrics come to the host in one transfer, after the last step; so the last update is over, too.
        host = {name: float(value) for name, value in jax.device_get(metrics | samples.metrics).items()}
        ended = time.perf_counter()
        host["rollout/weights_moved_bytes"] = self._weights_moved(state.params)
        # Where an update packs its rows it knows better.
        host.setdefault("update/padding", 1.0 - int(tokens) / samples.trajectory.valid.size)
        host |= {"time/update": ended - collected, "step_time": ended - started}
        host["update/tokens_per_second"] = int(tokens) / host["time/update"]
        if "time/rollout" in host:  # a `collect` that somebody else wrote need not say
            host["rollout/tokens_per_second"] = host["rollout/tokens"] / host["time/rollout"]
        self._refuse(index, state, samples, host)
        return state, host

    def _weights_moved(self, params: Params) -> float:
        """What it takes that sampler and learner read the same weights in two ways: `moved_bytes` of the sampler's."""
        if "bytes" not in self._known_moves:
            own = self.policy_params(params)
            # As the sampler computes with them: converted where they are, and then gathered from fsdp.
            read = jax.eval_shape(self.model.compute_params, own)
            before, after = tree_shardings(own, self.mesh), gathered_shardings(own, self.mesh)
            self._known_moves["bytes"] = float(moved_bytes(read, before, after))
        return self._known_moves["bytes"]

    @cached_property
    def _known_moves(self) -> dict[str, float]:
        """Counted once: every step moves as much."""
        return {}

    @property
    def is_exact(self) -> bool:
        """Whether sampler and learner promise to be one policy."""
        return False

    @property
    def max_difference(self) -> float | None:
        """Nats by which sampler and learner may differ at a token; None: by anything."""
        return self.guard.bound_for(self.model.shape) if self.guard is not None and self.is_exact else None

    @property
    def replay(self) -> ReplayFunction:
        """The learner's log-probabilities of a rollout, `[batch, R]`."""
        raise TypeError(f"{type(self).__name__} has no replay: its class must define it")

    def _refuse(self, index: int, state: TrainState, samples: Samples, metrics: dict[str, float]) -> None:
        """Raises RefusedRolloutError for a rollout with which the run must not go on."""
        bound = self.max_difference
        if bound is not None and metrics.get(DIFFERENCE, 0.0) > bound:
            parting = None
            if jax.process_count() == 1:  # of several, none has all rows
                logprobs = self.replay(state.params, samples.trajectory)
                params = self.policy_params(state.params)
                parting = find_parting(self.model, params, samples.trajectory, logprobs, bound)
            raise not_one_policy(index, samples, metrics, bound, parting)
        if metrics.get("update/skipped", 0.0) == 0:
            self._skipped.clear()
            return
        self._skipped.append(index)
        if len(self._skipped) >= self.max_skipped:
            raise never_finite(index, samples, metrics, len(self._skipped))

    @cached_property
    def _skipped(self) -> list[int]:
        """The newest rollouts in a row whose updates were left out."""
        return []

    def _show(self, index: int, samples: Samples) -> None:
        if self.watch is None or index % self.watch_every:
            return
        if jax.process_count() > 1:
            # All processes send their rows, and one looks at them.
            samples = samples._replace(trajectory=jax.tree.map(on_host, samples.trajectory))
        if is_first():
            self.watch(index, samples._replace(advantages=self.known_advantages(samples)))

    @cached_property
    def feeders(self) -> Feeders:
        """Which process feeds which rows."""
        return feeders(self.mesh)

    @cached_property
    def sampling_mesh(self) -> Mesh:
        """Where this process samples its rows; `mesh` where there is one process."""
        return sampling_mesh(self.mesh)

    @property
    def response_widths(self) -> tuple[int, ...]:
        """Columns of a response, ascending, that the learner may run over."""
        return response_widths(self.config.rollout.max_new_tokens, self.config.update_widths)

    def _first_step(self, state: TrainState) -> AbstractContextManager[None]:
        """What goes on beside the rollout of the first step: the update is compiled, for responses of every length."""
        # Several processes must all compile in one order, which threads would not keep.
        if next(self._begun) > 0 or jax.process_count() > 1 or not self.compiles_ahead:
            return nullcontext()
        return compiling(self.lower_update(state), self.mesh)

    @property
    def compiles_ahead(self) -> bool:
        """Whether `update` is the program that a step will run."""
        return True

    @cached_property
    def _begun(self) -> Iterator[int]:
        """Counts the steps that were begun."""
        return itertools.count()

    def lower_update(self, state: TrainState) -> jax.stages.Lowered:
        """The update, for a minibatch with responses of every length, ready to be compiled; nothing is computed. What
        `compile()` of it makes under `jax.set_mesh(mesh)` is found by `step`.

        Args:
          state: as `step` takes it.
        """
        state = shard_tree(state, self.mesh)

        def minibatch(params: Params, trajectory: Trajectory) -> Any:
            rows = trajectory.terminated
            whole = self.learner_batch(params, trajectory, rows.astype(jnp.float32), rows if self.drops_rows else None)
            return jax.tree.map(lambda x: x[: x.shape[0] // self.config.minibatches], whole)

        with jax.set_mesh(self.mesh):
            # Both are traced for their shapes alone.
            trajectory = self._of_shapes(rollout_program.eval_shape, self.policy_params(state.params))
            shapes = jax.eval_shape(minibatch, state.params, trajectory)
            return self.update.lower(state, rows_on(shapes, self.mesh))

    def lower_rollout(self, params: Params) -> jax.stages.Lowered:
        """The rollout of a step in one program, without `decode_rows`, ready to be compiled; nothing is computed.

        Args:
          params: those that the sampler reads, see `policy_params`.
        """
        with jax.set_mesh(self.mesh):
            return self._of_shapes(rollout_program.lower, params)

    def _of_shapes(self, run: Callable[..., Any], params: Params) -> Any:
        """`run` of a step's rollout in one program, with shapes in place of prompts."""
        config = self.config
        copies = self._copies(config.prompts_per_step // len(self.feeders.teams), config.group_size)
        shape = (config.prompts_per_step * copies, config.prompt_width)
        prompts = jax.eval_shape(lambda: PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
        key = jax.random.key(config.seed)
        responses = config.group_size // copies
        return self._rollout(run, params, rows_on(prompts, self.mesh), key, config.policy, config.rollout, responses)

    def _rollout(
        self,
        run: Callable[..., Any],
        params: Params,
        prompts: PromptBatch,
        key: jax.Array,
        policy: EvictionPolicy,
        config: RolloutConfig,
        responses: int,
    ) -> Any:
        """`run` of what a rollout in one program is called with: by the same names, or it would be another program.

        Args:
          responses: to each row of the prompts.
        """
        return run(
            self.model,
            params,
            prompts,
            key,
            policy=policy,
            config=config,
            group_size=responses,
            stop=self.stop_table,
        )

    @property
    def update(self) -> Any:
        """The jitted optimizer step `(state, minibatch) -> (state, metrics)`."""
        raise TypeError(f"{type(self).__name__} has no update: its class must define it")

    @property
    def drops_rows(self) -> bool:
        """Whether an update is told which rows count."""
        return False

    def learner_batch(self, params: Params, trajectory: Trajectory, rewards: Array, counted_rows: Array | None) -> Any:
        """What a whole rollout has to teach, a pytree of `[rows, ...]`: what `update` takes, before it is split.

        Args:
          rewards: `[batch]`. counted_rows: `[batch]` as in Samples.
        """
        raise TypeError(f"{type(self).__name__} has no learner_batch: its class must define it")

    def known_advantages(self, samples: Samples) -> np.ndarray | None:
        """Advantages `[batch]` where they follow from the rewards alone; None elsewhere."""
        return None

    def check(self, state: TrainState) -> None:
        """Raises ValueError for a state that `learn` cannot use."""

    def collect(self, state: TrainState, index: int) -> Samples:
        """What rollout number `index` gives the learner: by default one rollout, of prompts that no other has."""
        return self.graded_rollout(state.params, jax.random.fold_in(state.key, index), index)

    def graded_rollout(self, params: Params, key: jax.Array, index: int) -> Samples:
        """Completions of the task's batch number `index`, with their rewards; the key is consumed."""
        config = self.config
        rows = rows_of_step(self.task, config.prompts_per_step, index, config.seed)
        params = self.sampler_copy(params)

        def sample() -> tuple[Trajectory, Told]:
            began = time.perf_counter()
            # Its log-probabilities were read when `respond` returns: the rollout is over, on the device, too.
            own, took = self.respond(params, rows, key, config.policy, config.rollout, config.group_size)
            responded = time.perf_counter()
            repeated = repeat_each(rows[self.feeders.part(len(rows))], config.group_size)
            completions, graded = grade(self.rewards or self._own_reward, self.tokenizer, repeated, own)
            times = {"time/rollout": responded - began, "time/grading": time.perf_counter() - responded}
            return own, Told(completions, graded, times | took)

        own, (completions, graded, took) = shared(self.feeders, sample)
        trajectory = self.whole(own)
        metrics = {name: jnp.float32(number) for name, number in took.items()}
        metrics["rollout/tokens"] = jnp.sum(trajectory.response_mask)
        there = graded.rewarded_rows
        metrics |= reward_metrics(
            jnp.asarray(graded.rewards), config.group_size, None if there is None else jnp.asarray(there)
        )
        metrics["rewards/failed"] = jnp.float32(0 if there is None else (~there).sum())
        parts = {} if self.rewards is None else graded.parts
        for name, part in parts.items():
            metrics |= part_metrics(name, part)
        metrics |= completion_metrics(trajectory.response_mask, trajectory.terminated)
        assert trajectory.entropy is not None  # the sampler records it; None is for trajectories made by hand
        metrics["rollout/entropy"] = token_mean(trajectory.entropy, trajectory.response_mask)
        repeated = repeat_each(rows, config.group_size)
        return Samples(trajectory, graded.rewards, repeated, completions, there, metrics, parts)

    @cached_property
    def _own_reward(self) -> Rewards:
        """The task's. One object for all rollouts, because it reports every kind of failure once."""
        return Rewards((self.task.reward,), seconds=None)

    @cached_property
    def stop_table(self) -> StopTable | None:
        """The stop strings, over the tokens of this tokenizer."""
        strings = self.config.stop_strings
        vocab_size = self.model.shape.vocab_size
        return compile_stop_strings(self.tokenizer, strings, vocab_size) if strings else None

    def respond(
        self,
        params: Params,
        rows: Sequence[Row],
        key: jax.Array,
        policy: EvictionPolicy,
        config: RolloutConfig,
        group_size: int,
    ) -> tuple[Trajectory, dict[str, float]]:
        """`group_size` responses to the prompts of those rows that this process feeds, in one batch or a few rows at a
        time; and what it took. With several processes the trajectory is on the host.

        Args:
          params: a `sampler_copy`. rows: of all processes.
        """
        mesh = self.sampling_mesh
        prompts = self.encode(rows[self.feeders.part(len(rows))], self.config.prompt_width)
        if jax.process_count() > 1:
            # A row draws the same numbers whichever process it belongs to.
            total = len(rows) * group_size
            key = row_keys(local_key(key), total)[self.feeders.part(total)]
        if self.config.decode_rows is not None:
            done = self.engine(policy, config, self.config.decode_rows).run(
                params, prompts, key, group_size=group_size, stop=self.stop_table, report=self.report
            )
            took = {"rollout/utilisation": done.stats.utilisation}
            return self._own(shard_batch(done.trajectory, mesh)), took
        # A prompt that is read several times gets a share of its group each time; its responses still lie side by side.
        copies = self._copies(len(prompts.valid), group_size)
        with jax.set_mesh(mesh):
            repeated = shard_batch(repeat_prompts(prompts, copies), mesh)
            trajectory = self._rollout(rollout, params, repeated, key, policy, config, group_size // copies)
        check_finite(trajectory.logprobs)
        return self._own(trajectory), {}

    def _own(self, trajectory: Trajectory) -> Trajectory:
        """What this process sampled, on the host if it is a part of the batch."""
        return trajectory if jax.process_count() == 1 else rows_here(trajectory)

    def whole(self, own: Trajectory) -> Trajectory:
        """The batch on the mesh, from what every process has sampled."""
        return own if jax.process_count() == 1 else to_batch(own, self.mesh)

    def sampler_copy(self, params: Params) -> Params:
        """The parameters that the sampler reads, where it reads them; all processes must call it."""
        params = self.policy_params(params)
        if jax.process_count() == 1:
            return params
        with jax.set_mesh(self.mesh):
            # Converted first, which may halve what is sent.
            params = converted(self.model, params)
        return sampling_copy(params, self.mesh, self.sampling_mesh)

    def policy_params(self, params: Params) -> Params:
        """The parameters that the sampler reads: those of the model, without what an algorithm adds to them."""
        return params

    def engine(self, policy: EvictionPolicy, config: RolloutConfig, decode_rows: int) -> Engine:
        """What decodes this process's share of so many rows."""
        share = len(self.feeders.teams)
        prefill_rows = -(-self.config.prefill_rows // share)
        return Engine(self.model, policy, config, decode_rows // share, prefill_rows, self.sampling_mesh)

    def _copies(self, prompts: int, group_size: int) -> int:
        """How often a prompt is read: once, or as often as it takes to divide the prompts over the mesh.

        Args:
          prompts: those that this process feeds.
        """
        ways = row_ways(self.sampling_mesh)
        fits = (
            copies for copies in range(1, group_size + 1) if not group_size % copies and not prompts * copies % ways
        )
        # If nothing fits, `shard_batch` refuses the prompts, and says what it expects.
        return next(fits, group_size)

    def minibatches(self, batch: Any, state: TrainState, counted_rows: np.ndarray | None = None) -> Iterator[Any]:
        """The minibatches of one rollout, in as many passes as `num_iterations` says; each has whole groups.

        Args:
          batch: a pytree of equally many rows of every group, contiguous: all its completions, or one pair.
          state: before the first step of this rollout. The order of a pass follows from its key and step alone.
          counted_rows: `[rows]` which of them count; None: all.
        """
        config = self.config
        # Numbers of rows, one line a group: its rows lie side by side.
        groups = np.arange(len(jax.tree.leaves(batch)[0])).reshape(config.prompts_per_step, -1)
        # A group counts if any of its rows does: groups are never split.
        counted_groups = None if counted_rows is None else np.any(counted_rows[groups], axis=1)
        # Read now: by the second minibatch the state's buffers belong to the step that took them.
        seed = [*np.asarray(jax.random.key_data(state.key)).ravel().tolist(), int(state.step)]
        for number in range(config.num_iterations):
            order = order_of_pass(config.prompts_per_step, number, seed, counted_groups)
            for first in range(config.minibatches):
                rows = groups[order[first :: config.minibatches]].reshape(-1)
                # A minibatch of everything stays as it lies: another order would only change rounding.
                yield shard_batch(batch if config.minibatches == 1 else _rows(batch, rows), self.mesh)

    def encode(self, rows: Sequence[Row], width: int) -> PromptBatch:
        return encode_rows(self.model, self.tokenizer, rows, width)

    def evaluate(
        self, params: Params, task: Task, key: jax.Array, *, policy: EvictionPolicy, config: RolloutConfig
    ) -> float:
        """Mean reward over all rows of `task`, one completion each, decoded under any policy. Rows on which a reward
        function fails are left out."""
        # As in a step: parameters that lie elsewhere would have programs of their own.
        params = self.sampler_copy(shard_tree(params, self.mesh))
        rows = [task[i] for i in range(len(task))]
        check_prompts_divide(len(rows), self.feeders)

        def sample() -> tuple[Trajectory, Told]:
            own, took = self.respond(params, rows, key, policy, config, group_size=1)
            grader = self.rewards or Rewards((task.reward,), seconds=None)
            return own, Told(*grade(grader, self.tokenizer, rows[self.feeders.part(len(rows))], own), took)

        _, (_, graded, _) = shared(self.feeders, sample)
        there = graded.rewarded_rows
        return float((graded.rewards if there is None else graded.rewards[there]).mean())


def _rows(batch: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda x: x[rows], batch)
