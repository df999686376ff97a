"""GRPO and RLOO: advantages from the rewards of a group, and the update.

RLOO is `GRPOConfig(advantages="leave_one_out", scale_rewards="none")`; GSPO, DAPO, Dr. GRPO and CISPO are options of
`LossConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.config import check_choice
from smd_jax.devices.processes import on_host
from smd_jax.devices.sharding import shard_batch
from smd_jax.learner.config import takes_sampler_for_old
from smd_jax.learner.state import Metrics, TrainBatch, TrainState
from smd_jax.losses.advantages import Scale, group_relative, groups_with_signal, leave_one_out
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.lora import has_lora
from smd_jax.model.protocol import Params
from smd_jax.train.async_rollout import Ahead, copied
from smd_jax.train.policy_loop import PolicyConfig, PolicyLoop
from smd_jax.train.samples import ROLLOUTS, Samples

Estimator = Literal["group_relative", "leave_one_out"]


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """One GRPO run; the other attributes are those of PolicyConfig.

    Attributes:
      advantages: "group_relative" (GRPO) or "leave_one_out" (RLOO, with scale_rewards "none").
      scale_rewards: how group-relative advantages are normalised, see `smd_jax.losses.advantages.group_relative`.
      dynamic_sampling: drop groups whose rewards are all equal, which have no gradient, so that they do not count in
        the loss; this many further rollouts may be drawn to put others in their place (DAPO, arXiv:2503.14476). 0 drops
        them only; None keeps them, as in TRL. A step that needs fewer rollouts than it may draw leaves out the prompts
        of the others.
      rollouts_ahead: 1: the next rollout is drawn while the learner takes its steps on this one, with the parameters
        before them, see `smd_jax.train.async_rollout`; it takes room for the parameters once more. The ratio of the
        loss, with its clipping, corrects what is off-policy by age; what is off-policy by eviction stays exact under
        the shadow mask. Rewards that have processes of their own are computed ahead, too; others when the rollout is
        taken, in the thread that takes it. 0: every rollout is drawn with the newest parameters.
    """

    advantages: Estimator = "group_relative"
    scale_rewards: Scale = "group"
    dynamic_sampling: int | None = None
    rollouts_ahead: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ValueError(
                f"expected group_size >= 2, because an advantage is a reward less the mean of its group; "
                f"got {self.group_size}"
            )
        self._check_ahead()
        if self.update.value is not None:
            raise ValueError(
                f"expected update.value None, because advantages from a group need no critic: PPOConfig has one; "
                f"got {self.update.value}"
            )
        if self.advantages == "leave_one_out" and self.scale_rewards != "none":
            raise ValueError(
                f"expected scale_rewards 'none' with advantages 'leave_one_out', whose mean is unbiased only without a "
                f"deviation of its own group; got {self.scale_rewards!r}"
            )
        check_choice("advantages", self.advantages, get_args(Estimator))
        check_choice("scale_rewards", self.scale_rewards, get_args(Scale))
        if self.dynamic_sampling is not None and self.scale_rewards == "batch":
            raise ValueError(
                "expected scale_rewards 'group' or 'none' with dynamic_sampling, which drops a part of the batch; "
                "got 'batch'"
            )
        if self.dynamic_sampling is not None and self.dynamic_sampling < 0:
            raise ValueError(f"expected dynamic_sampling >= 0 further rollouts, or None; got {self.dynamic_sampling}")

    def _check_ahead(self) -> None:
        if self.rollouts_ahead not in (0, 1):
            raise ValueError(f"expected rollouts_ahead 0 or 1; got {self.rollouts_ahead}")
        exact = takes_sampler_for_old(self.update) and self.update.correction.traits.needs_old
        if self.rollouts_ahead and (not exact or self.dynamic_sampling is not None or self.update.dense_learner):
            raise ValueError(
                "expected visibility 'shadow' with the correction Shadow(), no dynamic_sampling and no dense_learner "
                f"with rollouts_ahead 1, so that the ratio to the sampler is that of age alone; got {self.update} and "
                f"dynamic_sampling {self.dynamic_sampling}"
            )


@dataclass(frozen=True)
class GRPOLoop(PolicyLoop):
    """Everything of a GRPO run that does not change; the jitted functions are made once."""

    config: GRPOConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        split = {axis: ways for axis, ways in self.mesh.shape.items() if axis != "data" and ways > 1}
        if self.samples_ahead and split:
            # Two threads start programs; where both wait for other devices, each device must see them in one order.
            raise ValueError(
                "expected weights and rows that lie whole on every device (data alone) with rollouts_ahead 1, so that "
                f"a rollout sends nothing while an update does; got {split}"
            )

    def collect(self, state: TrainState, index: int) -> Samples:
        """One rollout; with dynamic sampling as many as it takes, or may take, to fill the batch with groups that have
        signal. Groups that are still without are there, but do not count."""
        if self.samples_ahead:
            assert state.behind is not None, "checked by `step`"
            return self.ahead.take(index, state.behind, self._ahead_of(state.behind, state.key, index))()
        if self.config.dynamic_sampling is None:
            return super().collect(state, index)
        most = 1 + self.config.dynamic_sampling
        key = jax.random.fold_in(state.key, index)
        rollouts = list[Samples]()
        groups_found = 0
        while len(rollouts) < most and groups_found < self.config.prompts_per_step:
            number = len(rollouts)
            # Rollout `index` owns the batches from index * most on, drawn or not: a resumed run draws the same ones,
            # whatever earlier rollouts needed.
            rollouts.append(self.graded_rollout(state.params, jax.random.fold_in(key, number), index * most + number))
            groups_found += int(_signal(rollouts[-1].rewards, self.config.group_size).sum())
        samples = fullest(rollouts, self.config.group_size, self.config.prompts_per_step)
        # The rows come from several rollouts: they are spread over the mesh as one batch.
        return samples._replace(trajectory=shard_batch(samples.trajectory, self.mesh))

    @property
    def samples_ahead(self) -> bool:
        return self.config.rollouts_ahead == 1

    @cached_property
    def ahead(self) -> Ahead[Callable[[], Samples]]:
        return Ahead()

    def settle(self) -> None:
        if self.samples_ahead:
            self.ahead.wait()

    def _ahead_of(self, params: Params, key: jax.Array, index: int) -> Callable[[], Callable[[], Samples]]:
        """What the thread does for a rollout, and returns what is left to do for whoever takes it."""

        def draw() -> Callable[[], Samples]:
            own_key = jax.random.fold_in(key, index)
            if self.rewards is None or self.rewards.seconds is None:
                # Graded in this process, and so by whoever takes it: the main thread is the only one in which
                # math-verify and its like can set a clock.
                return self.drawn_rollout(params, own_key, index)
            samples = self.graded_rollout(params, own_key, index)
            return lambda: samples

        return draw

    def check(self, state: TrainState) -> None:
        super().check(state)
        if self.samples_ahead != (state.behind is not None):
            raise ValueError(
                f"expected a state {'from one_behind(state)' if self.samples_ahead else 'without parameters behind'} "
                f"with rollouts_ahead {self.config.rollouts_ahead}; got {'none' if state.behind is None else 'some'}"
            )
        if self.samples_ahead and (has_lora(state.params) or jax.process_count() > 1):
            raise ValueError("expected whole parameters and one process with rollouts_ahead 1; got adapters or several")

    def learn_beside_next(
        self, state: TrainState, samples: Samples, follows: Callable[[], bool]
    ) -> tuple[TrainState, Metrics]:
        if not self.samples_ahead:
            return self.learn(state, samples)
        # Copied in the last step, too: a run that goes on behind it draws with them.
        now = copied(state.params)
        before = int(state.step)
        # Python waits for threads before a process ends: a rollout that nobody asks for would hold it up.
        if follows():
            following = before // self.config.steps_per_rollout + 1
            self.ahead.begin(following, now, self._ahead_of(now, jnp.copy(state.key), following))
        state, metrics = self.learn(state, samples)
        if int(state.step) == before:
            # Refused: a resume draws this rollout once more, and with the parameters that drew it.
            return state, metrics
        return state.replace(behind=now), metrics

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        counted_rows, rewarded_rows = (
            None if rows is None else jnp.asarray(rows) for rows in (samples.counted_rows, samples.rewarded_rows)
        )
        with jax.set_mesh(self.mesh):
            penalty, of_kl = self.kl_penalty(state, samples.trajectory, counted_rows)
            rewards = jnp.asarray(samples.rewards)
            if penalty is not None:
                # Before the mean of a group is taken off: a response that left the reference is worse than the others.
                rewards = rewards - jnp.asarray(on_host(penalty.sum(axis=1)))
            advantages = self.advantages(rewards, rewarded_rows)
            batch = self._batch(state.params, samples.trajectory, advantages, counted_rows)
            state, metrics = self.take_steps(state, batch)
        return state, metrics | of_kl

    @property
    def drops_rows(self) -> bool:
        """Whether an update is told which rows count: those of groups that dynamic sampling leaves."""
        return self.config.dynamic_sampling is not None

    def learner_batch(
        self, params: Params, trajectory: Trajectory, rewards: jax.Array, counted_rows: jax.Array | None
    ) -> TrainBatch:
        """What a whole rollout has to teach; arguments as `Loop.learner_batch`."""
        return self._batch(params, trajectory, self.advantages(rewards), counted_rows)

    def _batch(
        self, params: Params, trajectory: Trajectory, advantages: jax.Array, counted_rows: jax.Array | None
    ) -> TrainBatch:
        old, dense_old = self.old_logprobs(params, trajectory), self.dense_old_logprobs(params, trajectory)
        return TrainBatch(trajectory, advantages, old, counted_rows, dense_old_logprobs=dense_old)

    def known_advantages(self, samples: Samples) -> np.ndarray | None:
        if self.config.update.kl_in_reward:
            return None
        there = samples.rewarded_rows
        return np.asarray(self.advantages(samples.rewards, None if there is None else jnp.asarray(there)))

    def advantages(self, rewards: jax.Array | np.ndarray, rewarded_rows: jax.Array | None = None) -> jax.Array:
        """`[batch]`; `rewarded_rows` as in `smd_jax.losses.advantages`."""
        config = self.config
        if config.advantages == "leave_one_out":
            return leave_one_out(jnp.asarray(rewards), config.group_size, rewarded_rows)
        return group_relative(jnp.asarray(rewards), config.group_size, config.scale_rewards, rewarded_rows)

    def old_logprobs(self, params: Params, trajectory: Trajectory) -> jax.Array | None:
        """Log-probabilities of the learner before the update; None where nothing looks at them, or the update has them.

        With shadow masks the learner is the sampler, whose log-probabilities are at hand, unless a correction is to
        measure that. Others need a pass of their own, if more than one step is taken.
        """
        update = self.config.update
        if not update.correction.traits.needs_old:
            return None
        if takes_sampler_for_old(update):
            return trajectory.logprobs
        # A single step is taken at the rollout's parameters: the update finds these log-probabilities itself.
        return self.replay(params, trajectory) if self.config.steps_per_rollout > 1 else None

    def dense_old_logprobs(self, params: Params, trajectory: Trajectory) -> jax.Array | None:
        """The same of a dense learner on the same weights; None where there is none, or a single step finds them."""
        if self.config.update.dense_learner is None or self.config.steps_per_rollout == 1:
            return None
        return self.dense_replay(params, trajectory)


def fullest(rollouts: list[Samples], group_size: int, groups: int) -> Samples:
    """The first `groups` groups of several rollouts that have signal, and after them others, which do not count.

    Rewards, lengths and times in the metrics are those of all rollouts.
    """
    rewards = np.concatenate([samples.rewards for samples in rollouts])
    signal = _signal(rewards, group_size)
    # False sorts before True, and a stable sort keeps the order of the rollouts among groups of a kind.
    chosen = np.argsort(~signal, kind="stable")[:groups]
    rows = (chosen[:, None] * group_size + np.arange(group_size)).reshape(-1)
    trajectories = [samples.trajectory for samples in rollouts]
    every_row = [row for samples in rollouts for row in samples.task_rows]
    every_completion = [text for samples in rollouts for text in samples.completions]
    names = rollouts[0].metrics
    parts = rollouts[0].reward_parts
    metrics = {name: _over_rollouts(name, [samples.metrics[name] for samples in rollouts]) for name in names}
    return Samples(
        trajectory=jax.tree.map(lambda *x: jnp.concatenate(x)[rows], *trajectories),
        rewards=rewards[rows],
        task_rows=[every_row[i] for i in rows],
        completions=[every_completion[i] for i in rows],
        counted_rows=np.repeat(signal[chosen], group_size) & ~np.isnan(rewards[rows]),
        metrics=metrics | {ROLLOUTS: jnp.float32(len(rollouts))},
        reward_parts={name: np.concatenate([s.reward_parts[name] for s in rollouts])[rows] for name in parts},
    )


def _signal(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Which groups have unequal rewards, NaN left out; `[groups]`."""
    return np.asarray(groups_with_signal(jnp.asarray(rewards), group_size, jnp.asarray(~np.isnan(rewards))))


def _over_rollouts(name: str, values: list[jax.Array]) -> jax.Array:
    reductions = {"completions/min_length": jnp.min, "completions/max_length": jnp.max}
    summed = ("rewards/failed", "rollout/tokens", "time/rollout", "time/grading")
    reductions |= dict.fromkeys(summed, jnp.sum)
    return reductions.get(name, jnp.mean)(jnp.stack(values))
