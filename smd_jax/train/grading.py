"""Grades completions.

Each process grades the completions that it sampled. Then all processes gather completions and rewards of the whole
batch, so that group statistics, advantages and the choice of groups are the same everywhere. Tokens and masks stay on
the devices of their process.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.devices.process_rows import DataShards
from smd_jax.devices.processes import all_or_none, gather_json
from smd_jax.learner.state import Metrics
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import completion_metrics, evicted_share, reward_metrics, token_mean
from smd_jax.tasks.rewards import Failure, Graded, Rewards, RewardWarning
from smd_jax.tasks.task import Row, Task, batch_columns, rows_of_step
from smd_jax.text.prompts import Tokenizer, decode_completions, repeat_each
from smd_jax.train.conversations import EnvironmentConfig
from smd_jax.train.rollouts import Sampled


class GradedBatch(NamedTuple):
    """Completions of a process or of all processes.

    Attributes:
      completions: their texts. graded: their rewards.
      measured: metrics of the sampling. Gathering takes the maximum over processes of times, named `time/…`, and the
        mean of all others.
    """

    completions: list[str]
    graded: Graded
    measured: dict[str, float]


def grade(
    sampled: Sampled,
    grader: Rewards | EnvironmentConfig,
    tokenizer: Tokenizer,
    data_shards: DataShards,
    group_size: int,
    count: int | None = None,
) -> GradedBatch:
    """Texts and rewards of the completions of all processes; all must call it, each with its own part.

    Args:
      grader: reward functions; or the environment, which has already rewarded its conversations.
      count: number of completions to grade, the first ones; None: all.
    """
    rows = repeat_each(sampled.rows, group_size)
    count = len(rows) if count is None else count
    part = data_shards.part(len(rows))
    own_rows = rows[part.start : min(part.stop, count)]
    with all_or_none():
        began = time.perf_counter()
        if isinstance(grader, Rewards):
            completions, graded = _grade_texts(sampled.trajectory, own_rows, grader, tokenizer)
        else:
            completions, graded = _grade_conversations(sampled, tokenizer, count)
        measured = sampled.measured | {"time/grading": time.perf_counter() - began}
    batch = gather_graded(data_shards, GradedBatch(completions, graded, measured))
    if not isinstance(grader, Rewards):  # Rewards has warned about its own failures
        for failure in batch.graded.failures[:1]:
            warnings.warn(failure.described(), RewardWarning, stacklevel=2)
    return batch


def _grade_texts(
    trajectory: Trajectory, rows: Sequence[Row], rewards: Rewards, tokenizer: Tokenizer
) -> tuple[list[str], Graded]:
    """Texts and rewards of a process's first completions; `rows[i]` belongs to completion i."""
    if not rows:  # all prompts of this process are padding
        return [], Graded(np.zeros(0, np.float32), {}, ())
    tokens, mask = np.asarray(trajectory.response)[: len(rows)], np.asarray(trajectory.response_mask)[: len(rows)]
    completions = decode_completions(tokenizer, tokens, mask)
    completion_ids = [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
    prompts = [row["prompt"] for row in rows]
    return completions, rewards.grade_part(prompts, completions, completion_ids, batch_columns(rows))


def _grade_conversations(sampled: Sampled, tokenizer: Tokenizer, count: int) -> tuple[list[str], Graded]:
    """All text after the prompt of each of the first `count` conversations, with its contexts below each other, and
    their rewards."""
    trajectory, conversations = sampled.trajectory, sampled.conversations[:count]
    after_prompt = np.asarray(trajectory.valid[:, trajectory.prompt_width :])
    texts = decode_completions(tokenizer, np.asarray(trajectory.response), after_prompt)
    contexts = len(texts) // len(sampled.conversations)
    completions = ["\n".join(filter(None, texts[i : i + contexts])) for i in range(0, count * contexts, contexts)]
    failures = tuple(
        Failure(row, "environment", each.failure.kind, each.failure.message)
        for row, each in enumerate(conversations)
        if each.failure is not None
    )
    return completions, Graded(np.array([each.reward for each in conversations], np.float32), {}, failures)


def gather_graded(data_shards: DataShards, part: GradedBatch) -> GradedBatch:
    """The completions and rewards of all processes, in the order of the batch; all processes must call it."""
    if jax.process_count() == 1:
        return part
    graded = part.graded
    message = {
        "completions": part.completions,
        # A float32 survives JSON unchanged, because a Python float holds it exactly.
        "rewards": graded.rewards.tolist(),
        "parts": {name: values.tolist() for name, values in graded.parts.items()},
        "failures": [list(failure) for failure in graded.failures],
        "measured": part.measured,
    }
    messages = data_shards.one_per_group(gather_json(message))
    first_rows = accumulate((len(each["rewards"]) for each in messages), initial=0)
    failures = [
        Failure(first + row, *rest)
        for first, each in zip(first_rows, messages, strict=False)
        for row, *rest in each["failures"]
    ]
    whole = Graded(
        np.array([reward for each in messages for reward in each["rewards"]], np.float32),
        {
            # A process without completions has no parts.
            name: np.array([x for each in messages for x in each["parts"].get(name, ())], np.float32)
            for name in messages[0]["parts"]
        },
        tuple(failures),
    )
    measured = dict[str, float]()
    for name in part.measured:
        values = [each["measured"][name] for each in messages]
        measured[name] = max(values) if name.startswith("time/") else float(np.mean(values))
    return GradedBatch([text for each in messages for text in each["completions"]], whole, measured)


def rollout_metrics(trajectory: Trajectory, batch: GradedBatch, group_size: int, *, log_parts: bool) -> Metrics:
    """Rewards, lengths, entropy and evictions of a whole rollout.

    Args:
      log_parts: log the rewards of each function by its name.
    """
    rewarded = batch.graded.rewarded_rows
    rewards = jnp.asarray(batch.graded.rewards)
    metrics: Metrics = {name: jnp.float32(number) for name, number in batch.measured.items()}
    metrics["rollout/tokens"] = jnp.sum(trajectory.response_mask)
    metrics |= reward_metrics(rewards, group_size, jnp.asarray(rewarded))
    metrics["rewards/failed"] = jnp.float32((~rewarded).sum())
    for name, part in batch.graded.parts.items() if log_parts else ():
        metrics |= part_metrics(name, part)
    completions = len(rewards)  # with several rows each, if their contexts are compacted
    tokens = trajectory.response_mask.reshape(completions, -1)
    metrics |= completion_metrics(tokens, trajectory.terminated[:: len(trajectory.terminated) // completions])
    assert trajectory.entropy is not None  # the sampler records it; None is for trajectories made by hand
    metrics["rollout/entropy"] = token_mean(trajectory.entropy, trajectory.response_mask)
    metrics["rollout/evicted_share"] = evicted_share(trajectory.mask.evicted_at, trajectory.valid)
    return metrics


def part_metrics(name: str, part: np.ndarray) -> Metrics:
    """TRL's metrics of one reward function, over the completions that it has graded.

    NaN without any such completion; the deviation (n - 1) of a single one is 0.
    """
    numbers = part[~np.isnan(part)]
    mean = numbers.mean() if len(numbers) else np.nan
    deviation = numbers.std(ddof=1) if len(numbers) > 1 else mean - mean
    return {f"rewards/{name}/mean": jnp.float32(mean), f"rewards/{name}/std": jnp.float32(deviation)}


def reward_columns(rewards: Rewards, task: Task, seed: int) -> list[str]:
    """Names of the row fields, other than the prompt, that the reward functions ask for.

    In nearly every task the first row has them all. If a function asks for more, all rows are searched, because each
    may have its own fields.
    """
    names = dict.fromkeys(batch_columns(rows_of_step(task, 1, 0, seed)))
    if not rewards.lacks(names):
        return list(names)
    return list(batch_columns([task[index] for index in range(len(task))]))
