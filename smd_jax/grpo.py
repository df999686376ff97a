"""GRPO's loop on the host: prompts ─► rollout ─► rewards ─► advantages ─► update, one function a step.

    loop = GRPOLoop(model, task, tokenizer, optimizer, config)
    for _ in range(steps):
        state, metrics = loop.step(state)

A step depends on the state alone (its step gives the rows and the random numbers), so a restored one goes on bitwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from smd_jax.advantages import Scale, group_relative
from smd_jax.eviction import EvictionPolicy
from smd_jax.metrics import completion_metrics, reward_metrics
from smd_jax.model import Decoder, Params
from smd_jax.prompts import (
    PromptBatch,
    Tokenizer,
    check_vocabulary,
    decode_completions,
    encode_prompts,
    repeat_each,
    repeat_prompts,
    wants_special_tokens,
)
from smd_jax.rewards import score_rewards
from smd_jax.rollout import RolloutConfig, rollout
from smd_jax.sharding import check_rows, make_mesh, shard_batch, shard_tree
from smd_jax.tasks import Row, Task, batch_columns, batch_indices, prompt_text
from smd_jax.trajectory import Trajectory
from smd_jax.update import Metrics, TrainBatch, TrainState, UpdateConfig, make_score, make_update


@dataclass(frozen=True)
class GRPOConfig:
    """One GRPO run.

    Attributes:
      prompts_per_step: prompts of one rollout. group_size: completions per prompt.
      prompt_width: columns of the prompt, in tokens; longer prompts are refused.
      policy: eviction policy of the sampler. rollout: its sizes.
      update: the learner. minibatches: optimizer steps per rollout; the first is exactly on-policy.
      scale_rewards: how advantages are normalised, see `smd_jax.advantages.group_relative`.
      seed: order of the rows.
    """

    prompts_per_step: int
    group_size: int
    prompt_width: int
    policy: EvictionPolicy
    rollout: RolloutConfig
    update: UpdateConfig = UpdateConfig()
    minibatches: int = 1
    scale_rewards: Scale = "group"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "prompt_width", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1; got {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(
                f"expected group_size >= 2, because an advantage is a reward less the mean of its group; "
                f"got {self.group_size}"
            )
        if not self.rollout.sampling.trainable:
            raise ValueError(
                "expected sampling at a temperature > 0 without top-k or top-p, because the learner does not replay "
                f"token filters; got {self.rollout.sampling}"
            )
        if self.rows % self.minibatches:
            raise ValueError(f"expected rows that divide into {self.minibatches} minibatches; got {self.rows}")

    @property
    def rows(self) -> int:
        """Completions of one rollout."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True)
