"""Rows of a task on their way in, as prompts, and on their way out, as completions with rewards."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from smd_jax.learner.state import Metrics
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel
from smd_jax.tasks.graded import Graded
from smd_jax.tasks.rewards import Rewards
from smd_jax.tasks.task import Row, SteppedTask, Task, batch_columns, prompt_text, rows_of_step
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
    """Texts of a process's completions and what the reward functions say of them; `rows[i]` belongs to completion i.
    How many may fail is a matter of the whole batch: `Rewards.check_failures`.
    """
    completions = decode_completions(tokenizer, trajectory.response, trajectory.response_mask)
    tokens, mask = np.asarray(trajectory.response), np.asarray(trajectory.response_mask)
    completion_ids = [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
    prompts = [row["prompt"] for row in rows]
    return completions, rewards.grade_part(prompts, completions, completion_ids, batch_columns(rows))


def reward_columns(rewards: Rewards, task: Task | SteppedTask, config: LoopConfig) -> list[str]:
    """Names of the rows' fields other than the prompt, as far as the reward functions ask for them.

    The first row has them all, in nearly every task. Where a function asks for more, all rows are looked at, because
    each may have fields of its own; of a stream, those of the first step.
    """
    names = dict.fromkeys(batch_columns(rows_of_step(task, 1, 0, config.seed)))
    if not rewards.lacks(names):
        return list(names)
    if isinstance(task, SteppedTask):
        return list(batch_columns(rows_of_step(task, config.prompts_per_step, 0, config.seed)))
    return list(batch_columns([task[index] for index in range(len(task))]))


def part_metrics(name: str, part: np.ndarray) -> Metrics:
    """TRL's metrics of one reward function, over the completions that it has given a number: NaN without any, and a
    deviation (n - 1) of 0 for a single one."""
    numbers = part[~np.isnan(part)]
    mean = numbers.mean() if len(numbers) else np.nan
    deviation = numbers.std(ddof=1) if len(numbers) > 1 else mean - mean
    return {f"rewards/{name}/mean": jnp.float32(mean), f"rewards/{name}/std": jnp.float32(deviation)}
