"""Conversations as the samples of a training step, and what belongs to their turns."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from smd_jax.learner.state import Metrics
from smd_jax.message.trajectory import Trajectory
from smd_jax.sampler.environment_respondent import Conversation
from smd_jax.tasks.rewards import RewardWarning, check_failures
from smd_jax.tasks.task import Row
from smd_jax.text.prompts import Tokenizer, decode_completions, repeat_each
from smd_jax.train.conversations import ConversationBatch
from smd_jax.train.grading import GradedBatch, rollout_metrics
from smd_jax.train.samples import Samples


def conversation_samples(
    batch: ConversationBatch, tokenizer: Tokenizer, rows: Sequence[Row], group_size: int, max_failed: float
) -> Samples:
    """The samples of a step.

    Args:
      rows: of the task, one for each group. max_failed: largest share of conversations without a reward.

    Raises:
      TooManyFailures: more environments failed.
    """
    graded, trajectory = batch.graded, batch.trajectory
    check_failures(graded, max_failed)
    for failure in graded.failures[:1]:
        warnings.warn(failure.described(), RewardWarning, stacklevel=2)
    contexts = len(batch.present) // len(batch.conversations)
    after_prompt = np.asarray(trajectory.valid[:, trajectory.prompt_width :])
    of_rows = decode_completions(tokenizer, np.asarray(trajectory.response), after_prompt)
    completions = ["\n".join(filter(None, of_rows[i : i + contexts])) for i in range(0, len(of_rows), contexts)]
    measured = {
        "time/rollout": batch.seconds,
        "time/environment": sum(each.waited_seconds for each in batch.stats),
        "time/grading": 0.0,
        "rollout/utilisation": batch.utilisation,
    }
    samples = Samples(
        trajectory,
        graded.rewards,
        repeat_each(list(rows), group_size),
        completions,
        graded.rewarded_rows,
        rollout_metrics(trajectory, GradedBatch(completions, graded, measured), {}, group_size) | _metrics(batch),
        conversations=batch.conversations,
    )
    if contexts == 1:
        return samples
    return samples._replace(counted_rows=batch.present & np.repeat(~np.isnan(graded.rewards), contexts))


def turn_rewards(conversations: Sequence[Conversation], trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """The reward of every turn, `[batch, turns]` float32, and which turns there are. A turn that was cut off, and so
    never answered, has reward 0."""
    counts = np.asarray(jnp.max(trajectory.turns(), axis=1))
    rewards = np.zeros((len(conversations), max(int(counts.max()), 1)), np.float32)
    for row, conversation in enumerate(conversations):
        rewards[row, : len(conversation.rewards)] = conversation.rewards
    return rewards, np.arange(rewards.shape[1])[None] < counts[:, None]


def tokens_of_turns(of_turns: Float[Array, "batch turns"], trajectory: Trajectory) -> Float[Array, "batch R"]:
    """What belongs to each turn, for each token that was sampled in it; 0 for all others."""
    turns = trajectory.turns()
    index = jnp.clip(turns - 1, 0, of_turns.shape[1] - 1)
    return jnp.where(turns > 0, jnp.take_along_axis(of_turns, index, axis=1), 0.0)


def last_tokens(trajectory: Trajectory) -> Bool[Array, "batch R"]:
    """The last token of each turn."""
    mask = trajectory.response_mask
    return mask & ~jnp.pad(mask, [(0, 0), (0, 1)])[:, 1:]


def _metrics(batch: ConversationBatch) -> Metrics:
    trajectory, count = batch.trajectory, len(batch.conversations)
    contexts = batch.present.reshape(count, -1)
    turns = jnp.max(trajectory.turns(), axis=1).reshape(count, -1).sum(axis=1)
    metrics = {
        # Every context but the last ends with a summary, which is no turn.
        "conversations/turns": jnp.mean((turns - jnp.asarray(contexts.sum(axis=1) - 1)).astype(jnp.float32)),
        "conversations/read_tokens": jnp.float32(sum(each.read for each in batch.stats) / count),
        "conversations/ended": jnp.mean(trajectory.terminated.astype(jnp.float32)),
    }
    if contexts.shape[1] > 1:
        metrics["conversations/contexts"] = jnp.float32(contexts.sum() / count)
    return metrics
