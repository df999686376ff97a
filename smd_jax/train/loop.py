"""What all algorithms share on the host: prompts ─► rollout ─► rewards, and then whatever learns from them.

    loop = GRPOLoop(model, task, tokenizer, optimizer, config)       or PPOLoop, OnlineDPOLoop
    for _ in range(steps):
        state, metrics = loop.step(state)

A step depends on the state alone (its step gives the rows and the random numbers), so a restored one goes on bitwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.learner.update import Metrics, TrainState, UpdateConfig, check_reference, check_rows_of, make_update
from smd_jax.metrics import MISMATCH_METRICS, completion_metrics, reward_metrics, token_mean
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.engine import Engine, Progress
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sharding import check_rows, make_mesh, shard_batch, shard_tree
from smd_jax.tasks.rewards import compute_rewards
from smd_jax.tasks.task import Row, Task, batch_columns, batch_indices, prompt_text
from smd_jax.text.prompts import (
    PromptBatch,
    Tokenizer,
    check_vocabulary,
    decode_completions,
    encode_prompts,
    repeat_each,
    repeat_prompts,
    wants_special_tokens,
)
from smd_jax.text.stop_strings import StopTable, compile_stop_strings
from smd_jax.trajectory import Trajectory, check_finite


@dataclass(frozen=True)
class LoopConfig:
    """One run, as far as all algorithms share it.

    Attributes:
      prompts_per_step: prompts of one rollout. group_size: completions per prompt.
      prompt_width: columns of the prompt, in tokens; longer prompts are refused.
      policy: eviction policy of the sampler. rollout: its sizes.
      slots: completions that are decoded at the same time; those that end make room for others, see
        `smd_jax.sampler.engine`. None decodes all of a rollout at once, in one program.
      prefill_rows: with slots, prompts that are read at the same time.
      stop_strings: texts that end a completion, and stay in it.
      minibatches: optimizer steps per pass over a rollout, each with whole groups; the first step is exactly on-policy.
      num_iterations: passes over a rollout.
      seed: order of the rows.
    """

    prompts_per_step: int
    group_size: int
    prompt_width: int
    policy: EvictionPolicy
    rollout: RolloutConfig
    slots: int | None = None
    prefill_rows: int = 8
    stop_strings: tuple[str, ...] = ()
    minibatches: int = 1
    num_iterations: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "prompt_width", "minibatches", "num_iterations"):
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
    def rows(self) -> int:
        """Completions of one rollout."""
        return self.prompts_per_step * self.group_size

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps."""
        return self.minibatches * self.num_iterations


