"""What every token of a response adds to the reward of a problem, and what is still to come from there on.

A problem's reward is a mean over steps, so the task does give one per token. GRPO is told their sum alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smd_jax.losses.advantages import EPSILON
from smd_jax.tasks.task import Row
from study.problems import WALK_ENDS, Problem, Walk, tokenizer


def token_rewards(
    problem: Problem,
    rows: Sequence[Row],
    response: Int[np.ndarray, "batch R"],
    mask: Bool[np.ndarray, "batch R"],
) -> Float[np.ndarray, "batch R"]:
    """float32, `sum(axis=1)` is `Problem.grade`, as long as no token is drawn that has no character.

    Args:
      rows: one for each response.
    """
    tokens = tokenizer()
    if isinstance(problem, Walk):
        right = np.stack([_along_edges(row["prompt"], of_row) for row, of_row in zip(rows, response, strict=True)])
    else:
        answers = np.array([tokens.encode(row["answer"], add_special_tokens=False) for row in rows])
        right = np.zeros(response.shape, bool)
        right[:, : answers.shape[1]] = response[:, : answers.shape[1]] == answers
    right[:, problem.response_width - 1 :] = False  # what follows the last step is ignored
    steps = problem.response_width - 1
    return (right & mask).astype(np.float32) / steps


def _along_edges(prompt: str, response: np.ndarray) -> Bool[np.ndarray, " R"]:
    """As `Walk.grade` counts them."""
    graph, here = prompt[:-1], prompt[-1]
    right = []
    for step in tokenizer().convert_ids_to_tokens(response.tolist()):
        start, end = WALK_ENDS.get(step, (None, None))
        right.append(step in graph and start == here)
        here = end
    return np.array(right)


def to_go(rewards: Float[Array, "batch R"]) -> Float[Array, "batch R"]:
    """The reward of each token and of those after it."""
    return jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]


def relative_to_go(rewards: Float[Array, "batch R"], group_size: int) -> Float[Array, "batch R"]:
    """Reward to go less the group's mean at the same place, over the deviation of whole rewards in the batch.

    Not over the group's, as in GRPO: where completions earn the same in different places it is 0, and what differs
    along the way would be divided by it.
    """
    left = to_go(rewards).reshape(-1, group_size, rewards.shape[1])
    deviation = left[:, :, 0].std(ddof=1) + EPSILON
    return ((left - left.mean(1, keepdims=True)) / deviation).reshape(rewards.shape)


def leave_one_out_to_go(rewards: Float[Array, "batch R"], group_size: int) -> Float[Array, "batch R"]:
    """Reward to go less that of the *other* completions at the same place: their sum with ∇ log p is an unbiased
    estimate of the gradient of the mean reward."""
    left = to_go(rewards).reshape(-1, group_size, rewards.shape[1])
    centred = (left - left.mean(1, keepdims=True)) * (group_size / (group_size - 1))
    return centred.reshape(rewards.shape)
