"""Rollouts with environments: conversations in place of single completions."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from smd_jax.config import check_choice
from smd_jax.devices.sharding import sequence_ways, shard_batch
from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import Environments
from smd_jax.learner.state import Metrics
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.conversation import begin_conversations, conversation_sampler, to_trajectory
from smd_jax.sampler.conversation_loop import ConversationConfig, Conversed, converse
from smd_jax.sampler.environment_respondent import Conversation, EnvironmentRespondent
from smd_jax.sampler.keys import row_keys
from smd_jax.tasks.graded import Failure, Graded
from smd_jax.tasks.rewards import RewardWarning, check_failures
from smd_jax.tasks.task import Task, rows_of_step
from smd_jax.text.prompts import PromptBatch, Tokenizer, decode_completions, repeat_each, repeat_prompts
from smd_jax.text.stop_strings import StopTable, stop_table
from smd_jax.train.grading import GradedBatch, rollout_metrics
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.samples import Samples

Credit = Literal["trajectory", "turn"]  # what has an advantage of its own


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Conversations with environments in a training run.

    Attributes:
      environments: see `smd_jax.environments.open_environments`.
      conversation: limits. `RolloutConfig.max_new_tokens` counts all tokens after the prompt.
      credit: "trajectory" gives all turns of a conversation one advantage, from the sum of its rewards; "turn" gives
        each turn its own, from its reward and those after it, see `smd_jax.losses.advantages.turn_relative`.
      max_failed: largest share of a rollout's conversations whose environment may fail; more end the run.
      template_variables: of the chat template, such as {"enable_thinking": False}.
    """

    environments: Environments
    conversation: ConversationConfig = ConversationConfig()
    credit: Credit = "trajectory"
    max_failed: float = 0.25
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, get_args(Credit))
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"expected max_failed from 0 to 1, because it is a share; got {self.max_failed}")


@dataclass(frozen=True)
class ConversationRollouts:
    """Samples conversations. Its attributes are those of the loop.

    Raises:
      ValueError: `decode_rows` on several devices, several processes, and what `conversation_sampler` and Dialogue
        raise.
    """

    model: LanguageModel
    task: Task
    tokenizer: Tokenizer
    config: LoopConfig
    mesh: Mesh
    environment: EnvironmentConfig

    def __post_init__(self) -> None:
        if jax.process_count() > 1:
            raise ValueError(f"expected one process with an environment; got {jax.process_count()}")
        if sequence_ways(self.mesh) > 1:
            raise ValueError(
                f"expected a mesh without a sequence axis with an environment; got {dict(self.mesh.shape)}"
            )
        if self.config.decode_rows is not None and self.mesh.size > 1:
            raise ValueError(
                "expected decode_rows None with an environment on several devices, because conversations move between "
                f"rows; got {self.config.decode_rows}"
            )
        if self.config.rollout.eos_token_id is None and not self.config.stop_strings:
            raise ValueError("expected an eos_token_id or stop_strings with an environment, to end a turn; got neither")
        conversation_sampler(self.model, self.config.policy, self.config.rollout, self.config.prompt_width)
        _ = self.dialogue

    @cached_property
    def dialogue(self) -> Dialogue:
        """Writes prompts and answers."""
        return Dialogue(self.tokenizer, self.environment.template_variables)

    @cached_property
    def stop_table(self) -> StopTable | None:
        """The stop strings as a table over the tokenizer's tokens."""
        return stop_table(self.tokenizer, self.config.stop_strings, self.model.shape.vocab_size)

    def sample(self, params: Params, key: jax.Array, batch: int) -> Samples:
        """Samples a group of conversations for each row of a task batch.

        Raises:
          TooManyFailures: more environments failed than `max_failed` allows.
        """
        config = self.config
        rows = rows_of_step(self.task, config.prompts_per_step, batch, config.seed)
        began = time.perf_counter()
        respondent = EnvironmentRespondent(
            self.environment.environments, self.dialogue, self.tokenizer, rows, config.group_size, config.prompt_width
        )
        with jax.set_mesh(self.mesh):
            conversed = converse(
                self.model,
                params,
                shard_batch(respondent.prompts, self.mesh),
                key,
                respondent,
                policy=config.policy,
                config=config.rollout,
                conversation=self.environment.conversation,
                group_size=config.group_size,
                stop=self.stop_table,
                decode_rows=config.decode_rows,
            )
        seconds = time.perf_counter() - began
        conversations = tuple(respondent.conversations)
        for conversation, ending in zip(conversations, conversed.endings, strict=True):
            conversation.ending = ending
        graded = _graded(conversations)
        check_failures(graded, self.environment.max_failed, lambda row: rows[row // config.group_size]["prompt"])
        for failure in graded.failures[:1]:
            warnings.warn(failure.described(), RewardWarning, stacklevel=2)
        trajectory = shard_batch(conversed.trajectory, self.mesh)
        after_prompt = np.asarray(trajectory.valid[:, trajectory.prompt_width :])
        completions = decode_completions(self.tokenizer, np.asarray(trajectory.response), after_prompt)
        measured = {
            "time/rollout": seconds,
            "time/environment": conversed.stats.waited_seconds,
            "time/grading": 0.0,
            "rollout/utilisation": conversed.stats.utilisation,
        }
        metrics = rollout_metrics(trajectory, GradedBatch(completions, graded, measured), {}, config.group_size)
        return Samples(
            trajectory,
            graded.rewards,
            repeat_each(rows, config.group_size),
            completions,
            graded.rewarded_rows,
            metrics | _metrics(conversed),
            conversations=conversations,
        )

    def shapes(self, params: Params) -> Trajectory:
        """The shapes of a rollout's trajectory."""
        config = self.config
        sampler = conversation_sampler(self.model, config.policy, config.rollout, config.prompt_width)
        count, group = config.prompts_per_step, config.group_size

        def begun(params: Params) -> Trajectory:
            shape = (count, config.prompt_width)
            prompts = PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
            keys = row_keys(jax.random.key(0, impl="threefry2x32"), count * group)
            limit = jnp.zeros((count * group,), jnp.int32)
            state = begin_conversations(sampler, params, prompts, keys, keys[::group], limit)
            return to_trajectory(sampler, repeat_prompts(prompts, group), state, state.rows.done)

        return jax.eval_shape(begun, params)


def turn_rewards(conversations: Sequence[Conversation], trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """The reward of every turn, `[batch, turns]` float32, and which turns there are. A turn that was cut off, and so
    never answered, has reward 0."""
    counts = np.asarray(jnp.max(trajectory.turns(), axis=1))
    rewards = np.zeros((len(conversations), max(int(counts.max()), 1)), np.float32)
    for row, conversation in enumerate(conversations):
        rewards[row, : len(conversation.rewards)] = conversation.rewards
    return rewards, np.arange(rewards.shape[1])[None] < counts[:, None]


def _graded(conversations: Sequence[Conversation]) -> Graded:
    failures = [
        Failure(row, "environment", each.failure.kind, each.failure.message)
        for row, each in enumerate(conversations)
        if each.failure is not None
    ]
    return Graded(np.array([each.reward for each in conversations], np.float32), {}, tuple(failures))


def _metrics(conversed: Conversed) -> Metrics:
    trajectory, rows = conversed.trajectory, len(conversed.endings)
    return {
        "conversations/turns": jnp.mean(jnp.max(trajectory.turns(), axis=1).astype(jnp.float32)),
        "conversations/read_tokens": jnp.float32(conversed.stats.read / rows),
        "conversations/ended": jnp.mean(trajectory.terminated.astype(jnp.float32)),
    }