class Samples(NamedTuple):
    """One rollout and what the task said of it, on the host; the completions of a prompt are contiguous.

    Attributes:
      trajectory: `[batch, ...]`. rewards: float32 `[batch]`.
      rows: of the task, one per completion. completions: their texts.
      counts: `[batch]` false for completions to leave out of the update; None: all count.
      metrics: of everything that was drawn, also of what is left out.
    """

    trajectory: Trajectory
    rewards: np.ndarray
    rows: list[Row]
    completions: list[str]
    counts: np.ndarray | None
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Loop:
    """Everything of a run that does not change. Subclasses make their jitted functions once, and define `learn`.

    Attributes:
      mesh: where state and batches lie; one device by default.
      report: of rollouts with `config.slots`, called after every segment.
    """

    model: LanguageModel
    task: Task
    tokenizer: Tokenizer
    optimizer: optax.GradientTransformation
    config: LoopConfig
    mesh: Mesh = field(default_factory=make_mesh)
    report: Callable[[Progress], None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_vocabulary(self.tokenizer, self.model.shape.vocab_size)
        if self.config.slots is not None:
            self.engine(self.config.policy, self.config.rollout, self.config.slots)  # raises if it cannot be
        check_rows(self.config.rows // self.config.minibatches, self.mesh, "a minibatch")

    def learn(self, state: TrainState, samples: Samples) -> tuple[TrainState, Metrics]:
        """The optimizer steps of one rollout."""
        raise TypeError(f"{type(self).__name__} has no learn: its class must define it")

    def step(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """One rollout and its optimizer steps. Metrics come as numbers on the host: those that compare sampler and
        learner (`mismatch_kl`, `sampling/*`, MISMATCH_METRICS) are of the first optimizer step, before it; the others
        are means over the optimizer steps."""
        started = time.perf_counter()
        self.check(state)  # before the rollout, which takes its time
        state = shard_tree(state, self.mesh)  # elsewhere, the first step would be compiled for that place alone
        samples = self.sample(state, int(state.step) // self.config.steps_per_rollout)
        state, metrics = self.learn(state, samples)
        host = {name: float(value) for name, value in jax.device_get(metrics | samples.metrics).items()}
        return state, host | {"step_time": time.perf_counter() - started}

    def check(self, state: TrainState) -> None:
        """Raises ValueError for a state that `learn` cannot use."""

    def sample(self, state: TrainState, step: int) -> Samples:
        """One rollout of prompts that no other step has."""
        return self.draw(state.params, jax.random.fold_in(state.key, step), step)

    def draw(self, params: Params, key: jax.Array, index: int) -> Samples:
        """The rollout of the task's batch number `index`; the key is consumed."""
        config = self.config
        rows = [self.task[int(i)] for i in batch_indices(len(self.task), config.prompts_per_step, index, config.seed)]
        trajectory, took = self.roll(params, rows, key, config.policy, config.rollout, config.group_size)
        repeated = repeat_each(rows, config.group_size)
        completions, rewards = grade(self.task, self.tokenizer, repeated, trajectory)
        metrics = reward_metrics(jnp.asarray(rewards), config.group_size)
        metrics |= completion_metrics(trajectory.response_mask, trajectory.terminated)
        assert trajectory.entropy is not None  # only of trajectories made by hand
        metrics["rollout/entropy"] = token_mean(trajectory.entropy, trajectory.response_mask)
        return Samples(trajectory, rewards, repeated, completions, None, metrics | took)

    @cached_property
    def stop_table(self) -> StopTable | None:
        """The stop strings, over the tokens of this tokenizer."""
        strings, vocab_size = self.config.stop_strings, self.model.shape.vocab_size
        return compile_stop_strings(self.tokenizer, strings, vocab_size) if strings else None

    def roll(
        self,
        params: Params,
        rows: Sequence[Row],
        key: jax.Array,
        policy: EvictionPolicy,
        config: RolloutConfig,
        group_size: int,
    ) -> tuple[Trajectory, Metrics]:
        """`group_size` responses to each row's prompt, in one batch or through `config.slots`; and what it took."""
        params = self.policy_params(params)
        prompts = self.encode(rows, self.config.prompt_width)
        if self.config.slots is not None:
            done = self.engine(policy, config, self.config.slots).run(
                params, prompts, key, group_size=group_size, stop=self.stop_table, report=self.report
            )
            took = {"rollout/utilisation": jnp.float32(done.stats.utilisation)}
            return shard_batch(done.trajectory, self.mesh), took
        copies = self._copies(len(rows), group_size)
        with jax.set_mesh(self.mesh):
            trajectory = rollout(
                self.model,
                params,
                shard_batch(repeat_prompts(prompts, copies), self.mesh),
                key,
                policy=policy,
                config=config,
                group_size=group_size // copies,
                stop=self.stop_table,
            )
        check_finite(trajectory.logprobs)
        return trajectory, {}

    def policy_params(self, params: Params) -> Params:
        """Those that the sampler reads: of the model alone."""
        return params

    def engine(self, policy: EvictionPolicy, config: RolloutConfig, slots: int) -> Engine:
        return Engine(self.model, policy, config, slots, self.config.prefill_rows, self.mesh)

    def _copies(self, prompts: int, group_size: int) -> int:
        """How often a prompt is read: once, or as often as it takes to divide the prompts over the mesh."""
        ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        fits = (
            copies for copies in range(1, group_size + 1) if not group_size % copies and not prompts * copies % ways
        )
        return next(fits, group_size)

    def batches(self, batch: Any) -> Iterator[Any]:
        """The minibatches of one rollout, as often as `num_iterations` says; each has whole groups. `batch` has
        equally many rows of every group, contiguous: all its completions, or one pair."""
        config = self.config
        groups = np.arange(len(jax.tree.leaves(batch)[0])).reshape(config.prompts_per_step, -1)
        parts = [groups[index :: config.minibatches].reshape(-1) for index in range(config.minibatches)]
        for rows in parts * config.num_iterations:
            yield shard_batch(batch if len(parts) == 1 else _rows(batch, rows), self.mesh)

    def encode(self, rows: Sequence[Row], width: int) -> PromptBatch:
        texts = [prompt_text(row, self.tokenizer) for row in rows]
        return encode_prompts(
            self.tokenizer,
            texts,
            width=width,
            max_positions=self.model.shape.max_positions,
            add_special_tokens=wants_special_tokens(self.tokenizer),
        )

    def evaluate(
        self, params: Params, task: Task, key: jax.Array, *, policy: EvictionPolicy, config: RolloutConfig
    ) -> float:
        """Mean reward over all rows of `task`, one completion each, decoded under any policy."""
        rows = [task[i] for i in range(len(task))]
        trajectory, _ = self.roll(params, rows, key, policy, config, group_size=1)
        return float(grade(task, self.tokenizer, rows, trajectory)[1].mean())


@dataclass(frozen=True)
class PolicyConfig(LoopConfig):
    """A run of an algorithm with a policy loss; the other attributes are those of LoopConfig.

    Attributes:
      update: the learner.
    """

    update: UpdateConfig = UpdateConfig()


@dataclass(frozen=True)
class PolicyLoop(Loop):
    """What GRPO, RLOO and PPO share: the update of `smd_jax.learner.update`."""

    config: PolicyConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        config, minibatch = self.config, self.config.rows // self.config.minibatches
        check_rows_of(config.update, minibatch, config.rollout.max_new_tokens)
        check_rows(config.update.microbatch_size or minibatch, self.mesh, "a microbatch")

    @cached_property
    def update(self):
        return make_update(self.model, self.optimizer, self.config.update)

    def check(self, state: TrainState) -> None:
        check_reference(self.config.update, state)


def _rows(batch: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda x: x[rows], batch)


def over_steps(steps: Iterable[Metrics]) -> Metrics:
    """The metrics of a rollout from those of its optimizer steps: what compares sampler and learner is of the first.
    None without any step."""
    steps = list(steps)
    return {} if not steps else {name: _of_steps(name, [metrics[name] for metrics in steps]) for name in steps[0]}


def _of_steps(name: str, values: list[jax.Array]) -> jax.Array:
    before_any = name == "mismatch_kl" or name.startswith("sampling/") or name in MISMATCH_METRICS
    return values[0] if before_any or len(values) == 1 else jnp.mean(jnp.stack(values))


def grade(
    task: Task, tokenizer: Tokenizer, rows: Sequence[Row], trajectory: Trajectory
) -> tuple[list[str], np.ndarray]:
    """Texts of the completions and their rewards, float32 `[batch]`; `rows[i]` belongs to completion i."""
    completions = decode_completions(tokenizer, trajectory.response, trajectory.response_mask)
    return completions, compute_rewards(task.reward, [row["prompt"] for row in rows], completions, batch_columns(rows))
