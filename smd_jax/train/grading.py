"""Rows of a task as prompts, and completions with their rewards.

Each process grades the completions that it sampled. Then all processes gather completions and rewards of the whole
batch, so that group statistics, advantages and the choice of groups are the same everywhere. Tokens and masks stay on
the devices of their process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.devices.process_rows import Feeders
from smd_jax.devices.processes import gather_json
from smd_jax.learner.state import Metrics
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import completion_metrics, evicted_share, reward_metrics, token_mean
from smd_jax.model.protocol import LanguageModel
from smd_jax.tasks.graded import Failure, Graded
from smd_jax.tasks.rewards import Rewards
from smd_jax.tasks.task import Row, Task, batch_columns, prompt_text, rows_of_step
from smd_jax.text.prompts import PromptBatch, Tokenizer, decode_completions, encode_prompts, wants_special_tokens
from smd_jax.train.loop_config import LoopConfig


def encode_rows(model: LanguageModel, tokenizer: Tokenizer, rows: Sequence[Row], width: int) -> PromptBatch:
    """The prompts of a task's rows, `[rows, width]`.

    Raises:
      ValueError: for a prompt that is longer than `width`.
    """
    texts = [prompt_text(row, tokenizer) for row in rows]
    return encode_prompts(
        tokenizer,
        texts,
        width=width,
        max_positions=model.shape.max_positions,
        add_special_tokens=wants_special_tokens(tokenizer),
    )


def grade_part(
    rewards: Rewards, tokenizer: Tokenizer, rows: Sequence[Row], trajectory: Trajectory
) -> tuple[list[str], Graded]:
    """Texts and rewards of this process's completions; `rows[i]` belongs to completion i.

    The limit on failures concerns the whole batch: `check_failures`.
    """
    completions = decode_completions(tokenizer, trajectory.response, trajectory.response_mask)
    tokens, mask = np.asarray(trajectory.response), np.asarray(trajectory.response_mask)
    completion_ids = [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
    prompts = [row["prompt"] for row in rows]
    return completions, rewards.grade_part(prompts, completions, completion_ids, batch_columns(rows))


class GradedBatch(NamedTuple):
    """Completions of a process or of all processes.

    Attributes:
      completions: their texts. graded: their rewards.
      measured: numbers about the sampling. Times, named `time/…`, become the maximum over processes when they are
        gathered; everything else becomes the mean.
    """

    completions: list[str]
    graded: Graded
    measured: dict[str, float]


def gather_graded(feeders: Feeders, part: GradedBatch) -> GradedBatch:
    """The completions and rewards of all processes, in the order of the batch; all processes must call it."""
    if jax.process_count() == 1:
        return part
    graded = part.graded
    message = {
        "completions": part.completions,
        # JSON writes a Python float, which holds every float32, so that it reads back as the same number.
        "rewards": graded.rewards.tolist(),
        "parts": {name: values.tolist() for name, values in graded.parts.items()},
        "failures": [list(failure) for failure in graded.failures],
        "measured": part.measured,
    }
    messages = feeders.of_teams(gather_json(message))
    rows = len(messages[0]["rewards"])
    failures = [
        Failure(team * rows + row, *rest) for team, each in enumerate(messages) for row, *rest in each["failures"]
    ]
    names = messages[0]["parts"]
    whole = Graded(
        np.array([reward for each in messages for reward in each["rewards"]], np.float32),
        {name: np.array([x for each in messages for x in each["parts"][name]], np.float32) for name in names},
        tuple(failures),
    )
    measured = {name: _over_processes(name, [each["measured"][name] for each in messages]) for name in part.measured}
    return GradedBatch([text for each in messages for text in each["completions"]], whole, measured)


def rollout_metrics(
    trajectory: Trajectory, batch: GradedBatch, parts: Mapping[str, np.ndarray], group_size: int
) -> Metrics:
    """Rewards, lengths, entropy and evictions of a whole rollout.

    Args:
      parts: rewards of each function that is logged by name.
    """
    rewarded = batch.graded.rewarded_rows
    rewards = jnp.asarray(batch.graded.rewards)
    metrics: Metrics = {name: jnp.float32(number) for name, number in batch.measured.items()}
    metrics["rollout/tokens"] = jnp.sum(trajectory.response_mask)
    metrics |= reward_metrics(rewards, group_size, None if rewarded is None else jnp.asarray(rewarded))
    metrics["rewards/failed"] = jnp.float32(0 if rewarded is None else (~rewarded).sum())
    for name, part in parts.items():
        metrics |= part_metrics(name, part)
    completions = len(rewards)  # with several rows each, if their contexts are compacted
    tokens = trajectory.response_mask.reshape(completions, -1)
    metrics |= completion_metrics(tokens, trajectory.terminated[:: len(trajectory.terminated) // completions])
    assert trajectory.entropy is not None  # the sampler records it; None is for trajectories made by hand
    metrics["rollout/entropy"] = token_mean(trajectory.entropy, trajectory.response_mask)
    metrics["rollout/evicted_share"] = evicted_share(trajectory.mask.evicted_at, trajectory.valid)
    return metrics


def _over_processes(name: str, numbers: list[float]) -> float:
    return max(numbers) if name.startswith("time/") else float(np.mean(numbers))


def reward_columns(rewards: Rewards, task: Task, config: LoopConfig) -> list[str]:
    """Names of the row fields, other than the prompt, that the reward functions ask for.

    In nearly every task the first row has them all. If a function asks for more, all rows are searched, because each
    may have its own fields.
    """
    names = dict.fromkeys(batch_columns(rows_of_step(task, 1, 0, config.seed)))
    if not rewards.lacks(names):
        return list(names)
    return list(batch_columns([task[index] for index in range(len(task))]))


def part_metrics(name: str, part: np.ndarray) -> Metrics:
    """TRL's metrics of one reward function, over the completions that it has given a number.

    NaN without any such completion; the deviation (n - 1) of a single one is 0.
    """
    numbers = part[~np.isnan(part)]
    mean = numbers.mean() if len(numbers) else np.nan
    deviation = numbers.std(ddof=1) if len(numbers) > 1 else mean - mean
    return {f"rewards/{name}/mean": jnp.float32(mean), f"rewards/{name}/std": jnp.float32(deviation)}