class GRPOLoop:
    """Everything of a run that does not change; the jitted functions are made once.

    Attributes:
      mesh: where state and batches lie; one device by default.
    """

    model: Decoder
    task: Task
    tokenizer: Tokenizer
    optimizer: optax.GradientTransformation
    config: GRPOConfig
    mesh: Mesh = field(default_factory=make_mesh)

    def __post_init__(self) -> None:
        check_vocabulary(self.tokenizer, self.model.config.vocab_size)
        minibatch = self.config.rows // self.config.minibatches
        check_rows(minibatch, self.mesh, "a minibatch")
        check_rows(self.config.update.microbatch_size or minibatch, self.mesh, "a microbatch")

    @cached_property
    def update(self):
        return make_update(self.model, self.optimizer, self.config.update)

    @cached_property
    def score(self):
        return make_score(self.model, self.config.update.visibility)

    def step(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """One rollout and its optimizer steps. Metrics come as numbers on the host: those that compare sampler and
        learner are of the first minibatch, before any step; the others are means over minibatches."""
        started = time.perf_counter()
        state = shard_tree(state, self.mesh)  # elsewhere, the first step would be compiled for that place alone
        step = int(state.step) // self.config.minibatches
        trajectory, rewards = self.sample(state, step)
        state, metrics = self.learn(state, trajectory, rewards)
        metrics |= reward_metrics(jnp.asarray(rewards), self.config.group_size)
        metrics |= completion_metrics(trajectory.response_mask, trajectory.terminated)
        host = {name: float(value) for name, value in jax.device_get(metrics).items()}
        return state, host | {"step_time": time.perf_counter() - started}

    def sample(self, state: TrainState, step: int) -> tuple[Trajectory, np.ndarray]:
        """Trajectories and rewards of one step, the completions of a prompt contiguous."""
        config = self.config
        rows = [self.task[int(i)] for i in batch_indices(len(self.task), config.prompts_per_step, step, config.seed)]
        prompts = repeat_prompts(self.encode(rows, config.prompt_width), config.group_size)
        key = jax.random.fold_in(state.key, step)
        with jax.set_mesh(self.mesh):
            prompts = shard_batch(prompts, self.mesh)
            trajectory = rollout(self.model, state.params, prompts, key, policy=config.policy, config=config.rollout)
        return trajectory, grade(self.task, self.tokenizer, repeat_each(rows, config.group_size), trajectory)

    def learn(self, state: TrainState, trajectory: Trajectory, rewards: np.ndarray) -> tuple[TrainState, Metrics]:
        """The optimizer steps of one rollout."""
        config = self.config
        advantages = group_relative(jnp.asarray(rewards), config.group_size, config.scale_rewards)
        with jax.set_mesh(self.mesh):
            batch = TrainBatch(trajectory, advantages, self.old_logprobs(state.params, trajectory))
            steps = []
            for index in range(config.minibatches):
                part = shard_batch(jax.tree.map(lambda x, i=index: x[i :: config.minibatches], batch), self.mesh)
                state, metrics = self.update(state, part)
                steps.append(metrics)
        return state, {name: _of_minibatches(name, [metrics[name] for metrics in steps]) for name in steps[0]}

    def old_logprobs(self, params: Params, trajectory: Trajectory) -> jax.Array | None:
        """Of the policy before the update. With shadow masks that is the sampler, whose log-probabilities are at hand.
        A dense learner needs a pass of its own, unless it takes one step only and the ratio is 1 by definition."""
        if self.config.update.visibility == "shadow":
            return trajectory.logprobs
        return self.score(params, trajectory) if self.config.minibatches > 1 else None

    def encode(self, rows: Sequence[Row], width: int) -> PromptBatch:
        texts = [prompt_text(row, self.tokenizer) for row in rows]
        return encode_prompts(
            self.tokenizer,
            texts,
            width=width,
            max_positions=self.model.config.max_positions,
            add_special_tokens=wants_special_tokens(self.tokenizer),
        )

    def evaluate(
        self, params: Params, task: Task, key: jax.Array, *, policy: EvictionPolicy, config: RolloutConfig
    ) -> float:
        """Mean reward over all rows of `task`, one completion each, decoded under any policy, in one batch."""
        rows = [task[i] for i in range(len(task))]
        with jax.set_mesh(self.mesh):
            prompts = shard_batch(self.encode(rows, self.config.prompt_width), self.mesh)
            trajectory = rollout(self.model, params, prompts, key, policy=policy, config=config)
        return float(grade(task, self.tokenizer, rows, trajectory).mean())


def _of_minibatches(name: str, values: list[jax.Array]) -> jax.Array:
    on_policy = name == "mismatch_kl" or name.startswith("sampling/")
    return values[0] if on_policy or len(values) == 1 else jnp.mean(jnp.stack(values))


def grade(task: Task, tokenizer: Tokenizer, rows: Sequence[Row], trajectory: Trajectory) -> np.ndarray:
    """Rewards float32 `[batch]` of the completions, `rows[i]` belonging to completion i."""
    completions = decode_completions(tokenizer, trajectory.response, trajectory.response_mask)
    return score_rewards(task.reward, [row["prompt"] for row in rows], completions, batch_columns(rows))
