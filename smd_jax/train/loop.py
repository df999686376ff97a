"""What all algorithms share on the host: prompts ─► rollout ─► rewards, and then whatever learns from them.

    loop = GRPOLoop(model, task, tokenizer, optimizer, config)       or PPOLoop, OnlineDPOLoop
    for _ in range(steps):
        state, metrics = loop.step(state)

A step depends on the state alone (its step gives the rows and the random numbers), so a restored one goes on bitwise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
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

from smd_jax.devices.process_rows import (
    check_prompts_divide,
)
from smd_jax.devices.processes import all_or_none, is_first, on_host
from smd_jax.devices.sharding import (
    check_rows,
    check_sampled_rows,
    check_sequence,
    gathered_shardings,
    make_mesh,
    moved_bytes,
    sequence_ways,
    shard_batch,
    shard_tree,
    tree_shardings,
)
from smd_jax.learner.forward import ReplayFunction
from smd_jax.learner.mismatch_guard import DIFFERENCE, MismatchGuard, find_parting
from smd_jax.learner.state import Metrics, TrainState
from smd_jax.message.masks import ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import completion_metrics, evicted_share, reward_metrics, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.engine import Progress
from smd_jax.sampler.static import Sampler
from smd_jax.tasks.rewards import Rewards
from smd_jax.tasks.task import Row, SteppedTask, Task, rows_of_step
from smd_jax.text.prompts import (
    Tokenizer,
    check_vocabulary,
    repeat_each,
)
from smd_jax.train.bucketing import response_widths, shortened
from smd_jax.train.compile_ahead import compiling, rows_on
from smd_jax.train.debug_dump import never_finite, not_one_policy
from smd_jax.train.grading import part_metrics, reward_columns
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.minibatches import order_of_pass
from smd_jax.train.responder import Drawn, Responder
from smd_jax.train.samples import ROLLOUTS, Samples


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
      watch_every: rollouts between two calls of `watch`; the first and the last rollout have one, too.
      guard: how far the learner may be from the sampler where it promises to be the same policy; None: however far.
      max_skipped: rollouts in a row whose updates were left out, wholly or in part, with which the run ends.

    Raises:
      ValueError: if max_skipped is below 1, or the model, the tokenizer or the mesh cannot do what the configuration
        says.
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
        check_prompts_divide(self.config.prompts_per_step, self.responder.place.feeders)
        # Made for their errors, before anything is compiled: what the model or the tokenizer cannot do.
        Sampler(self.model, self.config.policy, self.config.rollout, self.config.prompt_width)
        _ = self.responder.stop_table
        if self.config.decode_rows is not None:
            # Raises if it cannot be.
            self.responder.engine(self.config.policy, self.config.rollout, self.config.decode_rows)
        minibatch = self.config.completions_per_step // self.config.minibatches
        check_rows(minibatch, self.mesh, "a minibatch (prompts_per_step * group_size / minibatches)")
        check_sampled_rows(self.config.completions_per_step, self.mesh)
        check_sequence(self.config.columns, self.model.shape.num_heads, self.mesh)
        if self.rewards is not None:
            # It starts beside what is compiled first.
            self.rewards.prepare(reward_columns(self.rewards, self.task, self.config))

    @cached_property
    def responder(self) -> Responder:
        """What draws the completions."""
        return Responder(self.model, self.tokenizer, self.config, self.mesh, self.report)

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        """Takes the optimizer steps of one rollout."""
        raise TypeError(f"{type(self).__name__} has no learn: its class must define it")

    def learn_beside_next(
        self, state: TrainState, samples: Samples, follows: Callable[[], bool]
    ) -> tuple[TrainState, Metrics]:
        """`learn`. Where rollouts are drawn ahead, the next one is begun beside it, if `follows` says there is one."""
        return self.learn(state, samples)

    def step(
        self, state: TrainState, follows: Callable[[], bool] = lambda: True
    ) -> tuple[TrainState, dict[str, float]]:
        """One rollout and its optimizer steps. Metrics come as numbers on the host: those that compare sampler and
        learner (SAMPLER_LEARNER_METRICS) are over all tokens of the rollout, before the first optimizer step; the
        others are over the optimizer steps, see `over_steps`.

        Args:
          follows: whether another step certainly follows this one, asked once this rollout is there. It decides whether
            `watch` is called for a last rollout, and what is begun beside the update; nothing of what is learnt: what
            was not begun is drawn when it is asked for.

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
        if self.watch is not None and (index % self.watch_every == 0 or not follows()):
            self._show(self.watch, index, samples)
        tokens = jnp.sum(samples.trajectory.valid)  # now, as an update may take over the buffers
        behind = state.behind
        collected = time.perf_counter()
        state, metrics = self.learn_beside_next(state, samples, follows)
        # All metrics come to the host in one transfer, after the last step; so the last update is over, too.
        host = {name: float(value) for name, value in jax.device_get(metrics | samples.metrics).items()}
        ended = time.perf_counter()
        # Every rollout gathers them anew, those too that fill up a batch.
        host["rollout/weights_moved_bytes"] = self._weights_moved(state.params) * host.get(ROLLOUTS, 1.0)
        # Where an update packs its rows it knows better.
        host.setdefault("update/padding", 1.0 - int(tokens) / samples.trajectory.valid.size)
        host |= {"time/update": ended - collected, "step_time": ended - started}
        host["update/tokens_per_second"] = int(tokens) / host["time/update"]
        if "time/rollout" in host:  # a `collect` that somebody else wrote need not say
            host["rollout/tokens_per_second"] = host["rollout/tokens"] / host["time/rollout"]
        # A rollout that is refused was not learnt from: these are the parameters that it was drawn with.
        self._refuse(index, state.params if behind is None else behind, state, samples, host)
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
        """Counted once: every rollout moves as much."""
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

    def _refuse(
        self, index: int, params: Params, state: TrainState, samples: Samples, metrics: dict[str, float]
    ) -> None:
        """Raises RefusedRolloutError for a rollout with which the run must not go on; `params` are those that drew it
        where sampler and learner part, and `state` is what it has left."""
        bound = self.max_difference
        if bound is not None and metrics.get(DIFFERENCE, 0.0) > bound:
            # Of several processes all come here, because metrics are the same in all.
            with jax.set_mesh(self.mesh):
                logprobs = self.replay(params, samples.trajectory)
                parting = find_parting(self.model, self.policy_params(params), samples.trajectory, logprobs, bound)
            raise not_one_policy(index, samples, metrics, state, bound, parting)
        if metrics.get("update/skipped", 0.0) == 0:
            self._skipped.clear()
            return
        self._skipped.append(index)
        if len(self._skipped) >= self.max_skipped:
            raise never_finite(index, samples, metrics, state, len(self._skipped))

    @cached_property
    def _skipped(self) -> list[int]:
        """The newest rollouts in a row whose updates were left out."""
        return []

    def _show(self, watch: Callable[[int, Samples], None], index: int, samples: Samples) -> None:
        if jax.process_count() > 1:
            # All processes send their rows, and one looks at them.
            samples = samples._replace(trajectory=jax.tree.map(on_host, samples.trajectory))
        samples = samples._replace(advantages=self.known_advantages(samples))
        with all_or_none():
            if is_first():
                watch(index, samples)

    @property
    def response_widths(self) -> tuple[int, ...]:
        """Columns of a response, ascending, that the learner may run over."""
        config = self.config
        return response_widths(config.rollout.max_new_tokens, config.update_widths, sequence_ways(self.mesh))

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
            trajectory = self.responder.shapes(self.policy_params(state.params))
            shapes = jax.eval_shape(minibatch, state.params, trajectory)
            return self.update.lower(state, rows_on(shapes, self.mesh))

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

    def settle(self) -> None:
        """Waits for whatever goes on beside the steps, so that devices and reward functions are free."""

    def check(self, state: TrainState) -> None:
        """Raises ValueError for a state that `learn` or the sampler cannot use."""
        # Called for its error: the parameters have what the eviction policy reads of them, such as a gate.
        self.config.policy.parameters(self.policy_params(state.params), 0)

    def collect(self, state: TrainState, index: int) -> Samples:
        """What rollout number `index` gives the learner: by default one rollout, of prompts that no other has."""
        return self.graded_rollout(state.params, jax.random.fold_in(state.key, index), index)

    def graded_rollout(self, params: Params, key: jax.Array, index: int) -> Samples:
        """Completions of the task's batch number `index`, with their rewards; the key is consumed."""
        rows, draw = self._drawing(params, key, index)
        return self._graded(rows, draw)

    def drawn_rollout(self, params: Params, key: jax.Array, index: int) -> Callable[[], Samples]:
        """`graded_rollout` in two parts, which two threads may do: its completions, drawn now, and their rewards, which
        the function asks for that it returns. For one process alone."""
        rows, draw = self._drawing(params, key, index)
        drawn = draw()
        return lambda: self._graded(rows, lambda: drawn)

    def _drawing(self, params: Params, key: jax.Array, index: int) -> tuple[list[Row], Callable[[], Drawn]]:
        """The task's rows of a rollout, and what draws this process's part of the responses to them."""
        config = self.config
        with all_or_none():  # rows may be read from a network
            rows = rows_of_step(self.task, config.prompts_per_step, index, config.seed)
        own = self.responder.sampler_copy(self.policy_params(params))
        sizes = (config.policy, config.rollout, config.group_size)
        return rows, lambda: self.responder.drawn(own, rows, key, *sizes)

    def _graded(self, rows: list[Row], draw: Callable[[], Drawn]) -> Samples:
        config = self.config
        rewards = self.rewards or self._own_reward
        own, (completions, graded, took) = self.responder.graded(draw, rows, rewards, config.group_size)
        trajectory = self.responder.place.whole(own)
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
        if isinstance(trajectory.mask, ShadowMask):
            metrics["rollout/evicted_share"] = evicted_share(trajectory.mask.evicted_at, trajectory.valid)
        repeated = repeat_each(rows, config.group_size)
        return Samples(trajectory, graded.rewards, repeated, completions, there, metrics, parts)

    @cached_property
    def _own_reward(self) -> Rewards:
        """The task's. One object for all rollouts, because it reports every kind of failure once."""
        return Rewards((self.task.reward,), seconds=None)

    def policy_params(self, params: Params) -> Params:
        """The parameters that the sampler reads: those of the model, without what an algorithm adds to them."""
        return params

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


def _rows(batch: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda x: x[rows], batch)
